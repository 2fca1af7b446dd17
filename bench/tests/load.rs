//! The load generator against stand-in replicas, and against an endpoint that names replicas as Homing does.

use axum::Json;
use axum::routing::post;
use homing_bench::load::{self, LoadConfig, SessionShape};
use homing_bench::replica::{Replica, ReplicaConfig};
use serde_json::Value;
use std::time::Duration;

async fn replica(speed: f64) -> Replica {
    Replica::start(ReplicaConfig { speed, ..ReplicaConfig::default() }).await.unwrap()
}

fn config(replica: &Replica, speed: f64) -> LoadConfig {
    LoadConfig { replicas: vec![replica.url()], speed, duration: Duration::from_secs(2), ..LoadConfig::new(replica.url()) }
}

/// Prefix hits in per cent after so many turns, if one session of the default shape follows the other on one replica. By hand: each
/// message costs three tokens to open, its role's (`user` 1, `system` 2, `assistant` 3), and three to close; a prompt ends with an opened
/// answer.
fn hits_by_hand(turns: usize) -> f64 {
    let shape = SessionShape::default();
    let system = 3 + 2 + shape.system_tokens + 3;
    let first = system + (3 + 1 + shape.first_tokens + 3) + (3 + 3);
    let (mut prompt, mut all, mut cached) = (0, 0, 0);
    for turn in 0..turns {
        if turn % shape.turns == 0 {
            // What sessions have in common: the system prompt and the opening of the first message.
            cached += if turn == 0 { 0 } else { (system + 3 + 1) / 16 * 16 };
            prompt = first;
        } else {
            // All of the turn before but the last token of its answer, in whole blocks.
            cached += (prompt + shape.max_tokens - 1) / 16 * 16;
            prompt += shape.max_tokens + 3 + (3 + 1 + shape.turn_tokens + 3) + (3 + 3);
        }
        all += prompt;
    }
    100.0 * cached as f64 / all as f64
}

#[tokio::test]
async fn one_session_on_one_replica_has_exactly_the_hits_that_its_shape_gives() {
    let replica = replica(400.0).await;
    let report = load::run(LoadConfig { sessions: 1, ..config(&replica, 400.0) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    assert!(report.sessions_completed >= 2, "{report:?}");
    assert!((83.0..88.0).contains(&hits_by_hand(report.turns)), "{report:?}");
    // The engine has counted the turn that was cut, or not yet.
    let (hits, expected) = (report.prefix_hits.unwrap(), [hits_by_hand(report.turns), hits_by_hand(report.turns + 1)]);
    assert!(expected.iter().any(|expected| (hits - expected).abs() < 1e-6), "{expected:?} {report:?}");
    assert!(report.replicas_busy.unwrap() > 0.5, "{report:?}");
    assert_eq!(report.stayed, None, "nobody names replicas here");
    assert!(report.ttfb_p50_s.unwrap() <= report.ttfb_p95_s.unwrap());
}

#[tokio::test]
async fn more_sessions_than_the_cache_holds_lose_their_hits() {
    let replica = replica(400.0).await;
    let report = load::run(LoadConfig { sessions: 8, ..config(&replica, 400.0) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    assert!(report.prefix_hits.unwrap() < 75.0, "{report:?}");
}

/// Serves each session's first two turns on `a` and the third on `b`; the answer is one chunk.
async fn moves_after_two_turns(Json(body): Json<Value>) -> ([(&'static str, &'static str); 1], &'static str) {
    // A system prompt, then a message and an answer a turn.
    let turn = body["messages"].as_array().unwrap().len() / 2;
    let stream = "data: {\"choices\":[{\"delta\":{\"content\":\"yes\"}}]}\n\n\
                  data: {\"choices\":[],\"usage\":{\"completion_tokens\":5}}\n\ndata: [DONE]\n\n";
    ([("x-homing-replica", if turn <= 2 { "a" } else { "b" })], stream)
}

#[tokio::test]
async fn turns_have_stayed_if_the_replica_of_the_turn_before_served_them() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().route("/v1/chat/completions", post(moves_after_two_turns));
    let server = tokio::spawn(axum::serve(listener, router).into_future());
    let shape = SessionShape { system_tokens: 1, first_tokens: 1, turns: 3, ..SessionShape::default() };
    let config = LoadConfig { shape, sessions: 1, duration: Duration::from_secs(1), ..LoadConfig::new(url) };
    let report = load::run(config).await.unwrap();
    server.abort();
    assert!(report.sessions_completed >= 10, "{report:?}");
    // One of two in each whole session; the last may have been cut between them.
    assert!((report.stayed.unwrap() - 50.0).abs() < 3.0, "{report:?}");
    assert!((report.output_tokens_per_minute / 60.0 * report.duration_s / report.turns as f64 - 5.0).abs() < 1e-6, "{report:?}");
}

#[tokio::test]
async fn an_endpoint_that_is_not_there_is_counted_and_not_hammered() {
    // A port that was just free.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = LoadConfig { duration: Duration::from_millis(300), ..LoadConfig::new(format!("http://127.0.0.1:{port}")) };
    let report = load::run(LoadConfig { sessions: 2, ..config }).await.unwrap();
    let refused = report.errors["connect"];
    assert!((2..=8).contains(&refused), "{report:?}");
    assert_eq!((report.turns, report.ttfb_p50_s, report.prefix_hits), (0, None, None));
}

#[tokio::test]
async fn refusals_are_counted_by_status() {
    let replica = replica(400.0).await;
    let shape = SessionShape { system_tokens: 1, first_tokens: 1, ..SessionShape::default() };
    let config = LoadConfig { model: "other".to_owned(), shape, ..config(&replica, 400.0) };
    let report = load::run(LoadConfig { duration: Duration::from_millis(500), ..config }).await.unwrap();
    assert_eq!(report.errors.keys().collect::<Vec<_>>(), ["status_404"]);
}

#[tokio::test]
async fn engines_that_cannot_be_read_are_an_error_that_says_so() {
    let replica = replica(400.0).await;
    let config = LoadConfig { replicas: vec![format!("{}/nothing-here", replica.url())], ..config(&replica, 400.0) };
    let error = load::run(config).await.unwrap_err();
    assert!(error.to_string().contains("--replicas"), "{error:#}");
}
