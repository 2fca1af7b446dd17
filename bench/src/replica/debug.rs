//! What a test of a proxy in front wants of a replica: what it received, and misbehaviour on demand.

use super::App;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Requests kept.
const KEPT: usize = 256;

/// How the generation endpoints misbehave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// Not at all.
    #[default]
    None,
    /// The request is read and never answered.
    Hang,
    /// A 500 at once.
    Error500,
    /// The connection (over HTTP/2, the stream) is closed without an answer.
    Reset,
}

/// A request as it was received.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Received {
    /// The method.
    pub method: String,
    /// The path and query.
    pub path: String,
    /// Names and values in the order received; names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body's bytes.
    pub body_length: usize,
    /// The body's SHA-256, in hex.
    pub body_sha256: String,
}

/// Marks an answer that must not be sent: the connection is closed instead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut;

#[derive(Debug, Default)]
pub(super) struct Debug {
    received: Mutex<VecDeque<Received>>,
    fault: Mutex<Fault>,
}

impl Debug {
    pub(super) fn record(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: &Bytes) {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let received = Received {
            method: method.to_string(),
            path: uri.path_and_query().map_or_else(|| uri.path().to_owned(), ToString::to_string),
            headers: headers.iter().map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect(),
            body_length: body.len(),
            body_sha256: Sha256::digest(body).iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            }),
        };
        let mut kept = lock(&self.received);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(received);
    }

    pub(super) fn fault(&self) -> Fault {
        *lock(&self.fault)
    }
}

/// A panic elsewhere does not spoil what is kept here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `GET /debug/requests`: the last requests, oldest first.
pub(super) async fn requests(State(app): State<App>) -> Json<Vec<Received>> {
    Json(lock(&app.debug.received).iter().cloned().collect())
}

/// `POST /debug/fault`.
pub(super) async fn set_fault(State(app): State<App>, body: Bytes) -> Response {
    #[derive(Serialize, Deserialize)]
    struct Mode {
        mode: Fault,
    }
    match serde_json::from_slice::<Mode>(&body) {
        Ok(mode) => {
            *lock(&app.debug.fault) = mode.mode;
            Json(mode).into_response()
        }
        Err(error) => {
            (StatusCode::BAD_REQUEST, format!("send {{\"mode\":\"none|hang|error500|reset\"}}: {error}\n")).into_response()
        }
    }
}
