//! All that the collector knows: every pool's endpoints, and what every Envoy last answered.
//!
//! The tasks that find, poll and push share it. Each endpoint and each Envoy has a lock of its own, held for the length of a copy.

#[cfg(test)]
mod anything;
mod envoys;
mod pool;
mod shares;
mod source;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use homing_routing::estimate::Totals;
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{Peers, PoolReport, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use self::envoys::EnvoyChange;
use self::envoys::Envoys;
pub use self::envoys::{Envoy, Exchanges};
use self::pool::Counted;
pub use self::pool::{Pool, SharedEndpoint};
use self::shares::Shares;
pub use self::source::{Source, SourceState};
use crate::affinity::Affinity;
use crate::affinity::store::StoreLink;
use crate::config::Config;
use crate::drain::{DrainedBy, Drains};
use crate::endpoint::{Replica, whole_ms};

/// How long after its start a collector still waits for the store and for Envoys to tell what they know.
const READING: Duration = Duration::from_secs(5);

/// Every pool and every Envoy.
#[derive(Debug)]
pub struct Fleet {
    /// When this collector started, in milliseconds since 1970.
    pub generation: u64,
    /// The pools, in the configuration's order.
    pub pools: Vec<Pool>,
    envoys: Envoys,
    /// What the Envoys have at the replicas.
    shares: Mutex<Shares>,
    /// What drains, beside what the configuration says.
    pub drains: Arc<Drains>,
    /// The conversations' homes.
    pub affinity: Arc<Affinity>,
    /// Where they are kept too, if there is a place.
    pub store: Option<Arc<StoreLink>>,
    /// When this collector started.
    started: Instant,
    /// Told when endpoints came or went, when the state of one became known, or when the drain file was read.
    changes: watch::Sender<()>,
}

// === impl Fleet ===

impl Fleet {
    /// The fleet of a configuration, of which nothing is known yet.
    pub fn new(config: &Config) -> Self {
        let drains = Arc::new(Drains::new(config.drain_file.is_some()));
        let pools = config.pools.iter().map(|pool| Pool::new(pool, Arc::clone(&drains))).collect();
        Self {
            generation: now_ms(),
            pools,
            envoys: Envoys::new(&config.envoys),
            shares: Mutex::default(),
            drains,
            affinity: Arc::new(Affinity::new(config.affinity.is_some())),
            store: config.affinity.as_ref().map(|store| Arc::new(StoreLink::new(store))),
            started: Instant::now(),
            changes: watch::Sender::default(),
        }
    }

    /// The Envoys that there are now, in the configuration's order.
    pub fn envoys(&self) -> Vec<Arc<Envoy>> {
        self.envoys.all()
    }

    /// Where Envoys are found beside the configuration's own.
    pub fn envoy_sources(&self) -> impl Iterator<Item = &Source> {
        self.envoys.sources()
    }

    /// Takes in what the name of an entry of `envoys` led to; `None` when it led nowhere and what it led to before holds.
    pub(crate) fn found_envoys(&self, entry: usize, addresses: Option<Vec<SocketAddr>>, problem: Option<String>) {
        self.envoys.found(entry, addresses, problem);
    }

    /// Waits until some name led to other Envoys than before.
    pub(crate) async fn envoy_sources_changed(&self) {
        self.envoys.sources_changed().await;
    }

    /// Makes the Envoys those that were last found.
    pub(crate) fn reconcile_envoys(&self) -> EnvoyChange {
        self.envoys.reconcile()
    }

    /// Notes that endpoints came or went, that the state of one became known, or that the drain file was read.
    pub(crate) fn changed(&self) {
        self.changes.send_replace(());
    }

    /// Waits until every source of endpoints was asked, every endpoint's state is known and the drain file was read. What is known before
    /// says that replicas are down or gone which were only not asked yet, and that those are ready which drain.
    pub(crate) async fn settled(&self) {
        let is_settled = || !self.drains.read().awaits_file && self.pools.iter().all(Pool::is_settled);
        // The sender is this fleet's own, so it is not closed while this waits.
        let _ = self.changes.subscribe().wait_for(|()| is_settled()).await;
    }

    /// What an Envoy is sent: the state of every pool at `now`.
    ///
    /// A pool of which no replica was ever found, because its sources failed, is left out: an Envoy then keeps what it has.
    pub fn snapshot(&self, envoy: &Envoy, sequence: u64, now: Instant) -> SyncRequest {
        let mut peers = self.peers(envoy, now);
        let pools = self.pools.iter().filter(|pool| pool.is_known()).map(|pool| {
            let mut replicas = pool.replicas(now);
            let peers = peers.remove(pool.cluster.as_str()).unwrap_or_default();
            for replica in &mut replicas {
                replica.report.peers = peers.get(&replica.report.replica).copied().unwrap_or_default();
            }
            let (totals, counted) = self.totals(&pool.cluster, &replicas);
            let mut texts = lock(&pool.texts);
            let estimator = texts.update(&totals, counted);
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

    /// What the other Envoys have at the replicas of each pool, as far as they answered lately.
    fn peers(&self, asks: &Envoy, now: Instant) -> HashMap<&str, HashMap<ReplicaName, Peers>> {
        let envoys = self.envoys();
        let mut shares = lock(&self.shares);
        shares.update(&envoys, now);
        self.pools.iter().map(|pool| (pool.cluster.as_str(), shares.of_others(asks.number, &pool.cluster))).collect()
    }

    /// Whether nothing more can be learned of homes, before a hand-over to an Envoy ends: the store and every other Envoy have been
    /// read, or are away.
    pub(crate) fn has_read_others(&self, asks: &Envoy, now: Instant) -> bool {
        let is_late = now.duration_since(self.started) > READING;
        let envoys = self.envoys();
        let others = envoys.iter().filter(|other| other.number != asks.number);
        let read = others.map(|envoy| envoy.exchanges()).all(|envoy| envoy.is_read || envoy.problem.is_some());
        is_late || (read && self.envoys.all_asked() && self.affinity.is_loaded())
    }

    /// Whether another collector works and this one stands by: Envoys are connected, and all of them take the other's snapshots.
    pub(crate) fn stands_by(&self, now: Instant) -> bool {
        let mut standby = None;
        for envoy in self.envoys() {
            let exchanges = envoy.exchanges();
            if let Some(answer) = exchanges.answer.as_ref().filter(|_| exchanges.is_connected(now)) {
                standby = Some(standby.unwrap_or(true) && answer.standby);
            }
        }
        standby.unwrap_or(false)
    }

    /// Keeps conversations' homes as long as that Envoy does which keeps them the longest, of those that there are now.
    pub(crate) fn hold_longest(&self) {
        if let Some(longest) = self.envoys().iter().filter_map(|envoy| envoy.exchanges().idle_s).max() {
            self.affinity.hold_for(longest);
        }
    }

    /// What most Envoys answer, of those that say it; of as many, what the first in the configuration answers.
    pub(crate) fn of_most<T: PartialEq>(&self, said: impl Fn(&SyncAnswer) -> Option<T>) -> Option<T> {
        let mut counts: Vec<(T, usize)> = Vec::new();
        for value in self.envoys().iter().filter_map(|envoy| said(envoy.exchanges().answer.as_ref()?)) {
            match counts.iter_mut().find(|(known, _)| *known == value) {
                Some((_, count)) => *count += 1,
                None => counts.push((value, 1)),
            }
        }
        counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value)
    }

    /// What the engines have read and the Envoys have sent them, and which engines and Envoys these are.
    fn totals(&self, cluster: &str, replicas: &[Replica]) -> (Totals, Counted) {
        let mut counted = Counted::default();
        let mut totals = Totals::default();
        for replica in replicas.iter().filter(|replica| replica.counts_prompt_tokens()) {
            let cache = replica.metrics.prompt_cache;
            counted.engines.push((replica.report.replica, replica.restarts, cache.map(|cache| cache.source)));
            add(&mut totals.prompt_tokens, replica.metrics.prompt_tokens);
            add(&mut totals.cached_tokens, cache.map_or(0, |cache| cache.hits));
        }
        for envoy in self.envoys() {
            let exchanges = envoy.exchanges();
            let answers = exchanges.answer.iter().flat_map(|answer| &answer.pools).filter(|pool| pool.cluster == cluster);
            for answer in answers {
                counted.envoys.push((envoy.number, exchanges.answer.as_ref().and_then(|answer| answer.counting_since_ms)));
                add(&mut totals.prompt_bytes, answer.prompt_bytes);
                add(&mut totals.repeated_bytes, answer.repeated_bytes);
                add(&mut totals.first_turns, answer.first_turns);
            }
        }
        (totals, counted)
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

/// Adds a figure that another program told, which may be any number.
fn add(sum: &mut u64, told: u64) {
    *sum = sum.saturating_add(told);
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    whole_ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// A task that panicked leaves the last whole update behind, which is still true; the others go on with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
