//! Replicas and their statistics, each defined once.

use core::cell::Cell;
use std::rc::Rc;

use hashbrown::HashMap;

use crate::host::{Host, HostError, MetricId};
use crate::metric::Metric;
use crate::outcome::Outcome;
use crate::replica::{ReplicaId, ReplicaName};

/// Replicas that get statistics of their own. Envoy never forgets a statistic's name, so replicas that come and go beyond this
/// number share [`SPARE_NAMES`] names.
const MAX_NAMES: usize = 4096;
const SPARE_NAMES: u64 = 256;

/// A replica and its statistics.
#[derive(Debug)]
pub struct Replica {
    /// Its name.
    pub name: ReplicaName,
    /// Its stable identity.
    pub id: ReplicaId,
    /// Its address as Envoy writes it.
    pub address: String,
    pub(crate) label: String,
    pub(crate) in_flight: MetricId,
    pub(crate) at_home: MetricId,
    pub(crate) recent: MetricId,
    pub(crate) recent_context: MetricId,
    pub(crate) requests: Requests,
    /// What this thread has in flight there, and the gauge of its lane that counts it too.
    pub(crate) own: Cell<u32>,
    pub(crate) lane: Cell<Option<MetricId>>,
    failures: Cell<Failures>,
}

/// Failures in a row at one replica, as this thread saw them.
#[derive(Clone, Copy, Debug, Default)]
struct Failures {
    streak: u32,
    until_ms: u64,
}

/// How long a failure is remembered.
const FAILURE_MS: u64 = 10_000;

/// The most failures in a row that count: 2^10 requests are more than any replica has in flight.
const MAX_STREAK: u32 = 10;

impl Replica {
    /// Notes whether it served a request.
    pub(crate) fn note(&self, host: &impl Host, failed: bool) {
        let streak = self.failures.get().streak;
        if failed {
            let streak = streak.saturating_add(1).min(MAX_STREAK);
            self.failures.set(Failures { streak, until_ms: host.now_ms().saturating_add(FAILURE_MS) });
        } else if streak > 0 {
            self.failures.set(Failures::default());
        }
    }

    /// Requests to add to its load for its recent failures, so that a replica which fails fast does not attract work: twice as
    /// many with each failure in a row.
    pub(super) fn penalty(&self, now_ms: u64) -> u32 {
        match self.failures.get() {
            Failures { streak: 0, .. } => 0,
            // A time further ahead was set by a clock that has been set back since.
            Failures { streak, until_ms } if now_ms < until_ms && until_ms.saturating_sub(now_ms) <= FAILURE_MS => {
                1_u32.checked_shl(streak).unwrap_or(u32::MAX)
            }
            Failures { .. } => 0,
        }
    }
}

/// Counters of requests by outcome, each defined when it is first used.
#[derive(Debug)]
pub(crate) struct Requests {
    label: String,
    counters: [Cell<Option<MetricId>>; Outcome::ALL.len()],
}

impl Requests {
    pub(super) fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), counters: Default::default() }
    }

    fn counter(&self, host: &impl Host, pool: &str, outcome: Outcome) -> Result<Option<MetricId>, HostError> {
        let Some(cell) = self.counters.get(outcome as usize) else { return Ok(None) };
        if cell.get().is_none() {
            cell.set(Some(host.define(&Metric::Requests { pool, replica: &self.label, outcome })?));
        }
        Ok(cell.get())
    }

    pub(crate) fn count(&self, host: &impl Host, pool: &str, outcome: Outcome) -> Result<(), HostError> {
        match self.counter(host, pool, outcome)? {
            Some(counter) => host.add(counter, 1),
            None => Ok(()),
        }
    }

    pub(crate) fn value(&self, host: &impl Host, pool: &str, outcome: Outcome) -> Result<u64, HostError> {
        self.counter(host, pool, outcome)?.map_or(Ok(0), |counter| host.value(counter))
    }

    /// Requests of every outcome.
    pub(crate) fn total(&self, host: &impl Host, pool: &str) -> Result<u64, HostError> {
        Outcome::ALL.iter().try_fold(0_u64, |sum, outcome| Ok(sum.saturating_add(self.value(host, pool, *outcome)?)))
    }
}

/// Finds the statistics of replicas by name.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    known: HashMap<ReplicaId, Rc<Replica>>,
    /// Names given so far, those of replicas that are forgotten among them.
    names: usize,
}

impl Registry {
    pub(crate) fn replica(&mut self, host: &impl Host, pool: &str, name: &ReplicaName) -> Result<Rc<Replica>, HostError> {
        let id = name.id();
        if let Some(known) = self.known.get(&id) {
            return Ok(Rc::clone(known));
        }
        let own = self.names < MAX_NAMES;
        let label = if own { name.to_string() } else { format!("spare-{}", id.0 % SPARE_NAMES) };
        let replica = Rc::new(Replica {
            name: *name,
            id,
            address: name.address.to_string(),
            in_flight: host.define(&Metric::InFlight { pool, replica: &label })?,
            at_home: host.define(&Metric::AtHome { pool, replica: &label })?,
            recent: host.define(&Metric::Recent { pool, replica: &label })?,
            recent_context: host.define(&Metric::RecentContext { pool, replica: &label })?,
            requests: Requests::new(label.clone()),
            label,
            own: Cell::new(0),
            lane: Cell::new(None),
            failures: Cell::default(),
        });
        if own {
            self.names = self.names.saturating_add(1);
        }
        if self.known.len() >= MAX_NAMES.saturating_mul(2) {
            // Those that are in no list and have nothing in flight.
            self.known.retain(|_, known| Rc::strong_count(known) > 1 || known.own.get() > 0);
        }
        self.known.insert(id, Rc::clone(&replica));
        Ok(replica)
    }

    /// Every replica that has been asked for.
    pub(crate) fn known(&self) -> impl Iterator<Item = &Rc<Replica>> {
        self.known.values()
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use super::*;
    use crate::host::MemoryHost;

    #[test]
    fn replicas_that_come_and_go_without_end_get_names_up_to_a_bound() {
        let host = MemoryHost::new(1);
        let mut registry = Registry::default();
        for number in 0..6 * MAX_NAMES {
            let [high, low] = u16::try_from(number).expect("a few").to_be_bytes();
            let name = ReplicaName::endpoint(SocketAddr::from(([10, 0, high, low], 8000)));
            registry.replica(&host, "pool", &name).expect("statistics");
        }
        let names = host.metrics().iter().filter(|(name, _)| name.starts_with("homing_in_flight")).count();
        assert_eq!(names, MAX_NAMES + SPARE_NAMES as usize);
        assert!(registry.known().count() <= 2 * MAX_NAMES, "and what is gone is forgotten");
    }
}
