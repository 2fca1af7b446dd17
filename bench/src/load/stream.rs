//! Streamed answers in both dialects, read from server-sent events in pieces of any size.
//!
//! Sources: OpenAI's [chat completion chunk](https://platform.openai.com/docs/api-reference/chat-streaming) and Anthropic's
//! [streaming messages](https://docs.anthropic.com/en/docs/build-with-claude/streaming).

use super::api::Api;
use super::error::{ErrorKind, TurnError};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// An answer as it comes in.
#[derive(Debug)]
pub(super) struct Stream {
    api: Api,
    /// The beginning of a line whose end has not come yet.
    pending: Vec<u8>,
    /// The visible text: what goes into the history.
    pub(super) text: String,
    /// Events with something generated: text, reasoning or a tool call. About one a token.
    pub(super) pieces: u64,
    /// Output tokens by the engine's own count, once it has told them.
    counted: Option<u64>,
    /// Whether the end marker has come.
    pub(super) done: bool,
}

impl Stream {
    pub(super) fn new(api: Api) -> Self {
        Self { api, pending: Vec::new(), text: String::new(), pieces: 0, counted: None, done: false }
    }

    /// Output tokens: the engine's count, or else the pieces.
    pub(super) fn output_tokens(&self) -> u64 {
        self.counted.unwrap_or(self.pieces)
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// An error that the engine reports, or an event that is none of the API's.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(), TurnError> {
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(bytes);
        let mut begin = 0;
        for end in memchr::memchr_iter(b'\n', &pending) {
            self.line(pending[begin..end].trim_ascii())?;
            begin = end + 1;
        }
        pending.drain(..begin);
        self.pending = pending;
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<(), TurnError> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii_start();
        match self.api {
            Api::Openai if data == b"[DONE]" => self.done = true,
            Api::Openai => self.chunk(parse(data)?)?,
            Api::Anthropic => self.event(&parse(data)?)?,
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: Chunk<'_>) -> Result<(), TurnError> {
        if let Some(error) = chunk.error {
            return Err(TurnError::new(ErrorKind::InStream, error.get()));
        }
        if let Some(Choice { delta }) = chunk.choices.into_iter().next() {
            let texts = [&delta.content, &delta.reasoning, &delta.reasoning_content];
            let generated = texts.into_iter().flatten().any(|text| !text.is_empty()) || delta.tool_calls.is_some();
            self.pieces += u64::from(generated);
            self.text.push_str(delta.content.as_deref().unwrap_or_default());
        }
        if let Some(usage) = chunk.usage {
            self.counted = Some(usage.completion_tokens);
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), TurnError> {
        match &*event.kind {
            "error" => {
                return Err(TurnError::new(ErrorKind::InStream, event.error.map_or("no details", RawValue::get)));
            }
            "content_block_delta" => {
                if let Some(delta) = &event.delta {
                    let texts = [&delta.text, &delta.thinking, &delta.partial_json];
                    self.pieces += u64::from(texts.into_iter().flatten().any(|text| !text.is_empty()));
                    self.text.push_str(delta.text.as_deref().unwrap_or_default());
                }
            }
            "message_delta" => self.counted = event.usage.as_ref().and_then(|usage| usage.output_tokens).or(self.counted),
            "message_stop" => self.done = true,
            // `message_start`, `content_block_start`, `content_block_stop`, `ping` and what may be added.
            _ => {}
        }
        Ok(())
    }
}

fn parse<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Result<T, TurnError> {
    serde_json::from_slice(data)
        .map_err(|error| TurnError::new(ErrorKind::BadChunk, format!("{error} in {}", String::from_utf8_lossy(data))))
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
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
    #[serde(borrow)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    tool_calls: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    delta: Option<EventDelta<'a>>,
    usage: Option<EventUsage>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct EventDelta<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    thinking: Option<Cow<'a, str>>,
    #[serde(borrow)]
    partial_json: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct EventUsage {
    output_tokens: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    const CHAT: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        ": a comment\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"caf\\u00e9 \"}}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"nöch\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\n",
        "data: [DONE]\n\n",
    );

    const MESSAGES: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":0}}}\n\n",
        "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0}\n\n",
        "data: {\"type\":\"ping\"}\n\n",
        "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"caf\\u00e9 \"},\"index\":0}\r\n\r\n",
        "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"nöch\"},\"index\":0}\n\n",
        "data: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
        "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":7}}\n\n",
        "data: {\"type\":\"message_stop\"}\n\n",
    );

    fn read(api: Api, parts: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<Stream, TurnError> {
        let mut stream = Stream::new(api);
        parts.into_iter().try_for_each(|part| stream.feed(part.as_ref()))?;
        Ok(stream)
    }

    proptest! {
        #[test]
        fn a_stream_reads_the_same_however_it_is_cut(cuts in prop::collection::vec(0..2000usize, 0..20)) {
            for (api, text) in [(Api::Openai, CHAT), (Api::Anthropic, MESSAGES)] {
                let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % text.len()).collect();
                cuts.extend([0, text.len()]);
                cuts.sort_unstable();
                let stream = read(api, cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]])).unwrap();
                prop_assert_eq!((stream.text.as_str(), stream.pieces, stream.output_tokens(), stream.done), ("café nöch", 2, 7, true));
            }
        }

        #[test]
        fn any_stream_is_read_or_refused_the_same_however_it_is_cut(
            chat in mutated(seeds("streams-openai")),
            messages in mutated(seeds("streams-anthropic")),
            cut: prop::sample::Index,
        ) {
            for (api, bytes) in [(Api::Openai, chat), (Api::Anthropic, messages)] {
                let (begin, end) = bytes.split_at(cut.index(bytes.len() + 1));
                match (read(api, [&bytes[..]]), read(api, [begin, end])) {
                    (Ok(whole), Ok(parts)) => {
                        let seen = |stream: &Stream| (stream.text.clone(), stream.pieces, stream.output_tokens(), stream.done);
                        prop_assert_eq!(seen(&whole), seen(&parts));
                        prop_assert!(whole.text.len() <= bytes.len() && whole.pieces <= bytes.len() as u64);
                    }
                    (Err(whole), Err(parts)) => {
                        prop_assert!(whole.example.chars().count() <= 300);
                        prop_assert_eq!(whole.to_string(), parts.to_string());
                    }
                    (whole, parts) => prop_assert!(false, "{:?} and {:?}", whole, parts),
                }
            }
        }
    }

    #[test]
    fn an_error_in_the_stream_is_an_error_with_its_text() {
        let chat = read(Api::Openai, ["data: {\"error\":{\"message\":\"broken engine\",\"code\":500}}\n"]).unwrap_err();
        let messages =
            read(Api::Anthropic, ["data: {\"type\":\"error\",\"error\":{\"message\":\"broken engine\"}}\n"]).unwrap_err();
        for error in [chat, messages] {
            assert_eq!(error.kind, ErrorKind::InStream);
            assert!(error.example.contains("broken engine"), "{error}");
        }
    }

    #[test]
    fn reasoning_and_tool_calls_are_generated_and_no_part_of_the_text() {
        let chat =
            "data: {\"choices\":[{\"delta\":{\"reasoning\":\"hm\"}}]}\ndata: {\"choices\":[{\"delta\":{\"tool_calls\":[]}}]}\n";
        let stream = read(Api::Openai, [chat]).unwrap();
        assert_eq!((stream.text.as_str(), stream.pieces, stream.output_tokens()), ("", 2, 2));
    }
}
