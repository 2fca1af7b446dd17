//! Turns that fail are counted by kind, each kind with an example.

use super::fakes::{ANSWER, Endpoint, SPEED, config, eventually, replica, small};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::post;
use homing_bench::load::{self, LoadConfig, LoadReport};
use std::time::Duration;

async fn run(endpoint: &Endpoint, config: LoadConfig) -> LoadReport {
    let config = LoadConfig { workload: small(2), sessions: 2, duration: Duration::from_millis(400), ..config };
    load::run(LoadConfig { url: endpoint.url.clone(), speed: SPEED, ..config }).await.unwrap()
}

fn kinds(report: &LoadReport) -> Vec<&str> {
    assert!(report.errors.keys().eq(report.error_examples.keys()), "{report:?}");
    report.errors.keys().map(String::as_str).collect()
}

#[tokio::test]
async fn an_endpoint_that_is_not_there_is_counted_and_not_hammered() {
    // A port that was just free.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = LoadConfig { duration: Duration::from_millis(300), ..LoadConfig::new(format!("http://127.0.0.1:{port}")) };
    let report = load::run(LoadConfig { sessions: 2, speed: SPEED, ..config }).await.unwrap();
    assert_eq!(kinds(&report), ["connect"]);
    assert!((2..=8).contains(&report.errors["connect"]), "{report:?}");
    assert!(report.error_examples["connect"].contains("refused"), "{report:?}");
    assert_eq!((report.turns, report.ttfb_p50_s, report.prefix_hits), (0, None, None));
}

#[tokio::test]
async fn refusals_are_counted_by_status_with_the_engines_words() {
    let replica = replica().await;
    let config = LoadConfig { model: "other".to_owned(), workload: small(2), ..config(&replica) };
    let report = load::run(LoadConfig { duration: Duration::from_millis(500), ..config }).await.unwrap();
    assert_eq!(kinds(&report), ["status_404"]);
    assert!(report.error_examples["status_404"].contains("does not exist"), "{report:?}");
}

#[tokio::test]
async fn a_connection_closed_without_an_answer_is_a_reset() {
    let replica = replica().await;
    let fault = reqwest::Client::new().post(format!("{}/debug/fault", replica.url())).body(r#"{"mode":"reset"}"#);
    assert!(fault.send().await.unwrap().status().is_success());
    let config = LoadConfig { workload: small(2), duration: Duration::from_millis(500), ..config(&replica) };
    assert_eq!(kinds(&load::run(config).await.unwrap()), ["reset"]);
}

#[tokio::test]
async fn silence_is_a_timeout_before_the_answer_and_in_it() {
    let timeout = Duration::from_millis(100);
    let silent = Router::new().route("/v1/chat/completions", post(std::future::pending::<&str>));
    let report = run(&Endpoint::start(silent).await, LoadConfig { timeout, ..LoadConfig::new("") }).await;
    assert_eq!(kinds(&report), ["timeout"]);

    let begins = || async {
        let first = Bytes::from(ANSWER.split_inclusive("\n\n").next().unwrap());
        let then = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
        Body::from_stream(futures_util::StreamExt::chain(futures_util::stream::iter([Ok(first)]), then))
    };
    let begins = Router::new().route("/v1/chat/completions", post(begins));
    let report = run(&Endpoint::start(begins).await, LoadConfig { timeout, ..LoadConfig::new("") }).await;
    assert_eq!(kinds(&report), ["timeout"]);
}

#[tokio::test]
async fn an_answer_without_its_end_is_a_cut_stream() {
    let whole = Router::new().route("/v1/chat/completions", post(|| async { ANSWER.split("data: [DONE]").next().unwrap() }));
    let report = run(&Endpoint::start(whole).await, LoadConfig::new("")).await;
    assert_eq!(kinds(&report), ["stream_cut"]);
    assert_eq!(report.turns, 0);
}

#[tokio::test]
async fn an_engine_that_dies_says_so_in_the_stream() {
    let error = "data: {\"error\":{\"message\":\"EngineCore encountered an issue.\",\"code\":500}}\n\ndata: [DONE]\n\n";
    let endpoint = Endpoint::start(Router::new().route("/v1/chat/completions", post(move || async move { error }))).await;
    let report = run(&endpoint, LoadConfig::new("")).await;
    assert_eq!(kinds(&report), ["error_in_stream"]);
    assert!(report.error_examples["error_in_stream"].contains("EngineCore"), "{report:?}");
}

#[tokio::test]
async fn nothing_is_left_on_the_endpoint_after_the_run() {
    let replica = replica().await;
    let slow = LoadConfig { sessions: 3, duration: Duration::from_millis(200), drain: Duration::ZERO, ..config(&replica) };
    let report = load::run(slow).await.unwrap();
    assert!(report.turns_unfinished <= 3, "{report:?}");
    eventually("the engine to be idle", || async {
        let text = reqwest::get(format!("{}/metrics", replica.url())).await.unwrap().text().await.unwrap();
        text.lines().any(|line| line.starts_with("vllm:num_requests_running{") && line.ends_with(" 0.0"))
    })
    .await;
}
