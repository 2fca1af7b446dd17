//! What a pool's texts are like, learned from counters of engines and Envoys that come and go.

use homing_routing::sync::{PoolAnswer, SyncAnswer};

use super::*;
use crate::endpoint::ScrapeFailure;
use crate::vllm::{EngineMetrics, Engines, Missing};

/// A fleet with one pool of two replicas and with two Envoys, of which nothing is known yet.
fn fleet() -> Fleet {
    let envoys = "envoys: [{url: 'http://127.0.0.1:1'}, {url: 'http://127.0.0.1:2'}]";
    let pools = "pools: [{cluster: a, replicas: [{address: '10.0.0.1:80'}, {address: '10.0.0.2:80'}]}]";
    let fleet = Fleet::new(&Config::parse(&format!("{envoys}\n{pools}"), "test").expect("a configuration"));
    fleet.pools[0].reconcile();
    fleet
}

/// An engine has read this many prompt tokens.
fn reads(fleet: &Fleet, replica: usize, prompt_tokens: u64) {
    let engine = EngineMetrics { prompt_tokens, ..EngineMetrics::default() };
    lock(&fleet.pools[0].endpoints()[replica]).read(Instant::now(), &Engines::from([(0, engine)]));
}

/// An Envoy has had this many conversations of 3,000 bytes served.
fn serves(fleet: &Fleet, envoy: usize, conversations: u64) {
    let pool = PoolAnswer {
        cluster: "a".to_owned(),
        affinity: true,
        spill_threshold_auto: None,
        spill_margin_auto: None,
        snapshot_age_ms: None,
        prompt_bytes: conversations.saturating_mul(3_000),
        repeated_bytes: 0,
        first_turns: conversations,
        admission: None,
        replicas: Vec::new(),
    };
    let answer = SyncAnswer { pools: vec![pool], counting_since_ms: Some(1), ..SyncAnswer::default() };
    fleet.envoys()[envoy].exchanges().answer = Some(answer);
}

/// What the Envoys are told of how long a token is.
fn bytes_per_token(fleet: &Fleet) -> Option<f32> {
    fleet.snapshot(&fleet.envoys()[0], 1, Instant::now()).pools[0].bytes_per_token
}

#[tokio::test(start_paused = true)]
async fn what_an_envoy_that_joins_had_counted_before_says_nothing_of_a_pools_texts() {
    let fleet = fleet();
    reads(&fleet, 0, 0);
    serves(&fleet, 0, 0);
    assert_eq!(bytes_per_token(&fleet), None);
    reads(&fleet, 0, 50_000);
    serves(&fleet, 0, 50);
    serves(&fleet, 1, 1_000_000);
    assert_eq!(bytes_per_token(&fleet), None);
    reads(&fleet, 0, 100_000);
    serves(&fleet, 0, 100);
    assert_eq!(bytes_per_token(&fleet), Some(3.0));
}

#[tokio::test(start_paused = true)]
async fn what_a_replica_that_joins_had_read_before_says_nothing_of_a_pools_texts() {
    let fleet = fleet();
    reads(&fleet, 0, 0);
    lock(&fleet.pools[0].endpoints()[1]).failed(ScrapeFailure::Refused);
    serves(&fleet, 0, 0);
    assert_eq!(bytes_per_token(&fleet), None);
    // The second was away and has a long life behind it.
    reads(&fleet, 0, 50_000);
    reads(&fleet, 1, u64::MAX);
    serves(&fleet, 0, 50);
    assert_eq!(bytes_per_token(&fleet), None);
    reads(&fleet, 0, 100_000);
    serves(&fleet, 0, 100);
    assert_eq!(bytes_per_token(&fleet), None, "the sum cannot grow any more, and says nothing");
    reads(&fleet, 1, 1_000_000_000);
    serves(&fleet, 0, 150);
    assert_eq!(bytes_per_token(&fleet), None, "it restarted");
    reads(&fleet, 0, 150_000);
    serves(&fleet, 0, 200);
    assert_eq!(bytes_per_token(&fleet), Some(3.0));
}

#[tokio::test(start_paused = true)]
async fn a_count_that_an_engine_leaves_out_once_says_nothing_of_a_pools_texts() {
    let fleet = fleet();
    reads(&fleet, 0, 1_000_000);
    serves(&fleet, 0, 0);
    assert_eq!(bytes_per_token(&fleet), None);
    let silent = EngineMetrics { missing: Missing::PROMPT_TOKENS, ..EngineMetrics::default() };
    lock(&fleet.pools[0].endpoints()[0]).read(Instant::now(), &Engines::from([(0, silent)]));
    assert_eq!(bytes_per_token(&fleet), None);
    reads(&fleet, 0, 1_050_000);
    serves(&fleet, 0, 50);
    assert_eq!(bytes_per_token(&fleet), None);
    reads(&fleet, 0, 1_100_000);
    serves(&fleet, 0, 100);
    assert_eq!(bytes_per_token(&fleet), Some(3.0));
}
