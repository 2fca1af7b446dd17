//! What a test of a proxy in front wants of a replica: what it received, and misbehaviour on demand.

use super::App;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tokio::task::yield_now;

/// Requests kept.
const KEPT: usize = 256;

/// How the replica misbehaves, as `POST /debug/fault` takes it: `{"mode":"slow","delay_ms":500}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "kebab-case")]
pub enum Fault {
    /// Not at all.
    #[default]
    None,
    /// A generation request is read and never answered.
    Hang,
    /// A generation request gets a 500 at once.
    Error500,
    /// The connection (over HTTP/2, the stream) is closed without an answer to a generation request.
    Reset,
    /// A stream is cut behind its first token, and whatever else a generation endpoint answers is cut as with [`Fault::Reset`].
    ResetMidStream,
    /// Generation requests wait before they are worked on.
    Slow {
        /// How long, in milliseconds of real time.
        delay_ms: u64,
    },
    /// The engines sleep, as after vLLM's `/sleep`: their metrics say so, requests wait, everything else answers.
    Sleep,
    /// As vLLM after SIGTERM: nobody can connect any more, and what is in flight stalls with its connection open. For good.
    Stall,
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
    stalled: watch::Sender<bool>,
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

    /// Becomes true with [`Fault::Stall`].
    pub(super) fn stalled(&self) -> watch::Receiver<bool> {
        self.stalled.subscribe()
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
    let fault = match serde_json::from_slice(&body) {
        Ok(fault) => fault,
        Err(error) => {
            let modes = "none|hang|error500|reset|reset-mid-stream|slow|sleep|stall";
            let message = format!("send {{\"mode\":\"{modes}\"}}, and \"delay_ms\" with slow: {error}\n");
            return (StatusCode::BAD_REQUEST, message).into_response();
        }
    };
    *lock(&app.debug.fault) = fault;
    app.ranks.sleep(matches!(fault, Fault::Sleep | Fault::Stall));
    if fault == Fault::Stall {
        app.debug.stalled.send_replace(true);
    }
    Json(fault).into_response()
}

/// The beginning of an answer and then an error, which cuts its connection; None if it is no stream.
pub(super) fn cut_mid_stream(response: Response) -> Option<Response> {
    let is_stream = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    is_stream.then(|| {
        // The server sends what it has when there is nothing more for the moment, and forgets it at an error.
        let cut = async {
            yield_now().await;
            Err(axum::Error::new(CutShort))
        };
        response.map(|body| Body::from_stream(body.into_data_stream().take(1).chain(stream::once(cut))))
    })
}

/// An answer, or its connection, is cut on purpose.
#[derive(Debug, thiserror::Error)]
#[error("cut on purpose")]
pub(super) struct CutShort;

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_body_is_a_fault_that_reads_back_or_refused(body in mutated(seeds("faults"))) {
            if let Ok(fault) = serde_json::from_slice::<Fault>(&body) {
                prop_assert_eq!(serde_json::from_slice::<Fault>(&serde_json::to_vec(&fault).unwrap()).unwrap(), fault);
            }
        }
    }
}
