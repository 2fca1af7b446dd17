//! An hour of figures, as an engine's counters would make it.

use homing_routing::sync::{OutcomeCounts, Peers, ReplicaReport, ReplicaState};
use tokio::time::advance;

use super::*;
use crate::status::{AffinityStatus, PoolStatus, Routing};

fn name(port: u16) -> ReplicaName {
    format!("10.0.0.1:{port}").parse().expect("a name")
}

/// A replica's counters: prompt tokens, those cached, generated tokens.
fn replica(port: u16, [prompt, cached, generated]: [u64; 3]) -> ReplicaStatus {
    ReplicaStatus {
        report: ReplicaReport {
            replica: name(port),
            state: ReplicaState::Ready,
            running: 0,
            waiting: 0,
            kv_usage: 0.0,
            cache_tokens: 1000,
            max_num_seqs: 32,
            prefix_hit_rate: None,
            age_ms: Some(0),
            peers: Peers::default(),
        },
        prompt_tokens: prompt,
        cached_prompt_tokens: Some(cached),
        generation_tokens: generated,
        preemptions: 0,
        in_flight: Some(2),
        held_conversations: None,
        active_conversations: None,
        active_context_tokens: None,
        recent_conversations: None,
        recent_context_tokens: None,
        context_level: None,
        requests: OutcomeCounts::default(),
        problem: None,
        drained_by: Vec::new(),
        restarts: 0,
        missing: Default::default(),
    }
}

/// A history, and a clock of steps.
#[derive(Default)]
struct Site(History);

impl Site {
    async fn step(&self, replicas: Vec<ReplicaStatus>) {
        advance(STEP).await;
        let pool = PoolStatus {
            cluster: "pool".into(),
            routing: Routing::default(),
            capacity: None,
            admission: None,
            hour: Hour::default(),
            replicas,
            sources: Vec::new(),
        };
        let status = Status {
            version: "",
            generation: 0,
            at_ms: 0,
            pools: vec![pool],
            envoys: Vec::new(),
            envoy_sources: Vec::new(),
            affinity: AffinityStatus::default(),
            drain_file_problem: None,
        };
        self.0.record(&status, Instant::now());
    }

    fn pool(&self) -> PoolHistory {
        self.0.pool("pool", 0).expect("a pool")
    }
}

fn values(series: &[Value]) -> Vec<Option<f32>> {
    series.iter().map(|value| value.0).collect()
}

