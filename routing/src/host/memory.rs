//! A host in memory, for tests and the simulator.

use core::cell::{Cell, RefCell};
use core::fmt;
use std::rc::Rc;

use hashbrown::HashMap;

use super::{Expected, Host, HostError, MetricId, Stored};
use crate::metric::Metric;

/// Shared data, metrics and a clock that is set by hand, with Envoy's semantics.
#[derive(Clone, Default)]
pub struct MemoryHost(Rc<State>);

#[derive(Default)]
struct State {
    now_ms: Cell<u64>,
    version: Cell<u32>,
    data: RefCell<HashMap<String, Stored>>,
    names: RefCell<HashMap<String, MetricId>>,
    metrics: RefCell<Vec<u64>>,
}

impl MemoryHost {
    /// An empty host whose clock stands at `now_ms`.
    pub fn new(now_ms: u64) -> Self {
        let host = Self::default();
        host.0.now_ms.set(now_ms);
        host
    }

    /// Sets the clock.
    pub fn set_now(&self, now_ms: u64) {
        self.0.now_ms.set(now_ms);
    }

    /// Moves the clock forward.
    pub fn advance(&self, ms: u64) {
        self.0.now_ms.set(self.0.now_ms.get().saturating_add(ms));
    }

    /// Sets the clock back.
    pub fn set_back(&self, ms: u64) {
        self.0.now_ms.set(self.0.now_ms.get().saturating_sub(ms));
    }

    /// A metric's value by its full name; 0 if nothing defined it.
    pub fn metric(&self, metric: &Metric<'_>) -> u64 {
        self.define(metric).and_then(|id| self.value(id)).unwrap_or(0)
    }

    /// Every metric that was defined, with its value.
    pub fn metrics(&self) -> Vec<(String, u64)> {
        let names = self.0.names.borrow();
        names.iter().map(|(name, id)| (name.clone(), self.value(*id).unwrap_or(0))).collect()
    }

    /// The bytes held in all shared values.
    pub fn shared_bytes(&self) -> usize {
        self.0.data.borrow().values().map(|stored| stored.bytes.len()).sum()
    }
}

#[cfg(test)]
impl MemoryHost {
    /// Every shared value by its key.
    pub(crate) fn shared(&self) -> std::collections::BTreeMap<String, Vec<u8>> {
        self.0.data.borrow().iter().map(|(key, stored)| (key.clone(), stored.bytes.clone())).collect()
    }
}

/// Its data would fill pages.
impl fmt::Debug for MemoryHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHost").finish_non_exhaustive()
    }
}

impl Host for MemoryHost {
    fn now_ms(&self) -> u64 {
        self.0.now_ms.get()
    }

    fn read(&self, key: &str) -> Result<Option<Stored>, HostError> {
        Ok(self.0.data.borrow().get(key).cloned())
    }

    fn write(&self, key: &str, value: &[u8], expected: Expected) -> Result<bool, HostError> {
        let mut data = self.0.data.borrow_mut();
        let matches = match (expected, data.get(key)) {
            (Expected::Anything, _) => true,
            // Envoy ignores the expected version of a key that does not exist.
            (_, None) => true,
            (Expected::Absent, Some(_)) => false,
            (Expected::Version(version), Some(stored)) => stored.version == version,
        };
        if matches {
            let version = self.0.version.get().saturating_add(1);
            self.0.version.set(version);
            data.insert(key.to_owned(), Stored { bytes: value.to_vec(), version });
        }
        Ok(matches)
    }

    fn define(&self, metric: &Metric<'_>) -> Result<MetricId, HostError> {
        let name = metric.to_string();
        let mut names = self.0.names.borrow_mut();
        if let Some(id) = names.get(&name) {
            return Ok(*id);
        }
        let mut metrics = self.0.metrics.borrow_mut();
        let id = MetricId(u32::try_from(metrics.len()).unwrap_or(u32::MAX));
        metrics.push(0);
        names.insert(name, id);
        Ok(id)
    }

    fn add(&self, metric: MetricId, amount: i64) -> Result<(), HostError> {
        match self.0.metrics.borrow_mut().get_mut(metric.0 as usize) {
            // Wraps below zero as Envoy's gauges do, so that a test sees a decrement too many.
            Some(value) => *value = value.wrapping_add_signed(amount),
            None => return Err(HostError { call: "increment_metric", status: 1 }),
        }
        Ok(())
    }

    fn set(&self, metric: MetricId, value: u64) -> Result<(), HostError> {
        match self.0.metrics.borrow_mut().get_mut(metric.0 as usize) {
            Some(slot) => *slot = value,
            None => return Err(HostError { call: "record_metric", status: 1 }),
        }
        Ok(())
    }

    fn value(&self, metric: MetricId) -> Result<u64, HostError> {
        self.0.metrics.borrow().get(metric.0 as usize).copied().ok_or(HostError { call: "get_metric", status: 1 })
    }
}
