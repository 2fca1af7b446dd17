//! The fleet as people and programs see it: one value, which the console, the API and the metrics show.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use homing_routing::replica::ReplicaName;
use homing_routing::sync::{OutcomeCounts, PoolAnswer, ReplicaAnswer, ReplicaReport, ReplicaState};
use serde::Serialize;
use tokio::time::Instant;

use crate::admission::{Active, Admission};
use crate::capacity::{Capacity, Level, tokens};
use crate::drain::DrainedBy;
use crate::endpoint::{Replica, whole_ms};
use crate::fleet::{Envoy, Fleet, Pool, Source};
use crate::history::{History, Hour};
use crate::sync::differs;
use crate::vllm::Missing;

/// How long ago an Envoy's last answer may be for it to count as connected.
pub const CONNECTED: Duration = Duration::from_secs(3);

/// Everything the collector knows.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The collector's version.
    pub version: &'static str,
    /// When the collector started, in milliseconds since 1970.
    pub generation: u64,
    /// When this was true, in milliseconds since 1970.
    pub at_ms: u64,
    /// Every pool.
    pub pools: Vec<PoolStatus>,
    /// Every Envoy.
    pub envoys: Vec<EnvoyStatus>,
    /// Where Envoys are found beside those that the configuration names.
    pub envoy_sources: Vec<SourceStatus>,
    /// The homes of conversations that the Envoys share.
    pub affinity: AffinityStatus,
    /// What is wrong with the drain file.
    pub drain_file_problem: Option<String>,
}

/// One pool.
#[derive(Clone, Debug, Serialize)]
pub struct PoolStatus {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// What routing does there.
    pub routing: Routing,
    /// Whether its conversations fit into its caches; absent while no connected Envoy says what is held, or no cache's size is known.
    pub capacity: Option<Capacity>,
    /// What waits for a place, and what has one; absent while no connected Envoy admits by working set.
    pub admission: Option<Admission>,
    /// Its last hour.
    pub hour: Hour,
    /// Its replicas.
    pub replicas: Vec<ReplicaStatus>,
    /// Where endpoints are found beside the configuration's own.
    pub sources: Vec<SourceStatus>,
}

/// A source of endpoints or of Envoys.
#[derive(Clone, Debug, Serialize)]
pub struct SourceStatus {
    /// `dns` or `file`.
    pub kind: &'static str,
    /// The name with its port, or the path.
    pub name: String,
    /// How many endpoints or Envoys it last found; absent before it found anything.
    pub endpoints: Option<usize>,
    /// What is wrong with it now; what it found last is kept.
    pub problem: Option<String>,
}

/// What routing does in one pool, by all Envoys together. What stands at this moment (in flight, held, thresholds) comes from
/// those that are connected; counts come from every one that ever answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Routing {
    /// Envoys that there are.
    pub envoys: usize,
    /// Those of them that are connected.
    pub envoys_connected: usize,
    /// Those of them that route this pool.
    pub envoys_routing: usize,
    /// Whether conversations keep their homes; absent when no connected Envoy routes this pool.
    pub affinity: Option<Affinity>,
    /// The load above which a home is full.
    pub spill_threshold: Option<Span>,
    /// Whether it follows the engine's size, everywhere.
    pub spill_threshold_auto: Option<bool>,
    /// How much lower another replica's load must be for a turn to spill there.
    pub spill_margin: Option<Span>,
    /// Whether it follows the threshold, everywhere.
    pub spill_margin_auto: Option<bool>,
    /// Requests sent to the pool's replicas and not ended.
    pub in_flight: Option<u64>,
    /// Requests that ended, by outcome.
    pub requests: OutcomeCounts,
    /// Sticky requests among all of them, 0 to 1; absent before the first.
    pub sticky_share: Option<f64>,
    /// Since when requests are counted, in milliseconds since 1970: the start of the Envoy that started first.
    pub counting_since_ms: Option<u64>,
}

/// Whether conversations keep their homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Affinity {
    /// They do.
    On,
    /// They do not.
    Off,
    /// It depends on the Envoy.
    Mixed,
}

/// The least and the greatest of a value that may differ between replicas and Envoys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "the two names say it")]
pub struct Span {
    pub min: u32,
    pub max: u32,
}

