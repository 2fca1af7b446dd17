//! The fleet as people and programs see it: one value, which the console, the API and the metrics show.
//!
//! This is what is told; docs/api.md describes it. How it is put together stands in `assembly`.

mod assembly;

use homing_routing::sync::{OutcomeCounts, PoolAnswer, ReplicaReport};
use serde::Serialize;

use crate::admission::Admission;
use crate::capacity::{Capacity, Level};
use crate::drain::DrainedBy;
use crate::history::Hour;
use crate::vllm::Missing;

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
    /// Why the last poll failed, if it did, or what is wrong with what it brought.
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
    /// Whether it takes what it is told.
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
    /// Whether it answered within the last three seconds.
    pub connected: bool,
    /// Whether it takes another collector's snapshots and only answers this one's.
    pub standby: bool,
    /// The filter's version; empty before the first answer.
    pub filter_version: String,
    /// Since when it counts requests, in milliseconds since 1970.
    pub counting_since_ms: Option<u64>,
    /// Exchanges that it answered: with a snapshot or with homes alone, and also while it stands by.
    pub answered: u64,
    /// Exchanges that failed.
    pub failed: u64,
    /// Milliseconds since its last answer; absent before the first.
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
