//! The endpoints, and what every answer has in common.

use super::debug::{self, Cut, Fault};
use super::error::{self, ApiError};
use super::ids::{self, RequestIds};
use super::metrics::{self, Exposition};
use super::{App, anthropic, chat, completions, responses};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{CONTENT_TYPE, SERVER, VARY};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use std::future::pending;
use std::time::Duration;
use tokio::time::sleep;

/// Bytes of a request's body that are accepted.
const BODY_LIMIT: usize = 40 << 20;

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

pub(super) fn router(app: App) -> Router {
    Router::new()
        .route(CHAT, post(chat::chat_completions))
        .route(COMPLETIONS, post(completions::completions))
        .route(RESPONSES, post(responses::responses))
        .route("/tokenize", post(completions::tokenize))
        .route(MESSAGES, post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(models))
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/ping", get(|| async { StatusCode::OK }).post(|| async { StatusCode::OK }))
        .route("/version", get(version))
        .route("/metrics", get(exposition))
        .route("/debug/requests", get(debug::requests))
        .route("/debug/fault", post(debug::set_fault))
        .fallback(|| async { error::detail(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async { error::detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed") })
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(app.clone(), every_request))
        .with_state(app)
}

/// Reads the body, records the request, misbehaves if told to, and gives the answer vLLM's headers.
async fn every_request(State(app): State<App>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_LIMIT).await else {
        return error::detail(StatusCode::PAYLOAD_TOO_LARGE, "Request body too large");
    };
    let path = parts.uri.path();
    // A poller would push everything else out of the record.
    if path != "/metrics" && !path.starts_with("/debug/") {
        app.debug.record(&parts.method, &parts.uri, &parts.headers, &body);
    }
    let generates = [CHAT, MESSAGES, COMPLETIONS, RESPONSES].contains(&path);
    let fault = if generates { app.debug.fault() } else { Fault::None };
    let ids = RequestIds::new(&parts.headers);
    parts.extensions.insert(ids.clone());
    let answer = next.run(Request::from_parts(parts, Body::from(body)));
    let mut response = match fault {
        Fault::None | Fault::Sleep | Fault::Stall => answer.await,
        Fault::Slow { delay_ms } => {
            sleep(Duration::from_millis(delay_ms)).await;
            answer.await
        }
        Fault::Hang => pending().await,
        Fault::Error500 => ApiError::Engine.openai(app.version),
        Fault::Reset => cut(),
        Fault::ResetMidStream => debug::cut_mid_stream(answer.await).unwrap_or_else(cut),
    };
    let headers = response.headers_mut();
    headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(VARY, HeaderValue::from_static("Origin"));
    if let Ok(id) = HeaderValue::from_str(&ids.header) {
        headers.insert("x-request-id", id);
    }
    response
}

/// An answer that is never sent.
fn cut() -> Response {
    let mut response = Response::default();
    response.extensions_mut().insert(Cut);
    response
}

async fn version(State(app): State<App>) -> Response {
    super::json_response(StatusCode::OK, format!(r#"{{"version":"{}"}}"#, app.version.number()))
}

async fn exposition(State(app): State<App>) -> Response {
    let Some(observed) = app.ranks.observe().await else { return ApiError::Engine.openai(app.version) };
    let exposition = Exposition {
        version: app.version,
        model: &app.model,
        config: &app.config,
        max_model_len: app.max_model_len,
        first_engine: app.first_engine_label,
        started_at: app.started_at,
    };
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], exposition.render(&observed)).into_response()
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [Model<'a>; 1],
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: (),
    max_model_len: usize,
    permission: [Permission; 1],
}

#[derive(Serialize)]
struct Permission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: (),
    is_blocking: bool,
}

async fn models(State(app): State<App>) -> Response {
    let created = super::unix_time() as u64;
    let permission = Permission {
        id: format!("modelperm-{}", ids::random_hex()),
        object: "model_permission",
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: (),
        is_blocking: false,
    };
    let model = Model {
        id: &app.model,
        object: "model",
        created,
        owned_by: "vllm",
        root: &app.model,
        parent: (),
        max_model_len: app.max_model_len,
        permission: [permission],
    };
    super::json_response(StatusCode::OK, super::json(&ModelList { object: "list", data: [model] }))
}
