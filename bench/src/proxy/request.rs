//! The requests: agents' chat requests of a given size, as bytes that are ready to be sent.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::fmt;

/// Where a request names its conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdPlace {
    /// In the header `x-session-id`.
    Header,
    /// In the body alone: in `metadata.user_id`, which stands at the end.
    Body,
}

impl fmt::Display for IdPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Header => "header",
            Self::Body => "body",
        })
    }
}

/// A request whose conversation can be changed in place.
#[derive(Clone, Debug)]
pub struct Request {
    bytes: Vec<u8>,
    place: IdPlace,
    id_at: usize,
}

/// An id is a UUID: its last 12 digits are the conversation's number.
const ID: &str = "5e551042-0000-4000-8000-000000000000";
const ID_DIGITS: usize = 12;

/// The id in the body of requests that name their conversation in a header.
const OTHER_ID: &str = "5e551042-ffff-4000-8000-ffffffffffff";

impl Request {
    /// A request with a body of about `body_bytes`: never less than a few hundred bytes, else at most a few bytes off.
    pub fn new(body_bytes: usize, id: IdPlace) -> Self {
        let (header, body_id) = match id {
            IdPlace::Header => (format!("x-session-id: {ID}\r\n"), OTHER_ID),
            IdPlace::Body => (String::new(), ID),
        };
        let body = body(body_bytes, body_id);
        let mut bytes = format!(
            "POST /v1/messages HTTP/1.1\r\nhost: models.example\r\nuser-agent: agent/1.0\r\naccept: application/json\r\n\
             content-type: application/json\r\nauthorization: Bearer none\r\nanthropic-version: 2023-06-01\r\n{header}\
             content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body.as_bytes());
        // The only place of these characters: the texts have no such digits.
        let id_at = memchr::memmem::find(&bytes, ID.as_bytes()).expect("the id was written above");
        Self { bytes, place: id, id_at }
    }

    /// Where it names its conversation.
    pub fn place(&self) -> IdPlace {
        self.place
    }

    /// The request's bytes as one of this conversation.
    pub fn of(&mut self, conversation: u32) -> &[u8] {
        let digits = format!("{conversation:0ID_DIGITS$x}");
        let end = self.id_at + ID.len();
        self.bytes[end - ID_DIGITS..end].copy_from_slice(digits.as_bytes());
        &self.bytes
    }
}

/// Pieces of what agents send: prose, code, shell output and JSON in JSON. Quotes, line ends and backslashes become escapes.
const TEXTS: [&str; 6] = [
    "The test fails because the cache is read before the lock is taken. I will move the read behind it and run the suite again; \
     if the timing is the reason, the failure should no longer show up in a hundred runs.\n",
    "fn parse(line: &str) -> Option<(&str, u64)> {\n    let (name, value) = line.split_once('=')?;\n    \
     Some((name.trim_matches('\"'), value.trim().parse().ok()?))\n}\n",
    "$ cargo test --quiet\nrunning 214 tests\n........................................\ntest result: ok. 214 passed; 0 failed\n",
    "{\"name\": \"read_file\", \"arguments\": {\"path\": \"src\\\\main.rs\", \"limit\": 400}}\n",
    "\tif (ptr == NULL) {\n\t\tfprintf(stderr, \"%s: out of memory\\n\", argv[0]);\n\t\treturn -1;\n\t}\n",
    "Größe und Rückgabewert stimmen überein — siehe § 4 der Beschreibung; la vérification n’est plus nécessaire.\n",
];

/// A body of about this size.
fn body(size: usize, id: &str) -> String {
    /// Where a message is full and the next begins.
    const MESSAGE_BYTES: usize = 6000;
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut messages: Vec<Value> = Vec::new();
    let mut missing = size.saturating_sub(json(&messages, id).len());
    let mut text = String::new();
    loop {
        let role = if messages.len().is_multiple_of(2) { "user" } else { "assistant" };
        let frame = written(&message(role, "")) + 1;
        let limit = rng.random_range(MESSAGE_BYTES / 4..MESSAGE_BYTES).min(missing.saturating_sub(frame));
        while written(&json!(text)) < limit {
            text.push_str(TEXTS.choose(&mut rng).expect("there are texts"));
        }
        while written(&json!(text)) > limit + 2 && text.pop().is_some() {}
        let message = message(role, &text);
        missing = missing.saturating_sub(written(&message) + 1);
        messages.push(message);
        text.clear();
        if missing < frame + 64 {
            return json(&messages, id);
        }
    }
}

fn message(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": [{ "type": "text", "text": text }] })
}

fn written(value: &Value) -> usize {
    value.to_string().len()
}

/// The body as text; the conversation's name stands at its end.
fn json(messages: &[Value], id: &str) -> String {
    let user = json!({ "device_id": "0".repeat(64), "account_uuid": "", "session_id": id }).to_string();
    format!(
        r#"{{"model":"qwen3-4b","max_tokens":1024,"system":[{{"type":"text","text":"You are a coding agent."}}],"messages":{},"metadata":{}}}"#,
        json!(messages),
        json!({ "user_id": user })
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_their_size_and_name_their_conversation_at_the_end() {
        for (size, place) in [(1 << 10, IdPlace::Body), (64 << 10, IdPlace::Body), (256 << 10, IdPlace::Header)] {
            let mut request = Request::new(size, place);
            let text = String::from_utf8(request.of(0xabc).to_vec()).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(body.len().abs_diff(size) <= size / 10, "{} for {size}", body.len());
            assert!(head.contains(&format!("content-length: {}", body.len())));
            let named = "5e551042-0000-4000-8000-000000000abc";
            assert_eq!(head.contains(&format!("x-session-id: {named}")), place == IdPlace::Header);

            let body: Value = serde_json::from_str(body).unwrap();
            assert!(body["messages"].as_array().unwrap().len() > size / 6100);
            let user: Value = serde_json::from_str(body["metadata"]["user_id"].as_str().unwrap()).unwrap();
            assert_eq!(user["session_id"] == named, place == IdPlace::Body);
        }
    }
}
