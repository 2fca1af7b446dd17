//! All that the collector knows: every pool's endpoints, and what every Envoy last answered.
//!
//! The tasks that find, poll and push share it. Each endpoint and each Envoy has a lock of its own, held for the length of a copy.

mod pool;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use homing_routing::estimate::Totals;
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{Peers, PoolReport, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::sync::watch;
use tokio::time::Instant;

pub use self::pool::{Pool, SharedEndpoint, Source, SourceState};
use crate::affinity::Affinity;
use crate::affinity::store::StoreLink;
use crate::config::{Config, EnvoyConfig};
use crate::drain::{DrainedBy, Drains};
use crate::endpoint::{Replica, whole_ms};
use crate::status::CONNECTED;

/// How long after its start a collector still waits for the store and for Envoys to tell what they know.
const READING: Duration = Duration::from_secs(5);

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
    /// The conversations' homes.
    pub affinity: Arc<Affinity>,
    /// Where they are kept too, if there is a place.
    pub store: Option<Arc<StoreLink>>,
    /// When this collector started.
    started: Instant,
    /// Told when endpoints came or went, or when the state of one became known.
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
    /// Bindings of others that it was sent and took.
    pub bindings_sent: u64,
    /// Bytes that it was sent and that it answered, without HTTP's headers.
    pub bytes: [u64; 2],
    /// Whether all that it knows has been read: its journal, and its table if some of the journal was overwritten.
    pub is_read: bool,
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
        Self {
            generation: now_ms(),
            pools,
            envoys: envoys.collect(),
            drains,
            affinity: Arc::new(Affinity::new(config.affinity.is_some())),
            store: config.affinity.as_ref().map(|store| Arc::new(StoreLink::new(store))),
            started: Instant::now(),
            changes: watch::Sender::default(),
        }
    }

    /// Notes that endpoints came or went, or that the state of one became known.
    pub(crate) fn changed(&self) {
        self.changes.send_replace(());
    }

    /// Waits until every source of endpoints was asked and every endpoint's state is known. What is known before says that replicas
    /// are down or gone which were only not asked yet.
    pub(crate) async fn settled(&self) {
        // The sender is this fleet's own, so it is not closed while this waits.
        let _ = self.changes.subscribe().wait_for(|()| self.pools.iter().all(Pool::is_settled)).await;
    }

    /// What the Envoy at `index` is sent: the state of every pool at `now`.
    ///
    /// A pool of which no replica was ever found, because its sources failed, is left out: an Envoy then keeps what it has.
    pub fn snapshot(&self, index: usize, sequence: u64, now: Instant) -> SyncRequest {
        let pools = self.pools.iter().filter(|pool| pool.is_known()).map(|pool| {
            let mut replicas = pool.replicas(now);
            let peers = self.peers(index, &pool.cluster, now);
            for replica in &mut replicas {
                replica.report.peers = peers.get(&replica.report.replica).copied().unwrap_or_default();
            }
            let mut estimator = lock(&pool.estimator);
            estimator.update(&self.totals(&pool.cluster, &replicas));
            PoolReport {
                cluster: pool.cluster.clone(),
                bytes_per_token: estimator.bytes_per_token(),
                shared_tokens: estimator.shared_tokens(),
                replicas: replicas.into_iter().map(|replica| replica.report).collect(),
            }
        });
        SyncRequest { pools: pools.collect(), ..self.request(sequence) }
    }

    /// A request without pools.
    pub fn request(&self, sequence: u64) -> SyncRequest {
        SyncRequest { version: SYNC_VERSION, generation: self.generation, sequence, now_ms: now_ms(), ..SyncRequest::default() }
    }

    /// What the other Envoys have at the replicas of a pool, as far as they answered lately. What an Envoy has that does not answer is
    /// found in the engines' figures.
    fn peers(&self, index: usize, cluster: &str, now: Instant) -> HashMap<ReplicaName, Peers> {
        let mut peers: HashMap<_, Peers> = HashMap::new();
        for (_, envoy) in self.envoys.iter().enumerate().filter(|(other, _)| *other != index) {
            let exchanges = envoy.exchanges();
            if exchanges.answered_at.is_none_or(|at| now.duration_since(at) >= CONNECTED) {
                continue;
            }
            let pools = exchanges.answer.iter().flat_map(|answer| &answer.pools);
            for replica in pools.filter(|pool| pool.cluster == cluster).flat_map(|pool| &pool.replicas) {
                let seen = peers.entry(replica.replica).or_default();
                seen.in_flight = seen.in_flight.saturating_add(u32::try_from(replica.in_flight).unwrap_or(u32::MAX));
                seen.own = seen.own.saturating_add(u32::try_from(replica.own).unwrap_or(u32::MAX));
            }
        }
        peers
    }

    /// Whether nothing more can be learned of homes, before a hand-over to the Envoy at `index` ends: the store and every other Envoy
    /// have been read, or are away.
    pub(crate) fn has_read_others(&self, index: usize, now: Instant) -> bool {
        let is_late = now.duration_since(self.started) > READING;
        let others = self.envoys.iter().enumerate().filter(|(other, _)| *other != index);
        let read = others.map(|(_, envoy)| envoy.exchanges()).all(|envoy| envoy.is_read || envoy.problem.is_some());
        is_late || (read && self.affinity.is_loaded())
    }

    /// What most Envoys answer, of those that say it; of as many, what the first in the configuration answers.
    pub(crate) fn of_most<T: PartialEq>(&self, said: impl Fn(&SyncAnswer) -> Option<T>) -> Option<T> {
        let mut counts: Vec<(T, usize)> = Vec::new();
        for value in self.envoys.iter().filter_map(|envoy| said(envoy.exchanges().answer.as_ref()?)) {
            match counts.iter_mut().find(|(known, _)| *known == value) {
                Some((_, count)) => *count += 1,
                None => counts.push((value, 1)),
            }
        }
        counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value)
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

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    whole_ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// A task that panicked leaves the last whole update behind, which is still true; the others go on with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
