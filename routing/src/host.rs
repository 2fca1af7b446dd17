//! What the routing needs from where it runs: shared data, metrics and the time.
//!
//! Envoy is one such host; the tests and the simulator use [`MemoryHost`].

use core::fmt;

use crate::metric::Metric;

mod memory;
pub use memory::MemoryHost;

/// How often a shared value is tried that other threads change too: a turn that cannot write it goes on without.
pub(crate) const TRIES: usize = 3;

/// How often one that must be written: a place in the working set that is not given back is lost until its lease ends.
pub(crate) const MANY_TRIES: usize = 32;

/// Where the routing runs. A handle is cheap to clone and every clone means the same host.
pub trait Host: Clone {
    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;

    /// Reads a shared value. `None` if it was never written.
    ///
    /// # Errors
    /// When the host refuses.
    fn read(&self, key: &str) -> Result<Option<Stored>, HostError>;

    /// Writes a shared value if it is as `expected`; says whether it did.
    ///
    /// # Errors
    /// When the host refuses.
    fn write(&self, key: &str, value: &[u8], expected: Expected) -> Result<bool, HostError>;

    /// Finds or makes a metric, shared by every thread.
    ///
    /// # Errors
    /// When the host refuses.
    fn define(&self, metric: &Metric<'_>) -> Result<MetricId, HostError>;

    /// Adds to a metric. Counters take only positive amounts.
    ///
    /// # Errors
    /// When the host refuses.
    fn add(&self, metric: MetricId, amount: i64) -> Result<(), HostError>;

    /// Sets a gauge.
    ///
    /// # Errors
    /// When the host refuses.
    fn set(&self, metric: MetricId, value: u64) -> Result<(), HostError>;

    /// Reads a metric.
    ///
    /// # Errors
    /// When the host refuses.
    fn value(&self, metric: MetricId) -> Result<u64, HostError>;
}

/// A shared value and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The value.
    pub bytes: Vec<u8>,
    /// Changes with every write of any key.
    pub version: u32,
}

/// What a write expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Write whatever is there.
    Anything,
    /// Write only if nothing is there.
    Absent,
    /// Write only if the value still has this version.
    Version(u32),
}

impl Expected {
    /// The value that was read, unchanged.
    pub fn unchanged(stored: Option<&Stored>) -> Self {
        stored.map_or(Self::Absent, |stored| Self::Version(stored.version))
    }
}

/// A metric's handle, good for the life of this VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MetricId(pub u32);

/// The host's own status of a refused call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostError {
    /// Which call.
    pub call: &'static str,
    /// The host's status code (for proxy-wasm, a `WasmResult`).
    pub status: u32,
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the host refused {} with status {}", self.call, self.status)
    }
}

impl core::error::Error for HostError {}