#[tokio::test(start_paused = true)]
async fn a_step_has_the_rates_since_the_one_before_and_the_first_has_none() {
    let site = Site::default();
    site.step(vec![replica(1, [1000, 0, 0])]).await;
    site.step(vec![replica(1, [1100, 75, 10])]).await;
    let all = site.pool().pool;
    assert_eq!(values(&all.cached), [None, Some(15.0)]);
    assert_eq!(values(&all.computed), [None, Some(5.0)]);
    assert_eq!(values(&all.generated), [None, Some(2.0)]);
    assert_eq!(values(&all.in_flight), [Some(2.0); 2]);
    let hour = site.0.hour("pool");
    assert_eq!((hour.step, hour.cached_tokens, hour.computed_tokens, hour.generated_tokens), (2, 75, 25, 10));
    assert_eq!(hour.cached_share, Some(0.75));
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_no_envoy_knows_yet_has_rates_all_the_same() {
    let site = Site::default();
    for prompt in [0, 50] {
        let mut replica = replica(1, [prompt, 0, 0]);
        replica.in_flight = None;
        site.step(vec![replica]).await;
    }
    assert_eq!(values(&site.pool().pool.computed), [None, Some(10.0)]);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_restarted_counts_from_zero() {
    let site = Site::default();
    site.step(vec![replica(1, [10_000, 8_000, 500])]).await;
    site.step(vec![replica(1, [100, 25, 5])]).await;
    let all = site.pool().pool;
    assert_eq!((values(&all.cached)[1], values(&all.computed)[1], values(&all.generated)[1]), (Some(5.0), Some(15.0), Some(1.0)));
}

#[tokio::test(start_paused = true)]
async fn what_the_engine_does_not_measure_counts_as_computed() {
    let site = Site::default();
    for prompt in [0, 100] {
        let mut replica = replica(1, [prompt, 0, 0]);
        replica.cached_prompt_tokens = None;
        site.step(vec![replica]).await;
    }
    assert_eq!(site.0.hour("pool").cached_share, Some(0.0));
    assert_eq!(site.0.hour("pool").computed_tokens, 100);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_away_leaves_a_gap_which_is_not_filled_later() {
    let site = Site::default();
    site.step(vec![replica(1, [0, 0, 0])]).await;
    for _ in 0..4 {
        let mut away = replica(1, [0, 0, 0]);
        away.report.age_ms = Some(60_000);
        away.in_flight = None;
        site.step(vec![away]).await;
    }
    site.step(vec![replica(1, [100_000, 0, 0])]).await;
    site.step(vec![replica(1, [100_010, 0, 0])]).await;
    assert_eq!(values(&site.pool().pool.computed), [None, None, None, None, None, None, Some(2.0)]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_the_sum_of_its_replicas_and_one_that_came_later_ends_at_the_same_step() {
    let site = Site::default();
    site.step(vec![replica(1, [0, 0, 0])]).await;
    site.step(vec![replica(1, [10, 0, 0]), replica(2, [0, 0, 0])]).await;
    site.step(vec![replica(1, [20, 0, 0]), replica(2, [40, 0, 0])]).await;
    let pool = site.pool();
    assert_eq!(values(&pool.pool.computed), [None, Some(2.0), Some(10.0)]);
    assert_eq!(values(&pool.replicas[1].series.computed), [None, None, Some(8.0)]);
    assert_eq!(values(&pool.pool.in_flight), [Some(2.0), Some(4.0), Some(4.0)]);
}

#[tokio::test(start_paused = true)]
async fn only_what_is_newer_is_told_on_request() {
    let site = Site::default();
    for step in 0..10 {
        site.step(vec![replica(1, [step * 10, 0, 0])]).await;
    }
    let news = site.0.pool("pool", 7).expect("a pool");
    assert_eq!((news.step, news.pool.cached.len(), news.replicas[0].series.cached.len()), (10, 3, 3));
    assert_eq!(site.0.pool("pool", 10).expect("a pool").pool.cached.len(), 0);
    assert_eq!(site.0.pool("pool", 99).expect("a pool").pool.cached.len(), 0);
    assert!(site.0.pool("other", 0).is_none());
}

#[tokio::test(start_paused = true)]
async fn an_hour_is_kept_and_a_replica_that_left_is_forgotten_after_it() {
    let site = Site::default();
    site.step(vec![replica(1, [0, 0, 0]), replica(2, [0, 0, 0])]).await;
    for _ in 0..STEPS - 1 {
        site.step(vec![replica(1, [0, 0, 0])]).await;
    }
    assert_eq!((site.pool().replicas.len(), site.pool().pool.cached.len()), (2, STEPS));
    site.step(vec![replica(1, [0, 0, 0])]).await;
    assert_eq!((site.pool().replicas.len(), site.pool().pool.cached.len()), (1, STEPS));
}

#[tokio::test(start_paused = true)]
async fn of_replicas_that_are_gone_the_latest_are_kept_and_no_more_than_a_pool_may_have() {
    let site = Site::default();
    let name = |n: usize| ReplicaName { address: "10.0.0.9:80".parse().expect("an address"), rank: Some(n as u16) };
    for step in 0..20 {
        let ranks = (step * 100..(step + 1) * 100).map(|n| {
            let mut rank = replica(1, [0, 0, 0]);
            rank.report.replica = name(n);
            rank
        });
        site.step(ranks.collect()).await;
    }
    let kept: Vec<_> = site.pool().replicas.iter().map(|replica| replica.replica).collect();
    assert_eq!(kept.len(), 100 + MAX_REPLICAS);
    assert!(kept.contains(&name(1_999)) && kept.contains(&name(1_000)) && !kept.contains(&name(700)));
}

#[tokio::test(start_paused = true)]
async fn unknown_is_null_and_a_rate_has_one_decimal() {
    let site = Site::default();
    site.step(vec![replica(1, [0, 0, 0])]).await;
    site.step(vec![replica(1, [4, 0, 5])]).await;
    let json = serde_json::to_value(site.pool().pool).expect("JSON");
    assert_eq!(json["computed"], serde_json::json!([null, 0.8]));
    assert_eq!(json["generated"], serde_json::json!([null, 1]));
}
