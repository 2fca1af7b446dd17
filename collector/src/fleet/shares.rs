//! What every Envoy has at the replicas, summed up once for all of them: whoever asks takes in only who has answered since somebody asked,
//! and takes its own share off again. Otherwise each of many Envoys would cost a walk through the answers of all the others.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::{Peers, SyncAnswer};
use tokio::time::Instant;

use super::Envoy;

/// The Envoys' shares, and their sums by pool.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// By the Envoys' numbers.
    of: HashMap<u64, Share>,
    sums: HashMap<String, HashMap<ReplicaName, Sum>>,
}

/// What one Envoy has, as it answered then.
#[derive(Debug)]
struct Share {
    answered_at: Instant,
    pools: Vec<(String, Vec<(ReplicaName, Peers)>)>,
}

/// Sums at one replica, wide enough to be exact: what was added can be taken off.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    in_flight: u64,
    own: u64,
    /// How many figures it is of.
    figures: u64,
}

// === impl Shares ===

impl Shares {
    /// Takes in what Envoys have answered. Of one that did not answer lately nothing counts: what it has is found in the engines' figures.
    pub(super) fn update(&mut self, envoys: &[Arc<Envoy>], now: Instant) {
        let mut connected = HashSet::new();
        for envoy in envoys {
            let exchanges = envoy.exchanges();
            let at = exchanges.answered_at.filter(|_| exchanges.is_connected(now));
            let Some((answer, answered_at)) = exchanges.answer.as_ref().zip(at) else { continue };
            connected.insert(envoy.number);
            if self.of.get(&envoy.number).is_none_or(|share| share.answered_at != answered_at) {
                let share = Share::new(answer, answered_at);
                drop(exchanges);
                self.forget(envoy.number);
                self.add(&share);
                self.of.insert(envoy.number, share);
            }
        }
        let gone: Vec<u64> = self.of.keys().filter(|number| !connected.contains(number)).copied().collect();
        gone.into_iter().for_each(|number| self.forget(number));
    }

    /// What all but this Envoy have at the replicas of a pool.
    pub(super) fn of_others(&self, number: u64, cluster: &str) -> HashMap<ReplicaName, Peers> {
        let mut sums = self.sums.get(cluster).cloned().unwrap_or_default();
        let own = self.of.get(&number).into_iter().flat_map(|share| &share.pools).filter(|(pool, _)| pool == cluster);
        for (replica, figures) in own.flat_map(|(_, replicas)| replicas) {
            if let Some(sum) = sums.get_mut(replica) {
                sum.take_off(*figures);
            }
        }
        sums.into_iter().map(|(replica, sum)| (replica, sum.peers())).collect()
    }

    fn add(&mut self, share: &Share) {
        for (cluster, replicas) in &share.pools {
            let sums = self.sums.entry(cluster.clone()).or_default();
            replicas.iter().for_each(|(replica, figures)| sums.entry(*replica).or_default().add(*figures));
        }
    }

    fn forget(&mut self, number: u64) {
        for (cluster, replicas) in self.of.remove(&number).into_iter().flat_map(|share| share.pools) {
            let Some(sums) = self.sums.get_mut(&cluster) else { continue };
            for (replica, figures) in replicas {
                if let Some(sum) = sums.get_mut(&replica) {
                    sum.take_off(figures);
                    if sum.figures == 0 {
                        sums.remove(&replica);
                    }
                }
            }
            if sums.is_empty() {
                self.sums.remove(&cluster);
            }
        }
    }
}

// === impl Share ===

impl Share {
    fn new(answer: &SyncAnswer, answered_at: Instant) -> Self {
        // Any number may have been told.
        let count = |told: u64| u32::try_from(told).unwrap_or(u32::MAX);
        let pools = answer.pools.iter().map(|pool| {
            let replicas = pool.replicas.iter();
            let figures = replicas.map(|told| (told.replica, Peers { in_flight: count(told.in_flight), own: count(told.own) }));
            (pool.cluster.clone(), figures.collect())
        });
        Self { answered_at, pools: pools.collect() }
    }
}

// === impl Sum ===

impl Sum {
    fn add(&mut self, figures: Peers) {
        self.in_flight += u64::from(figures.in_flight);
        self.own += u64::from(figures.own);
        self.figures += 1;
    }

    fn take_off(&mut self, figures: Peers) {
        self.in_flight -= u64::from(figures.in_flight);
        self.own -= u64::from(figures.own);
        self.figures -= 1;
    }

    fn peers(self) -> Peers {
        let count = |sum: u64| u32::try_from(sum).unwrap_or(u32::MAX);
        Peers { in_flight: count(self.in_flight), own: count(self.own) }
    }
}