/// One replica.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    /// What Envoys are told.
    #[serde(flatten)]
    pub report: ReplicaReport,
    /// Prompt tokens since the engine started.
    pub prompt_tokens: u64,
    /// Those of them that the engine found in its cache; absent when it does not count them.
    pub cached_prompt_tokens: Option<u64>,
    /// Generated tokens since the engine started.
    pub generation_tokens: u64,
    /// Preemptions since the engine started.
    pub preemptions: u64,
    /// Requests sent there and not ended; absent, as what is held, when no connected Envoy says.
    pub in_flight: Option<u64>,
    /// Conversations at home there and active within the idle time.
    pub held_conversations: Option<u64>,
    /// Those of them that were active in the last two minutes: the others have likely ended.
    pub recent_conversations: Option<u64>,
    /// Tokens of the last request of each of these together; an estimate.
    pub recent_context_tokens: Option<u64>,
    /// Whether they fit into its cache, as [`Capacity`] judges it.
    pub context_level: Option<Level>,
    /// Conversations with a place there; absent, as the one below, while no connected Envoy admits by working set.
    pub active_conversations: Option<u64>,
    /// Tokens of their contexts together; an estimate.
    pub active_context_tokens: Option<u64>,
    /// Requests that ended there, by outcome.
    pub requests: OutcomeCounts,
    /// Why the last poll failed, if it did.
    pub problem: Option<String>,
    /// Who drains it.
    pub drained_by: Vec<DrainedBy>,
    /// How often the server behind it restarted.
    pub restarts: u64,
    /// Metrics that are expected and that its engine does not report: their values here are 0 or absent.
    pub missing: Missing,
}

/// The homes of conversations that the Envoys share.
#[derive(Clone, Debug, Default, Serialize)]
pub struct AffinityStatus {
    /// Conversations whose home this collector knows.
    pub conversations: usize,
    /// The store they are kept in too; absent without one.
    pub store: Option<StoreStatus>,
}

/// The store of bindings.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStatus {
    /// Where it is, without a password.
    pub url: String,
    /// Whether it answers.
    pub up: bool,
    /// What is wrong with it now, and what to do.
    pub problem: Option<String>,
    /// Homes read from it.
    pub read: u64,
    /// Homes written to it.
    pub written: u64,
    /// Homes that were not written, because it was away or slow for too long; they are when it is back.
    pub dropped: u64,
}

/// One Envoy.
#[derive(Clone, Debug, Serialize)]
pub struct EnvoyStatus {
    /// Its control listener.
    pub url: String,
    /// Whether it answered the last snapshot, within the last three seconds.
    pub connected: bool,
    /// Whether it takes another collector's snapshots and only answers this one's.
    pub standby: bool,
    /// The filter's version; empty before the first answer.
    pub filter_version: String,
    /// Since when it counts requests, in milliseconds since 1970.
    pub counting_since_ms: Option<u64>,
    /// Snapshots it took.
    pub answered: u64,
    /// Snapshots it did not take.
    pub failed: u64,
    /// Milliseconds since its last answer, which is the age of the snapshot it holds; absent before the first.
    pub answer_age_ms: Option<u64>,
    /// What is wrong with it now, and what to do.
    pub problem: Option<String>,
    /// Homes of conversations that it told.
    pub bindings: u64,
    /// Homes that other Envoys told and that it was sent.
    pub bindings_sent: u64,
    /// Bytes of the exchanges with it, without HTTP's headers: those it was sent and those it answered.
    pub sync_bytes: [u64; 2],
    /// Homes that it could not note, because its threads were in each other's way.
    pub bindings_dropped: u64,
    /// Each pool as it last described it; empty before the first answer.
    pub pools: Vec<PoolAnswer>,
}

// === impl Status ===

impl Status {
    /// The fleet at `now`.
    pub fn of(fleet: &Fleet, history: &History, now: Instant) -> Self {
        let envoys: Vec<_> = fleet.envoys().iter().map(|envoy| EnvoyStatus::of(fleet, envoy, now)).collect();
        let pools = fleet.pools.iter().map(|pool| PoolStatus::of(pool, &envoys, history, now)).collect();
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let drain_file_problem = fleet.drains.read().file_problem.clone();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            generation: fleet.generation,
            at_ms: whole_ms(at),
            pools,
            envoys,
            envoy_sources: fleet.envoy_sources().map(SourceStatus::of).collect(),
            affinity: AffinityStatus::of(fleet),
            drain_file_problem,
        }
    }
}

