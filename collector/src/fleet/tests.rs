//! What is made of the figures of engines and Envoys that come and go, and that may be any numbers.

use homing_routing::sync::{AdmissionAnswer, OutcomeCounts, PoolAnswer, ReplicaAnswer, SyncAnswer};

use super::*;
use crate::api::DrainStatus;
use crate::endpoint::ScrapeFailure;
use crate::history::History;
use crate::status::Status;
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

/// What an Envoy may say of the pool.
fn pool() -> PoolAnswer {
    PoolAnswer {
        cluster: "a".to_owned(),
        affinity: true,
        spill_threshold_auto: None,
        spill_margin_auto: None,
        snapshot_age_ms: None,
        prompt_bytes: 0,
        repeated_bytes: 0,
        first_turns: 0,
        admission: None,
        replicas: Vec::new(),
    }
}

/// An Envoy answers this of the pool.
fn answers(fleet: &Fleet, envoy: usize, pool: PoolAnswer) {
    let answer = SyncAnswer { pools: vec![pool], counting_since_ms: Some(1), ..SyncAnswer::default() };
    let envoy = &fleet.envoys()[envoy];
    (envoy.exchanges().answer, envoy.exchanges().answered_at) = (Some(answer), Some(Instant::now()));
}

/// An Envoy has had this many conversations of 3,000 bytes served.
fn serves(fleet: &Fleet, envoy: usize, conversations: u64) {
    let prompt_bytes = conversations.saturating_mul(3_000);
    answers(fleet, envoy, PoolAnswer { prompt_bytes, first_turns: conversations, ..pool() });
}

/// This many of everything at a replica.
fn at(name: &str, count: u64) -> ReplicaAnswer {
    ReplicaAnswer {
        replica: name.parse().expect("a name"),
        in_flight: count,
        own: count,
        spill_threshold: 8,
        spill_margin: Some(8),
        held_conversations: Some(count),
        recent_conversations: Some(count),
        recent_context_bytes: Some(count),
        active_conversations: Some(count),
        active_context_tokens: Some(count),
        requests: OutcomeCounts { sticky: count, placed: count, ..OutcomeCounts::default() },
    }
}

/// An Envoy has this many of everything at both replicas.
fn has(fleet: &Fleet, envoy: usize, count: u64) {
    let replicas = ["10.0.0.1:80", "10.0.0.2:80"].map(|name| at(name, count));
    let admission = Some(AdmissionAnswer { held: count, ..AdmissionAnswer::default() });
    let (prompt_bytes, repeated_bytes, first_turns) = (count, count, count);
    answers(fleet, envoy, PoolAnswer { prompt_bytes, repeated_bytes, first_turns, admission, replicas: replicas.into(), ..pool() });
}

/// What the Envoys are told of how long a token is.
fn bytes_per_token(fleet: &Fleet) -> Option<f32> {
    fleet.snapshot(&fleet.envoys()[0], 1, Instant::now()).pools[0].bytes_per_token
}

