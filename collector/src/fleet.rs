//! All that the collector knows: every pool's endpoints, and what every Envoy last answered.
//!
//! The tasks that find, poll and push share it. Each endpoint and each Envoy has a lock of its own, held for the length of a copy.

mod pool;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use homing_routing::estimate::Totals;
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{PoolReport, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::sync::watch;
use tokio::time::Instant;

pub use self::pool::{Pool, SharedEndpoint, Source, SourceState};
use crate::config::{Config, EnvoyConfig};
use crate::drain::{DrainedBy, Drains};
use crate::endpoint::{Replica, whole_ms};

/// Every pool and every Envoy.
#[derive(Debug)]
pub struct Fleet {
    /// When this collector started, in milliseconds since 1970.
    pub generation: u64,
    /// The pools, in the configuration's order.
    pub pools: Vec<Pool>,
    /// The Envoys, in the configuration's order.
    pub envoys: Vec<Envoy>,
    /// What drains, beside what the configuration says.
    pub drains: Arc<Drains>,
    /// Told when endpoints came, went or were polled for the first time.
    changes: watch::Sender<()>,
}

/// One Envoy and the exchanges with it.
#[derive(Debug)]
pub struct Envoy {
    /// Where it is and what it asks for.
    pub config: EnvoyConfig,
    exchanges: Mutex<Exchanges>,
}

/// The exchanges with one Envoy so far.
#[derive(Clone, Debug, Default)]
pub struct Exchanges {
    /// Exchanges that it answered.
    pub answered: u64,
    /// Exchanges that failed.
    pub failed: u64,
    /// What it last answered, without the bindings.
    pub answer: Option<SyncAnswer>,
    /// When it did.
    pub answered_at: Option<Instant>,
    /// Bindings that it told, over all answers.
    pub bindings: u64,
    /// What is wrong with it now, and what to do.
    pub problem: Option<String>,
}

// === impl Fleet ===

impl Fleet {
    /// The fleet of a configuration, of which nothing is known yet.
    pub fn new(config: &Config) -> Self {
        let drains = Arc::new(Drains::default());
        let pools = config.pools.iter().map(|pool| Pool::new(pool, Arc::clone(&drains))).collect();
        let envoys = config.envoys.iter().map(|envoy| Envoy { config: envoy.clone(), exchanges: Mutex::default() });
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { generation: whole_ms(started), pools, envoys: envoys.collect(), drains, changes: watch::Sender::default() }
    }

    /// Notes that endpoints came, went or were polled for the first time.
    pub(crate) fn changed(&self) {
        self.changes.send_replace(());
    }

    /// Waits until every source of endpoints was asked and every endpoint was polled once. What is known before says that replicas
    /// are down or gone which were only not asked yet.
    pub(crate) async fn settled(&self) {
        // The sender is this fleet's own, so it is not closed while this waits.
        let _ = self.changes.subscribe().wait_for(|()| self.pools.iter().all(Pool::is_settled)).await;
    }

    /// What an Envoy is sent: the state of every pool at `now`.
    ///
    /// A pool of which no replica was ever found, because its sources failed, is left out: an Envoy then keeps what it has.
    pub fn snapshot(&self, sequence: u64, now: Instant) -> SyncRequest {
        let pools = self.pools.iter().filter(|pool| pool.is_known()).map(|pool| {
            let replicas = pool.replicas(now);
            let mut estimator = lock(&pool.estimator);
            estimator.update(&self.totals(&pool.cluster, &replicas));
            PoolReport {
                cluster: pool.cluster.clone(),
                bytes_per_token: estimator.bytes_per_token(),
                shared_tokens: estimator.shared_tokens(),
                replicas: replicas.into_iter().map(|replica| replica.report).collect(),
            }
        });
        SyncRequest { version: SYNC_VERSION, generation: self.generation, sequence, pools: pools.collect() }
    }

    /// What the engines have read and the Envoys have sent them.
    fn totals(&self, cluster: &str, replicas: &[Replica]) -> Totals {
        let mut totals = Totals::default();
        for metrics in replicas.iter().map(|replica| &replica.metrics) {
            totals.prompt_tokens += metrics.prompt_tokens;
            totals.cached_tokens += metrics.prompt_cache.map_or(0, |cache| cache.hits);
        }
        for envoy in &self.envoys {
            let exchanges = envoy.exchanges();
            let answers = exchanges.answer.iter().flat_map(|answer| &answer.pools).filter(|pool| pool.cluster == cluster);
            for answer in answers {
                totals.prompt_bytes += answer.prompt_bytes;
                totals.repeated_bytes += answer.repeated_bytes;
                totals.first_turns += answer.first_turns;
            }
        }
        totals
    }

    /// Who drains this replica; for a name without a rank, who drains all that is behind its address.
    pub fn drained_by(&self, name: ReplicaName) -> Vec<DrainedBy> {
        self.drains.read().by(name, self.pools.iter().any(|pool| pool.configured_to_drain(name.address)))
    }

    /// Whether some pool has this replica, or, for a name without a rank, one behind its address.
    pub fn has_replica(&self, name: ReplicaName) -> bool {
        self.pools.iter().any(|pool| pool.has_replica(name))
    }
}

// === impl Envoy ===

impl Envoy {
    /// The exchanges so far. Do not wait for anything while holding them.
    pub fn exchanges(&self) -> MutexGuard<'_, Exchanges> {
        lock(&self.exchanges)
    }
}

/// A task that panicked leaves the last whole update behind, which is still true; the others go on with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