impl PoolStatus {
    fn of(pool: &Pool, envoys: &[EnvoyStatus], history: &History, now: Instant) -> Self {
        let mut answers = Answers::of(&pool.cluster, envoys);
        let replicas = pool.replicas(now).into_iter().map(|replica| {
            let seen = answers.replicas.get(&replica.report.replica);
            ReplicaStatus::of(replica, seen)
        });
        let replicas: Vec<_> = replicas.collect();
        let up = || replicas.iter().filter(|replica| replica.report.state != ReplicaState::Down);
        let cache_tokens = up().fold(0, |sum: u64, replica| sum.saturating_add(replica.report.cache_tokens));
        if let Some(admission) = &mut answers.admission {
            let active = |replica: &ReplicaStatus| answers.replicas.get(&replica.report.replica)?.active;
            up().for_each(|replica| admission.add_replica(active(replica).unwrap_or_default(), replica.report.cache_tokens));
        }
        let hour = history.hour(&pool.cluster);
        let capacity = total(&replicas, |replica| replica.recent_conversations)
            .zip(total(&replicas, |replica| replica.recent_context_tokens))
            .and_then(|(conversations, tokens)| Capacity::of(conversations, tokens, cache_tokens, hour.latest_cached_share));
        let in_flight = total(&replicas, |replica| replica.in_flight);
        let sources = pool.sources.iter().map(SourceStatus::of).collect();
        let routing = Routing { in_flight, ..answers.routing };
        let admission = answers.admission;
        Self { cluster: pool.cluster.clone(), routing, capacity, admission, hour, replicas, sources }
    }
}

/// The sum of what replicas have of something; `None` when none has it.
fn total(replicas: &[ReplicaStatus], of: impl Fn(&ReplicaStatus) -> Option<u64>) -> Option<u64> {
    replicas.iter().filter_map(of).reduce(u64::saturating_add)
}

impl ReplicaStatus {
    fn of(replica: Replica, seen: Option<&Seen>) -> Self {
        let seen = seen.copied().unwrap_or_default();
        let report = replica.report;
        let context_tokens = seen.recent_context_bytes.map(tokens);
        let capacity = seen.recent_conversations.zip(context_tokens).and_then(|(conversations, tokens)| {
            Capacity::of(conversations, tokens, report.cache_tokens, report.prefix_hit_rate.map(f64::from))
        });
        Self {
            report,
            prompt_tokens: replica.metrics.prompt_tokens,
            cached_prompt_tokens: replica.metrics.prompt_cache.map(|cache| cache.hits),
            generation_tokens: replica.metrics.generation_tokens,
            preemptions: replica.metrics.preemptions,
            in_flight: seen.in_flight,
            held_conversations: seen.held_conversations,
            recent_conversations: seen.recent_conversations,
            recent_context_tokens: context_tokens,
            context_level: capacity.map(|capacity| capacity.level),
            active_conversations: seen.active.map(|active| active.conversations),
            active_context_tokens: seen.active.map(|active| active.context_tokens),
            requests: seen.requests,
            problem: replica.failure.map(|failure| failure.to_string()),
            drained_by: replica.drained_by,
            restarts: replica.restarts,
            missing: replica.metrics.missing,
        }
    }
}

impl SourceStatus {
    fn of(source: &Source) -> Self {
        let state = source.state();
        let endpoints = state.addresses.as_ref().map(Vec::len);
        Self { kind: source.kind, name: source.name.clone(), endpoints, problem: state.problem.clone() }
    }
}

impl AffinityStatus {
    fn of(fleet: &Fleet) -> Self {
        let affinity = &fleet.affinity;
        Self { conversations: affinity.count(), store: fleet.store.as_ref().map(|store| store.status(affinity.dropped())) }
    }
}

impl EnvoyStatus {
    fn of(fleet: &Fleet, envoy: &Envoy, now: Instant) -> Self {
        let differs = differs(fleet, envoy).map(str::to_owned);
        let exchanges = envoy.exchanges().clone();
        let age = exchanges.answered_at.map(|at| now.duration_since(at));
        let answer = exchanges.answer.unwrap_or_default();
        Self {
            url: envoy.url.to_string(),
            connected: exchanges.problem.is_none() && age.is_some_and(|age| age < CONNECTED),
            standby: answer.standby,
            filter_version: answer.filter_version,
            counting_since_ms: answer.counting_since_ms,
            answered: exchanges.answered,
            failed: exchanges.failed,
            answer_age_ms: age.map(whole_ms),
            problem: exchanges.problem.or(differs),
            bindings: exchanges.bindings,
            bindings_sent: exchanges.bindings_sent,
            sync_bytes: exchanges.bytes,
            bindings_dropped: answer.bindings_dropped,
            pools: answer.pools,
        }
    }
}

