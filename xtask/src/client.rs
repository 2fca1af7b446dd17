//! A client's requests, and how they end.

use reqwest::{Client, Response};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::stack::MODEL;

/// A chat request that asks for this many tokens.
pub fn chat_body(text: &str, max_tokens: u32) -> Value {
    json!({ "model": MODEL, "max_tokens": max_tokens, "messages": [{ "role": "user", "content": text }] })
}

/// What a turn's answer says of its routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The status.
    pub status: u16,
    /// `x-homing-outcome`.
    pub outcome: String,
    /// `x-homing-replica`.
    pub replica: String,
    /// `x-homing-source`.
    pub source: String,
}

impl Turn {
    /// Reads it off an answer.
    pub fn of(response: &Response) -> Self {
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        Self {
            status: response.status().as_u16(),
            outcome: header("x-homing-outcome"),
            replica: header("x-homing-replica"),
            source: header("x-homing-source"),
        }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// With its whole answer.
    Whole,
    /// The client wanted no more of its answer.
    GivenUp,
    /// No connection to the proxy: it never left.
    NoConnection,
    /// The connection broke.
    Broken,
    /// Otherwise: with an error of the proxy's or a replica's.
    Failed(String),
}

/// Sends a request of a conversation; the answer has begun when this returns.
///
/// # Errors
/// How it ended, if it has no answer.
pub async fn begin(client: &Client, url: &str, conversation: &str, body: &Value) -> Result<Response, End> {
    let request = client.post(url).header("x-session-id", conversation).json(body);
    request.send().await.map_err(|error| if error.is_connect() { End::NoConnection } else { End::Broken })
}

/// Reads an answer to its end.
pub async fn read(response: Response, streamed: bool) -> End {
    let status = response.status().as_u16();
    let Ok(body) = response.bytes().await else { return End::Broken };
    let whole = if streamed { body.ends_with(b"data: [DONE]\n\n") } else { serde_json::from_slice::<Value>(&body).is_ok() };
    match (status, whole) {
        (200, true) => End::Whole,
        (200, false) => End::Broken,
        (status, _) => End::Failed(format!("{status} {}", String::from_utf8_lossy(&body))),
    }
}

/// One request, from its sending to its end.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// When it was sent.
    pub sent: Instant,
    /// When its answer began, and what that said of its routing.
    pub begun: Option<(Instant, Turn)>,
    /// When it ended.
    pub ended: Instant,
    /// How.
    pub end: End,
}

impl Exchange {
    /// Sends a chat request of a conversation and reads its answer to the end.
    pub async fn of(client: &Client, url: &str, conversation: &str, mut body: Value, streamed: bool) -> Self {
        body["stream"] = json!(streamed);
        let (sent, mut begun) = (Instant::now(), None);
        let end = match begin(client, url, conversation, &body).await {
            Err(end) => end,
            Ok(response) => {
                begun = Some((Instant::now(), Turn::of(&response)));
                read(response, streamed).await
            }
        };
        Self { sent, begun, ended: Instant::now(), end }
    }

    /// What its answer said of its routing, if it has one.
    pub fn turn(&self) -> Option<&Turn> {
        self.begun.as_ref().map(|(_, turn)| turn)
    }

    /// Whether it came to its whole answer.
    pub fn is_whole(&self) -> bool {
        self.end == End::Whole
    }
}
