//! The fleet as people and programs see it: one value, shown as JSON and as a page.

use homing_routing::replica::ReplicaName;
use homing_routing::sync::{PoolAnswer, ReplicaReport};
use serde::Serialize;
use tokio::time::Instant;

use crate::drain::DrainedBy;
use crate::endpoint::whole_ms;
use crate::fleet::{Envoy, Fleet, Pool, Source};
use crate::vllm::Missing;

/// Everything the collector knows.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// When the collector started, in milliseconds since 1970.
    pub generation: u64,
    /// Every pool.
    pub pools: Vec<PoolStatus>,
    /// Every Envoy.
    pub envoys: Vec<EnvoyStatus>,
    /// What is wrong with the drain file.
    pub drain_file_problem: Option<String>,
}

/// One pool.
#[derive(Clone, Debug, Serialize)]
pub struct PoolStatus {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// Its replicas.
    pub replicas: Vec<ReplicaStatus>,
    /// Where endpoints are found beside the configuration's own.
    pub sources: Vec<SourceStatus>,
}

/// A source of endpoints.
#[derive(Clone, Debug, Serialize)]
pub struct SourceStatus {
    /// `dns` or `file`.
    pub kind: &'static str,
    /// The name with its port, or the path.
    pub name: String,
    /// How many endpoints it last found; absent before it found anything.
    pub endpoints: Option<usize>,
    /// What is wrong with it now; what it found last is kept.
    pub problem: Option<String>,
}

/// One replica.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    /// What Envoys are told.
    #[serde(flatten)]
    pub report: ReplicaReport,
    /// Prompt tokens since the engine started.
    pub prompt_tokens: u64,
    /// Generated tokens since the engine started.
    pub generation_tokens: u64,
    /// Preemptions since the engine started.
    pub preemptions: u64,
    /// Why the last poll failed, if it did.
    pub problem: Option<String>,
    /// Who drains it.
    pub drained_by: Vec<DrainedBy>,
    /// How often the server behind it restarted.
    pub restarts: u64,
    /// Metrics that are expected and that its engine does not report: their values here are 0 or absent.
    pub missing: Missing,
}

/// One Envoy.
#[derive(Clone, Debug, Serialize)]
pub struct EnvoyStatus {
    /// Its control listener.
    pub url: String,
    /// Snapshots it took.
    pub answered: u64,
    /// Snapshots it did not take.
    pub failed: u64,
    /// Milliseconds since its last answer; absent before the first.
    pub answer_age_ms: Option<u64>,
    /// What is wrong with it now, and what to do.
    pub problem: Option<String>,
    /// Homes of conversations that it told.
    pub bindings: u64,
    /// Homes that it could not tell, because too many came at once.
    pub bindings_dropped: u64,
    /// Each pool as it last described it; empty before the first answer.
    pub pools: Vec<PoolAnswer>,
}

impl Status {
    /// The fleet at `now`.
    pub fn of(fleet: &Fleet, now: Instant) -> Self {
        Self {
            generation: fleet.generation,
            pools: fleet.pools.iter().map(|pool| PoolStatus::of(pool, now)).collect(),
            envoys: fleet.envoys.iter().map(|envoy| EnvoyStatus::of(envoy, now)).collect(),
            drain_file_problem: fleet.drains.read().file_problem.clone(),
        }
    }
}

impl PoolStatus {
    fn of(pool: &Pool, now: Instant) -> Self {
        let replicas = pool.replicas(now).into_iter().map(|replica| ReplicaStatus {
            report: replica.report,
            prompt_tokens: replica.metrics.prompt_tokens,
            generation_tokens: replica.metrics.generation_tokens,
            preemptions: replica.metrics.preemptions,
            problem: replica.failure.map(|failure| failure.to_string()),
            drained_by: replica.drained_by,
            restarts: replica.restarts,
            missing: replica.metrics.missing,
        });
        let sources = pool.sources.iter().map(SourceStatus::of).collect();
        Self { cluster: pool.cluster.clone(), replicas: replicas.collect(), sources }
    }
}

impl SourceStatus {
    fn of(source: &Source) -> Self {
        let state = source.state();
        let endpoints = state.addresses.as_ref().map(Vec::len);
        Self { kind: source.kind, name: source.name.clone(), endpoints, problem: state.problem.clone() }
    }
}

impl EnvoyStatus {
    fn of(envoy: &Envoy, now: Instant) -> Self {
        let exchanges = envoy.exchanges().clone();
        let (pools, bindings_dropped) = exchanges.answer.map(|answer| (answer.pools, answer.bindings_dropped)).unwrap_or_default();
        Self {
            url: envoy.config.url.to_string(),
            answered: exchanges.answered,
            failed: exchanges.failed,
            answer_age_ms: exchanges.answered_at.map(|at| whole_ms(now.duration_since(at))),
            problem: exchanges.problem,
            bindings: exchanges.bindings,
            bindings_dropped,
            pools,
        }
    }

    /// What this Envoy has in flight on a replica, if it said.
    pub fn in_flight(&self, cluster: &str, replica: ReplicaName) -> Option<u64> {
        let pool = self.pools.iter().find(|pool| pool.cluster == cluster)?;
        pool.replicas.iter().find(|answer| answer.replica == replica).map(|answer| answer.in_flight)
    }
}
