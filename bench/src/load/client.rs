//! One turn: a streamed chat completion, and when its first token came.

use super::LoadConfig;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::time::{Duration, Instant};

/// One message of the history.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Message {
    pub(super) role: &'static str,
    pub(super) content: String,
}

/// What a finished turn brought.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) output_tokens: u64,
    /// From sending the request to the first chunk with content; real time.
    pub(super) first_token: Duration,
    /// The answer's `x-homing-replica`.
    pub(super) replica: Option<String>,
}

/// Why a turn has no answer; displayed, it is the kind that errors are counted by.
#[derive(Debug, thiserror::Error)]
pub(super) enum TurnError {
    #[error("connect")]
    Connect,
    #[error("status_{0}")]
    Status(u16),
    /// The engine reported an error inside the stream.
    #[error("error_in_stream")]
    InStream,
    /// The stream ended or was cut before its end marker.
    #[error("stream_cut")]
    Cut,
    #[error("bad_chunk")]
    BadChunk,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: &'a [Message],
    max_tokens: usize,
    stream: bool,
    stream_options: StreamOptions,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: Delta<'a>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
}

/// The endpoint under load.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    http: reqwest::Client,
    url: String,
    model: String,
    max_tokens: usize,
}

impl Endpoint {
    pub(super) fn new(config: &LoadConfig) -> Result<Self> {
        Ok(Self {
            http: http_client()?,
            url: format!("{}/v1/chat/completions", config.url.trim_end_matches('/')),
            model: config.model.clone(),
            max_tokens: config.shape.max_tokens,
        })
    }

    /// Sends the history and reads the answer to its end.
    pub(super) async fn turn(&self, session: &str, messages: &[Message]) -> Result<Answer, TurnError> {
        let stream_options = StreamOptions { include_usage: true };
        let body = Body { model: &self.model, messages, max_tokens: self.max_tokens, stream: true, stream_options };
        let request = self.http.post(&self.url).header("x-session-id", session).json(&body);
        let sent = Instant::now();
        let mut response =
            request.send().await.map_err(|error| if error.is_connect() { TurnError::Connect } else { TurnError::Cut })?;
        if !response.status().is_success() {
            return Err(TurnError::Status(response.status().as_u16()));
        }
        let replica = response.headers().get("x-homing-replica").and_then(|value| value.to_str().ok()).map(str::to_owned);
        let mut stream = Stream::default();
        let mut first_token = None;
        while let Some(bytes) = response.chunk().await.map_err(|_| TurnError::Cut)? {
            stream.feed(&bytes)?;
            if first_token.is_none() && !stream.text.is_empty() {
                first_token = Some(sent.elapsed());
            }
        }
        match first_token {
            Some(first_token) if stream.done => {
                Ok(Answer { text: stream.text, output_tokens: stream.output_tokens, first_token, replica })
            }
            _ => Err(TurnError::Cut),
        }
    }
}

/// A client for load and for metrics: straight to the address it is given, whatever proxy the environment names.
pub(super) fn http_client() -> Result<reqwest::Client> {
    reqwest::Client::builder().no_proxy().build().context("cannot set up the HTTP client")
}

/// Server-sent events as they come in, in pieces of any size.
#[derive(Debug, Default)]
struct Stream {
    /// The beginning of a line whose end has not come yet.
    pending: Vec<u8>,
    text: String,
    output_tokens: u64,
    done: bool,
}

impl Stream {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), TurnError> {
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(bytes);
        let mut lines = pending.split_inclusive(|byte| *byte == b'\n');
        for line in &mut lines {
            if line.last() != Some(&b'\n') {
                self.pending = line.to_vec();
                break;
            }
            self.line(line.trim_ascii())?;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<(), TurnError> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii_start();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk<'_> = serde_json::from_slice(data).map_err(|_| TurnError::BadChunk)?;
        if chunk.error.is_some() {
            return Err(TurnError::InStream);
        }
        if let Some(content) = chunk.choices.first().and_then(|choice| choice.delta.content.as_ref()) {
            self.text.push_str(content);
        }
        if let Some(usage) = chunk.usage {
            self.output_tokens = usage.completion_tokens;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        ": a comment\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"caf\\u00e9 \"}}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"nöch\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\n",
        "data: [DONE]\n\n",
    );

    proptest! {
        #[test]
        fn a_stream_reads_the_same_however_it_is_cut(cuts in prop::collection::vec(0..STREAM.len(), 0..20)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut stream = Stream::default();
            for pair in cuts.windows(2) {
                stream.feed(&STREAM.as_bytes()[pair[0]..pair[1]]).unwrap();
            }
            prop_assert_eq!((stream.text.as_str(), stream.output_tokens, stream.done), ("café nöch", 7, true));
        }
    }

    #[test]
    fn an_error_in_the_stream_is_an_error() {
        let error = Stream::default().feed(b"data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n");
        assert!(matches!(error, Err(TurnError::InStream)));
    }
}