// === what the Envoys say of one pool ===

/// All answers of one pool, put together.
#[derive(Default)]
struct Answers {
    routing: Routing,
    admission: Option<Admission>,
    replicas: HashMap<ReplicaName, Seen>,
}

/// One replica in all of them.
#[derive(Clone, Copy, Default)]
struct Seen {
    in_flight: Option<u64>,
    held_conversations: Option<u64>,
    recent_conversations: Option<u64>,
    recent_context_bytes: Option<u64>,
    active: Option<Active>,
    requests: OutcomeCounts,
}

impl Answers {
    fn of(cluster: &str, envoys: &[EnvoyStatus]) -> Self {
        let mut all = Self::default();
        all.routing.envoys = envoys.len();
        for envoy in envoys {
            all.routing.envoys_connected += usize::from(envoy.connected);
            if let Some(pool) = envoy.pools.iter().find(|pool| pool.cluster == cluster) {
                all.add(envoy, pool);
            }
        }
        let Routing { requests, .. } = all.routing;
        all.routing.sticky_share = (requests.total() > 0).then(|| requests.sticky as f64 / requests.total() as f64);
        all
    }

    fn add(&mut self, envoy: &EnvoyStatus, pool: &PoolAnswer) {
        let routing = &mut self.routing;
        routing.counting_since_ms = routing.counting_since_ms.into_iter().chain(envoy.counting_since_ms).min();
        if envoy.connected {
            routing.envoys_routing += 1;
            let affinity = if pool.affinity { Affinity::On } else { Affinity::Off };
            routing.affinity = Some(routing.affinity.filter(|known| *known != affinity).map_or(affinity, |_| Affinity::Mixed));
            routing.spill_threshold_auto = both(routing.spill_threshold_auto, pool.spill_threshold_auto);
            routing.spill_margin_auto = both(routing.spill_margin_auto, pool.spill_margin_auto);
        }
        for answer in &pool.replicas {
            routing.requests = routing.requests.and(&answer.requests);
            if envoy.connected {
                widen(&mut routing.spill_threshold, Some(answer.spill_threshold));
                widen(&mut routing.spill_margin, answer.spill_margin);
            }
            self.replicas.entry(answer.replica).or_default().add(answer, envoy.connected);
        }
        if let Some(line) = pool.admission.as_ref().filter(|_| envoy.connected) {
            self.admission.get_or_insert_default().add(line);
            for answer in &pool.replicas {
                self.replicas.entry(answer.replica).or_default().add_active(answer, line.shared_tokens);
            }
        }
    }
}

impl Seen {
    fn add(&mut self, answer: &ReplicaAnswer, connected: bool) {
        self.requests = self.requests.and(&answer.requests);
        if connected {
            self.in_flight = Some(self.in_flight.unwrap_or(0).saturating_add(answer.in_flight));
            // Every Envoy knows every conversation; one that has just started may not know all yet.
            self.held_conversations = self.held_conversations.max(answer.held_conversations);
            self.recent_conversations = self.recent_conversations.max(answer.recent_conversations);
            self.recent_context_bytes = self.recent_context_bytes.max(answer.recent_context_bytes);
        }
    }

    fn add_active(&mut self, answer: &ReplicaAnswer, shared_tokens: u32) {
        let all = self.active.into_iter().chain(Active::of(answer));
        self.active = all.reduce(|known, more| known.and(more, shared_tokens));
    }
}

/// True where both are, as far as they are known.
fn both(known: Option<bool>, more: Option<bool>) -> Option<bool> {
    known.into_iter().chain(more).reduce(|both, value| both && value)
}

fn widen(span: &mut Option<Span>, value: Option<u32>) {
    if let Some(value) = value {
        let known = span.unwrap_or(Span { min: value, max: value });
        *span = Some(Span { min: known.min.min(value), max: known.max.max(value) });
    }
}
