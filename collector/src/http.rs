//! The collector's own HTTP: health, metrics, the API and the status page.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use tokio::time::Instant;

use crate::api;
use crate::config::TokenSource;
use crate::fleet::Fleet;
use crate::status::{EnvoyStatus, PoolStatus, ReplicaStatus, Status};
use crate::telemetry::{self, Telemetry, state_name};

/// What every route may need.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) telemetry: Arc<Telemetry>,
    /// What a caller must show to change something; nobody may without it.
    pub(crate) token: Option<TokenSource>,
}

/// `/` the status page, `/api/v1/pools` the same as JSON, the rest of the API, `/metrics` and `/healthz`.
pub fn router(fleet: Arc<Fleet>, telemetry: Arc<Telemetry>, token: Option<TokenSource>) -> Router {
    Router::new()
        .merge(api::routes())
        .route("/", get(page))
        .route("/api/v1/pools", get(pools))
        .route("/metrics", get(metrics))
        // The collector is healthy while it answers: a replica or an Envoy that is away is no fault of its own.
        .route("/healthz", get(async || "ok\n"))
        .with_state(Shared { fleet, telemetry, token })
}

async fn pools(State(shared): State<Shared>) -> impl IntoResponse {
    ([(CACHE_CONTROL, "no-store")], Json(Status::of(&shared.fleet, Instant::now())))
}

async fn metrics(State(shared): State<Shared>) -> Response {
    match shared.telemetry.text() {
        Ok(text) => ([(CONTENT_TYPE, telemetry::CONTENT_TYPE)], text).into_response(),
        Err(error) => failed(&error),
    }
}

async fn page(State(shared): State<Shared>) -> Response {
    let headers = [
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // The page needs no script and nothing from elsewhere.
        (CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"),
    ];
    match Page(Status::of(&shared.fleet, Instant::now())).render() {
        Ok(html) => (headers, Html(html)).into_response(),
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
}

/// The status page; the template escapes what it is given.
#[derive(Template)]
#[template(path = "status.html")]
struct Page(Status);

impl Page {
    fn rows<'a>(&'a self, pool: &'a PoolStatus) -> impl Iterator<Item = Row> + 'a {
        pool.replicas.iter().map(|replica| Row::of(&pool.cluster, replica, &self.0.envoys))
    }

    fn age(&self, envoy: &EnvoyStatus) -> String {
        or_dash(envoy.answer_age_ms.map(seconds))
    }
}

/// One replica's cells.
struct Row {
    replica: String,
    state: &'static str,
    problem: String,
    running: u32,
    waiting: u32,
    kv_usage: String,
    hit_rate: String,
    in_flight: Vec<String>,
    age: String,
}

impl Row {
    fn of(cluster: &str, replica: &ReplicaStatus, envoys: &[EnvoyStatus]) -> Self {
        let report = &replica.report;
        let in_flight = envoys.iter().map(|envoy| envoy.in_flight(cluster, report.replica)).map(or_dash);
        Self {
            replica: report.replica.to_string(),
            state: state_name(report.state),
            problem: replica.problem.clone().unwrap_or_default(),
            running: report.running,
            waiting: report.waiting,
            kv_usage: percent(report.kv_usage),
            hit_rate: or_dash(report.prefix_hit_rate.map(percent)),
            in_flight: in_flight.collect(),
            age: or_dash(report.age_ms.map(seconds)),
        }
    }
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("–".to_owned(), |value| value.to_string())
}

fn percent(share: f32) -> String {
    format!("{:.0} %", share * 100.0)
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}
