//! The collector's own HTTP: health, metrics, the console and its API.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use crate::api::{self, Changes};
use crate::console::{self, Live};
use crate::telemetry::{self, Telemetry};

/// `/` the console, `/api/v1/...` what it shows as JSON and what can be changed, `/metrics` and `/healthz`. `allowed_hosts` are names that
/// a `Host` header may have besides `localhost` and IP addresses.
pub fn router(live: Arc<Live>, telemetry: Arc<Telemetry>, changes: Changes, allowed_hosts: Vec<String>) -> Router {
    let metrics = Router::new().route("/metrics", get(metrics)).with_state(telemetry);
    let guarded = console::routes(live).merge(api::routes(changes)).merge(metrics);
    console::guarded(guarded, allowed_hosts)
        // The collector is healthy while it answers: a replica or an Envoy that is away is no fault of its own.
        .route("/healthz", get(async || "ok\n"))
}

async fn metrics(State(telemetry): State<Arc<Telemetry>>) -> Response {
    match telemetry.text() {
        Ok(text) => ([(CONTENT_TYPE, telemetry::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// A request that was not done, with what to do: `{"error": ...}`.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) StatusCode, pub(crate) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, error) = self;
        let body = Json(serde_json::json!({ "error": error }));
        match status {
            StatusCode::UNAUTHORIZED => (status, [(WWW_AUTHENTICATE, "Bearer")], body).into_response(),
            status => (status, body).into_response(),
        }
    }
}
