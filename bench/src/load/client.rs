//! One call: a streamed request, and when its parts came.

use super::LoadConfig;
use super::api::{Api, Dialect, Message, Speaker};
use super::error::{ErrorKind, TurnError};
use super::stream::Stream;
use anyhow::{Context, Result, ensure};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

/// What a call brought. Times are real.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) output_tokens: u64,
    /// From when the call was due to the first thing generated; none if the client left before.
    pub(super) first_token: Option<Duration>,
    /// From when the call was due to the end.
    pub(super) duration: Duration,
    /// Times between output tokens: a read that brought n of them after t is n times t/n.
    pub(super) gaps: Vec<(Duration, u64)>,
    /// The replica that the answer's header names.
    pub(super) replica: Option<String>,
    /// Whether the client left before the end.
    pub(super) left: bool,
}

/// When a client leaves before the end of the answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leave {
    /// When it has so many tokens.
    AfterTokens(u64),
    /// At this time, whatever it has.
    At(Instant),
}

/// The endpoint under load.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    http: reqwest::Client,
    url: String,
    dialect: Dialect,
    replica_header: HeaderName,
}

impl Endpoint {
    pub(super) fn new(config: &LoadConfig) -> Result<Self> {
        ensure!(
            config.url.starts_with("http://"),
            "--url is {}: give one that begins with http:// (this program has no TLS; drive the plain listener)",
            config.url
        );
        let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        if let Some(key) = &config.api_key {
            let mut value =
                HeaderValue::from_str(&format!("Bearer {key}")).context("the API key has characters no header may have")?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let dialect =
            Dialect { api: config.api, style: config.header_style, model: config.model.clone(), ignore_eos: config.ignore_eos };
        Ok(Self {
            http: client_builder().default_headers(headers).read_timeout(config.timeout).build().context(NO_CLIENT)?,
            url: format!("{}{}", config.url.trim_end_matches('/'), dialect.path()),
            dialect,
            replica_header: config.replica_header.parse().context("--replica-header is no header's name")?,
        })
    }

    /// Sends the messages and reads the answer to its end, or until the client leaves. Times count from when the call was due.
    pub(super) async fn call(
        &self,
        speaker: &Speaker,
        messages: &[Message<'_>],
        max_tokens: usize,
        due: Instant,
        leave: Option<Leave>,
    ) -> Result<Answer, TurnError> {
        let mut reading = Reading::new(self.dialect.api, due);
        let (leave_at, leave_after) = match leave {
            Some(Leave::At(time)) => (Some(time), None),
            Some(Leave::AfterTokens(tokens)) => (None, Some(tokens)),
            None => (None, None),
        };
        let exchange = self.exchange(speaker, messages, max_tokens, leave_after, &mut reading);
        // Dropping the exchange closes its connection, which is how a client leaves.
        let left = match leave_at {
            Some(time) => timeout_at(time.into(), exchange).await.unwrap_or(Ok(true))?,
            None => exchange.await?,
        };
        Ok(reading.answer(left))
    }

    /// Reads into `reading`; whether the client left before the end.
    async fn exchange(
        &self,
        speaker: &Speaker,
        messages: &[Message<'_>],
        max_tokens: usize,
        leave_after: Option<u64>,
        reading: &mut Reading,
    ) -> Result<bool, TurnError> {
        let body = self.dialect.body(speaker, messages, max_tokens);
        let body = body.map_err(|error| TurnError::new(ErrorKind::BadChunk, error.to_string()))?;
        let request = self.dialect.style.apply(self.http.post(&self.url), speaker).body(body);
        let mut response = request.send().await.map_err(|error| TurnError::unanswered(&error))?;
        if !response.status().is_success() {
            let kind = ErrorKind::Status(response.status().as_u16());
            let beginning = response.chunk().await.ok().flatten().unwrap_or_default();
            return Err(TurnError::new(kind, String::from_utf8_lossy(&beginning)));
        }
        let replica = response.headers().get(&self.replica_header);
        reading.replica = replica.and_then(|value| value.to_str().ok()).map(str::to_owned);
        while let Some(bytes) = response.chunk().await.map_err(|error| TurnError::broken_off(&error))? {
            reading.feed(&bytes)?;
            if leave_after.is_some_and(|tokens| reading.stream.pieces >= tokens) && !reading.stream.done {
                return Ok(true);
            }
        }
        if reading.stream.done { Ok(false) } else { Err(TurnError::new(ErrorKind::StreamCut, "the answer has no end marker")) }
    }
}

/// An answer as it is read.
struct Reading {
    stream: Stream,
    due: Instant,
    /// When the last thing generated came.
    last: Instant,
    first_token: Option<Duration>,
    gaps: Vec<(Duration, u64)>,
    replica: Option<String>,
}

impl Reading {
    fn new(api: Api, due: Instant) -> Self {
        Self { stream: Stream::new(api), due, last: due, first_token: None, gaps: Vec::new(), replica: None }
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), TurnError> {
        let before = self.stream.pieces;
        self.stream.feed(bytes)?;
        let new = self.stream.pieces - before;
        if new > 0 {
            let now = Instant::now();
            match self.first_token {
                // Tokens that came together with the first took no time that could be told from its.
                None => self.first_token = Some(now - self.due),
                Some(_) => self.gaps.push(((now - self.last).div_f64(new as f64), new)),
            }
            self.last = now;
        }
        Ok(())
    }

    fn answer(self, left: bool) -> Answer {
        let duration = self.due.elapsed();
        Answer {
            output_tokens: self.stream.output_tokens(),
            text: self.stream.text,
            // An answer may be empty: then its end is the first that came.
            first_token: self.first_token.or((!left).then_some(duration)),
            duration,
            gaps: self.gaps,
            replica: self.replica,
            left,
        }
    }
}

pub(super) const NO_CLIENT: &str = "cannot set up the HTTP client";

/// A client for load or for metrics: straight to the address it is given, whatever proxy the environment names.
pub(super) fn client_builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder().no_proxy()
}