#[tokio::test(start_paused = true)]
async fn nothing_is_told_before_the_drain_file_was_read_well_or_badly() {
    for content in ["- 10.0.0.1:80", "no list", ""] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("drain.yaml");
        std::fs::write(&path, content).expect("a file");
        let pools = "pools: [{cluster: a, replicas: [{address: '10.0.0.1:80'}]}]";
        let config = format!("drain_file: {}\n{pools}", path.display());
        let fleet = Arc::new(Fleet::new(&Config::parse(&config, "test").expect("a configuration")));
        fleet.pools[0].reconcile();
        reads(&fleet, 0, 1);
        let settled = tokio::spawn({
            let fleet = Arc::clone(&fleet);
            async move { fleet.settled().await }
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!settled.is_finished(), "the file was not read");
        let following = tokio::spawn({
            let fleet = Arc::clone(&fleet);
            async move { fleet.drains.follow(&path, || fleet.changed()).await }
        });
        settled.await.expect("it is known");
        assert_eq!(!fleet.drained_by("10.0.0.1:80".parse().expect("a name")).is_empty(), content.starts_with('-'), "{content}");
        following.abort();
    }
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

#[tokio::test(start_paused = true)]
async fn what_an_envoy_has_counts_everywhere_until_it_has_been_silent_for_three_seconds() {
    let fleet = fleet();
    let seen = || {
        let now = Instant::now();
        let connected = Status::of(&fleet, &History::default(), now).envoys[0].connected;
        let others = fleet.snapshot(&fleet.envoys()[1], 1, now).pools[0].replicas[0].peers.in_flight;
        (connected, others, DrainStatus::of(&fleet, "10.0.0.1:80".parse().expect("a name")).in_flight)
    };
    assert_eq!(seen(), (false, 0, 0));
    has(&fleet, 0, 3);
    assert_eq!(seen(), (true, 3, 3));
    // One exchange that fails ends no request.
    fleet.envoys()[0].exchanges().problem = Some("no answer".to_owned());
    tokio::time::advance(Duration::from_millis(2_999)).await;
    assert_eq!(seen(), (true, 3, 3));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(seen(), (false, 0, 0));
}

/// What the other Envoys have at the first replica, as an Envoy is told.
fn told(fleet: &Fleet, envoy: usize) -> (u32, u32) {
    let peers = fleet.snapshot(&fleet.envoys()[envoy], 1, Instant::now()).pools[0].replicas[0].peers;
    (peers.in_flight, peers.own)
}

#[tokio::test(start_paused = true)]
async fn an_envoy_is_told_what_the_others_last_had_and_nothing_of_its_own() {
    let pools = "pools: [{cluster: a, replicas: [{address: '10.0.0.1:80'}]}]";
    let envoys = "envoys: [{url: 'http://127.0.0.1:1'}, {url: 'http://127.0.0.1:2'}, {url: 'http://127.0.0.1:3'}]";
    let fleet = Fleet::new(&Config::parse(&format!("{envoys}\n{pools}"), "test").expect("a configuration"));
    fleet.pools[0].reconcile();
    let told = || [0, 1, 2].map(|envoy| told(&fleet, envoy).0);
    let step = Duration::from_millis(250);
    let most = u32::MAX;
    // What each of the three has, in the order of time, and what each is told of the others.
    for (envoy, count, expected) in [
        (0, 3, [0, 3, 3]),
        (1, 5, [5, 3, 8]),
        (2, 7, [12, 10, 8]),
        (1, 1, [8, 10, 4]),
        (0, u64::MAX, [8, most, most]),
        (2, u64::MAX, [most, most, most]),
        (0, 2, [most, most, 3]),
        (2, 0, [1, 2, 3]),
    ] {
        tokio::time::advance(step).await;
        has(&fleet, envoy, count);
        assert_eq!(told(), expected);
    }
    // A replica may stand in an answer twice; one that it has no more counts no more, and one that is silent has nothing.
    tokio::time::advance(step).await;
    answers(&fleet, 0, PoolAnswer { replicas: vec![at("10.0.0.1:80", 2), at("10.0.0.1:80", 4)], ..pool() });
    assert_eq!(told(), [1, 6, 7]);
    tokio::time::advance(step).await;
    answers(&fleet, 0, pool());
    assert_eq!(told(), [1, 0, 1]);
    tokio::time::advance(Duration::from_secs(3)).await;
    assert_eq!(told(), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn sums_of_figures_that_nobody_can_have_are_the_greatest_and_not_small_ones() {
    let fleet = fleet();
    let cache_tokens = u64::MAX;
    for replica in fleet.pools[0].endpoints() {
        let engine = EngineMetrics { prompt_tokens: u64::MAX, cache_tokens, ..EngineMetrics::default() };
        lock(&replica).read(Instant::now(), &Engines::from([(0, engine)]));
    }
    has(&fleet, 0, u64::MAX);
    has(&fleet, 1, u64::MAX);
    let (now, replica) = (Instant::now(), "10.0.0.1:80".parse().expect("a name"));
    let status = Status::of(&fleet, &History::default(), now);
    let (pool, admission) = (&status.pools[0], status.pools[0].admission.as_ref().expect("admission"));
    assert_eq!((pool.routing.in_flight, pool.replicas[0].in_flight), (Some(u64::MAX), Some(u64::MAX)));
    assert_eq!((admission.held, admission.active_context_tokens, admission.cache_tokens), (u64::MAX, u64::MAX, u64::MAX));
    assert_eq!(pool.capacity.as_ref().map(|capacity| capacity.cache_tokens), Some(u64::MAX));
    assert_eq!(DrainStatus::of(&fleet, replica).in_flight, u64::MAX);
    assert_eq!(bytes_per_token(&fleet), None);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_sleeps_has_no_cache_and_nothing_active() {
    let fleet = fleet();
    for (replica, asleep) in fleet.pools[0].endpoints().iter().zip([false, true]) {
        let engine = EngineMetrics { cache_tokens: 1_000, asleep, ..EngineMetrics::default() };
        lock(replica).read(Instant::now(), &Engines::from([(0, engine)]));
    }
    has(&fleet, 0, 5);
    let status = Status::of(&fleet, &History::default(), Instant::now());
    let (capacity, admission) = (&status.pools[0].capacity, status.pools[0].admission.as_ref().expect("admission"));
    assert_eq!(capacity.as_ref().map(|capacity| capacity.cache_tokens), Some(1_000));
    assert_eq!((admission.cache_tokens, admission.active_conversations, admission.active_context_tokens), (1_000, 5, 5));
}

#[tokio::test(start_paused = true)]
async fn what_was_sent_to_an_endpoint_without_a_rank_is_in_flight_in_its_pool() {
    let fleet = fleet();
    answers(&fleet, 0, PoolAnswer { replicas: vec![at("10.0.0.1:80#0", 2), at("10.0.0.1:80", 3)], ..pool() });
    assert_eq!(Status::of(&fleet, &History::default(), Instant::now()).pools[0].routing.in_flight, Some(5));
}

#[tokio::test]
async fn homes_are_kept_as_long_as_the_envoys_that_there_are_keep_them() {
    let fleet = Fleet::new(
        &Config::parse("envoys: [{dns: {name: a, port: 1}}]\npools: [{cluster: a, replicas: [{address: '10.0.0.1:80'}]}]", "test")
            .expect("a configuration"),
    );
    let found = |last: &[u8]| {
        fleet.found_envoys(0, Some(last.iter().map(|&last| ([10, 0, 0, last], 1).into()).collect()), None);
        fleet.reconcile_envoys();
    };
    let keeps = |envoy: usize, idle_s| {
        fleet.envoys()[envoy].exchanges().idle_s = Some(idle_s);
        fleet.hold_longest();
        fleet.affinity.idle_s()
    };
    found(&[1, 2]);
    assert_eq!((keeps(0, 3_600), keeps(1, 900)), (3_600, 3_600));
    assert_eq!(keeps(0, 1_800), 1_800, "its idle_timeout was lowered");
    found(&[2]);
    fleet.hold_longest();
    assert_eq!(fleet.affinity.idle_s(), 900, "the other one has left");
    found(&[]);
    fleet.hold_longest();
    assert_eq!(fleet.affinity.idle_s(), 900, "nobody says otherwise");
}

#[tokio::test(start_paused = true)]
async fn contexts_are_estimated_with_what_was_learned_of_the_pools_texts() {
    let fleet = fleet();
    let context = || Status::of(&fleet, &History::default(), Instant::now()).pools[0].replicas[0].recent_context_tokens;
    let turns = |count: u64| {
        has(&fleet, 0, 12_000);
        let envoy = &fleet.envoys()[0];
        let mut exchanges = envoy.exchanges();
        let pool = &mut exchanges.answer.as_mut().expect("an answer").pools[0];
        (pool.prompt_bytes, pool.repeated_bytes, pool.first_turns) = (count * 3_000, 0, count);
    };
    reads(&fleet, 0, 0);
    turns(0);
    bytes_per_token(&fleet);
    assert_eq!(context(), Some(3_000), "four bytes a token until something is learned");
    reads(&fleet, 0, 50_000);
    turns(50);
    assert_eq!((bytes_per_token(&fleet), context()), (Some(3.0), Some(4_000)));
}
