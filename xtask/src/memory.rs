//! How much memory processes have.

use std::fmt::{self, Display, Formatter};
use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::envoy::Envoy;
use crate::process::Process;

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Memory {
    /// Resident, as the system sees it.
    pub resident: u64,
    /// Allocated and not freed, as Envoy's allocator sees it; 0 of other processes.
    pub allocated: u64,
}

impl Memory {
    /// Of any process.
    ///
    /// # Errors
    /// If it has ended.
    pub fn of(process: &Process) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{}/status", process.id().context("a process")?))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        let kilobytes: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(Self { resident: kilobytes << 10, allocated: 0 })
    }

    /// Of an Envoy.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn of_envoy(envoy: &Envoy) -> Result<Self> {
        let memory: Value = reqwest::get(format!("http://{}/memory", envoy.admin)).await?.json().await?;
        let allocated = memory["allocated"].as_str().and_then(|bytes| bytes.parse().ok()).context("Envoy's memory")?;
        Ok(Self { allocated, ..Self::of(&envoy.process)? })
    }

    /// The greater of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { resident: self.resident.max(other.resident), allocated: self.allocated.max(other.allocated) }
    }
}

impl Display for Memory {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(to, "{:.1} MiB resident", mib(self.resident))?;
        if self.allocated > 0 {
            write!(to, ", {:.1} allocated", mib(self.allocated))?;
        }
        Ok(())
    }
}
