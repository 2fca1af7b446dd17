//! Sessions that are replaced when they end.

use super::fakes::{ANSWER, Endpoint, SPEED, config, replica, small};
use axum::routing::post;
use axum::{Json, Router};
use homing_bench::engine::EngineConfig;
use homing_bench::load::{self, LoadConfig};
use homing_bench::replica::{Replica, ReplicaConfig};
use homing_bench::workload::{Kind, SessionShape, Workload};
use serde_json::Value;
use std::time::Duration;

/// Prefix hits in per cent after so many turns, if one session of the default shape follows the other on one replica. By hand: each
/// message costs three tokens to open, its role's (`user` 1, `system` 2, `assistant` 3), and three to close; a prompt ends with an opened
/// answer.
fn hits_by_hand(turns: u64) -> f64 {
    let shape = SessionShape::default();
    let system = 3 + 2 + shape.system_tokens + 3;
    let first = system + (3 + 1 + shape.first_tokens + 3) + (3 + 3);
    let (mut prompt, mut all, mut cached) = (0, 0, 0);
    for turn in 0..turns as usize {
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
    let replica = replica().await;
    let report = load::run(LoadConfig { sessions: 1, ..config(&replica) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    assert!(report.sessions_completed >= 2, "{report:?}");
    // The turn that was on its way at the end was given the time to end, and the engine has counted it.
    let all = report.ttfb_s.unwrap().count;
    assert!((report.turns..=report.turns + 1).contains(&all), "{report:?}");
    assert!((83.0..88.0).contains(&hits_by_hand(all)), "{report:?}");
    assert!((report.prefix_hits.unwrap() - hits_by_hand(all)).abs() < 1e-6, "{} {report:?}", hits_by_hand(all));
    assert!(report.replicas_busy.unwrap() > 0.3, "{report:?}");
    assert_eq!(report.stayed, None, "nobody names replicas here");
    assert_eq!(report.turns_by_replica.len(), 0);
}

#[tokio::test]
async fn more_sessions_than_the_cache_holds_lose_their_hits() {
    let replica = replica().await;
    let report = load::run(LoadConfig { sessions: 8, ..config(&replica) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    assert!(report.prefix_hits.unwrap() < 75.0, "{report:?}");
}

#[tokio::test]
async fn a_turn_lasts_as_long_as_its_first_token_and_the_gaps_after_it() {
    let replica = replica().await;
    let report = load::run(LoadConfig { sessions: 2, ..config(&replica) }).await.unwrap();
    let (ttfb, gap, turn) = (report.ttfb_s.unwrap(), report.token_gap_s.unwrap(), report.turn_s.unwrap());
    assert_eq!(ttfb.count, turn.count);
    assert_eq!((report.ttfb_p50_s, report.ttfb_p95_s), (Some(ttfb.p50), Some(ttfb.p95)));
    for latency in [ttfb, gap, turn] {
        let rising = [latency.p50, latency.p90, latency.p95, latency.p99, latency.p99_9, latency.max];
        assert!(rising.is_sorted(), "{latency:?}");
    }
    let gaps = gap.mean * gap.count as f64 / turn.count as f64;
    let rest = turn.mean - ttfb.mean;
    assert!((gaps / rest - 1.0).abs() < 0.1, "gaps of {gaps} s in the {rest} s after the first token");
}

/// Serves each session's first two turns on `a` and the third on `b`; the answer is one chunk.
async fn moves_after_two_turns(Json(body): Json<Value>) -> ([(&'static str, &'static str); 1], &'static str) {
    // A system prompt, then a message and an answer a turn.
    let turn = body["messages"].as_array().unwrap().len() / 2;
    ([("x-served-by", if turn <= 2 { "a" } else { "b" })], ANSWER)
}

#[tokio::test]
async fn turns_have_stayed_if_the_replica_of_the_turn_before_served_them() {
    let endpoint = Endpoint::start(Router::new().route("/v1/chat/completions", post(moves_after_two_turns))).await;
    let config = LoadConfig {
        workload: small(3),
        sessions: 1,
        duration: Duration::from_secs(1),
        speed: SPEED,
        replica_header: "x-served-by".to_owned(),
        ..LoadConfig::new(&endpoint.url)
    };
    let report = load::run(config).await.unwrap();
    assert!(report.sessions_completed >= 10, "{report:?}");
    // One of two in each whole session; the last may have been cut between them.
    assert!((report.stayed.unwrap() - 50.0).abs() < 5.0, "{report:?}");
    assert!((report.output_tokens_per_minute / 60.0 * report.duration_s / report.turns as f64 - 5.0).abs() < 1e-6, "{report:?}");
    let (a, b) = (report.turns_by_replica["a"], report.turns_by_replica["b"]);
    assert_eq!(a + b, report.ttfb_s.unwrap().count);
    assert!((2 * b..=2 * b + 2).contains(&a), "{report:?}");
}

#[tokio::test]
async fn clients_that_leave_in_the_middle_go_on_with_what_they_have() {
    let replica = replica().await;
    let report = load::run(LoadConfig { sessions: 4, abort_share: 0.5, ..config(&replica) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    let (all, left) = (report.ttfb_s.unwrap().count, report.turns_left);
    assert!((0.3..0.7).contains(&(left as f64 / all as f64)), "{left} of {all}");
    assert_eq!(report.turn_s.unwrap().count, all - left);
    assert!(report.sessions_completed > 0 && report.prefix_hits.unwrap() > 40.0, "{report:?}");
}

#[tokio::test]
async fn every_kind_of_session_is_driven() {
    for kind in [Kind::Agents, Kind::Subagents, Kind::Long, Kind::Skewed] {
        let engine = EngineConfig { kv_cache_tokens: 400_000, ..EngineConfig::default() };
        let replica = Replica::start(ReplicaConfig { speed: 2000.0, engine, ..ReplicaConfig::default() }).await.unwrap();
        let duration = Duration::from_millis(1500);
        let config = LoadConfig { workload: Workload::new(kind, 1), speed: 2000.0, sessions: 4, duration, ..config(&replica) };
        let report = load::run(config).await.unwrap();
        assert!(report.errors.is_empty(), "{kind:?} {report:?}");
        assert!(report.turns > 10 && report.sessions_started >= 4, "{kind:?} {report:?}");
    }
}
