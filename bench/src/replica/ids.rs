//! Names of requests as a client sees them.

use axum::http::HeaderMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A request's names.
#[derive(Clone, Debug)]
pub(super) struct RequestIds {
    /// Value of the answer's `x-request-id`: the client's own, or made up.
    pub(super) header: String,
    /// What the completion's `id` ends with: the client's `x-request-id` if it sent one.
    completion: String,
}

impl RequestIds {
    pub(super) fn new(headers: &HeaderMap) -> Self {
        match headers.get("x-request-id").and_then(|value| value.to_str().ok()) {
            Some(id) => Self { header: id.to_owned(), completion: id.to_owned() },
            None => {
                let header = format!("{}{}", random_hex(), random_hex());
                Self { header, completion: random_hex() }
            }
        }
    }

    /// The `id` of a chat completion, and of a message.
    pub(super) fn chat_completion(&self) -> String {
        format!("chatcmpl-{}", self.completion)
    }

    /// The `id` of a text completion.
    pub(super) fn text_completion(&self) -> String {
        format!("cmpl-{}", self.completion)
    }
}

/// 16 random hex digits. The standard library's hash keys are random for each process.
pub(super) fn random_hex() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{:016x}", RandomState::new().hash_one(NEXT.fetch_add(1, Ordering::Relaxed)))
}
