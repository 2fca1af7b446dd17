//! All that the collector knows: every pool's endpoints, and what every Envoy last answered.
//!
//! The tasks that poll and push share it. Each endpoint and each Envoy has a lock of its own, held for the length of a copy.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use homing_routing::sync::{MAX_REPLICAS, PoolReport, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::{Config, EnvoyConfig};
use crate::endpoint::{Endpoint, Replica, whole_ms};

/// Every pool and every Envoy.
#[derive(Debug)]
pub struct Fleet {
    /// When this collector started, in milliseconds since 1970.
    pub generation: u64,
    /// The pools, in the configuration's order.
    pub pools: Vec<Pool>,
    /// The Envoys, in the configuration's order.
    pub envoys: Vec<Envoy>,
    /// How many endpoints were polled, with whatever result.
    polled: watch::Sender<usize>,
}

/// The endpoints of one pool.
#[derive(Debug)]
pub struct Pool {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// The most sequences each engine runs at once; 0 when unknown.
    pub max_num_seqs: u32,
    endpoints: Vec<Mutex<Endpoint>>,
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
        let pools = config.pools.iter().map(|pool| Pool {
            cluster: pool.cluster.clone(),
            max_num_seqs: pool.max_num_seqs.unwrap_or(0),
            endpoints: pool.replicas.iter().map(|&endpoint| Mutex::new(Endpoint::new(endpoint))).collect(),
        });
        let envoys = config.envoys.iter().map(|envoy| Envoy { config: envoy.clone(), exchanges: Mutex::default() });
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { generation: whole_ms(started), pools: pools.collect(), envoys: envoys.collect(), polled: watch::Sender::default() }
    }

    /// Counts an endpoint's first poll.
    pub(crate) fn first_poll_ended(&self) {
        self.polled.send_modify(|count| *count += 1);
    }

    /// Waits until every endpoint was polled once. What is known before says that replicas are down which were only not asked yet.
    pub(crate) async fn all_polled(&self) {
        let endpoints = self.pools.iter().map(Pool::len).sum();
        // The sender is this fleet's own, so it is not closed while this waits.
        let _ = self.polled.subscribe().wait_for(|&count| count >= endpoints).await;
    }

    /// What an Envoy is sent: the state of every pool at `now`.
    pub fn snapshot(&self, sequence: u64, now: Instant) -> SyncRequest {
        let pools = self.pools.iter().map(|pool| PoolReport {
            cluster: pool.cluster.clone(),
            bytes_per_token: None,
            shared_tokens: None,
            replicas: pool.replicas(now).into_iter().map(|replica| replica.report).collect(),
        });
        SyncRequest { version: SYNC_VERSION, generation: self.generation, sequence, pools: pools.collect() }
    }
}

// === impl Pool ===

impl Pool {
    /// How many endpoints it has.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Whether it has no endpoint; a checked configuration gives every pool one.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// The endpoint at `index`, which is below [`Pool::len`]. Do not wait for anything while holding it.
    pub fn endpoint(&self, index: usize) -> MutexGuard<'_, Endpoint> {
        lock(&self.endpoints[index])
    }

    /// Every replica of the pool at `now`, at most [`MAX_REPLICAS`].
    pub fn replicas(&self, now: Instant) -> Vec<Replica> {
        let mut replicas = Vec::with_capacity(self.endpoints.len());
        for endpoint in &self.endpoints {
            replicas.extend(lock(endpoint).replicas(now, self.max_num_seqs));
        }
        replicas.truncate(MAX_REPLICAS);
        replicas
    }

    /// Says so in the log when ranks make the pool larger than it may be.
    pub(crate) fn warn_of_too_many(&self) {
        let count: usize = self.endpoints.iter().map(|endpoint| lock(endpoint).states().len()).sum();
        if count > MAX_REPLICAS {
            tracing::warn!("pool {} has {count} replicas with its ranks; those after {MAX_REPLICAS} are left out", self.cluster);
        }
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
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
