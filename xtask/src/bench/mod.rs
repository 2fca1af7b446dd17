//! `cargo xtask bench ...`: measurements.

pub mod proxy;

use anyhow::Result;
use clap::Subcommand;

use crate::tools::{cargo, run};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// What the filter costs beside a plain Envoy: requests per second, latency, CPU time. About four minutes.
    Proxy(proxy::ProxyOptions),
    /// What the decision itself costs: naming a conversation, a turn at home, a placement. About two minutes.
    Routing,
    /// Which spill settings pay, on modelled engines in virtual time. About three minutes.
    Spill,
}

/// Measures.
///
/// # Errors
/// If something cannot be built, started or measured.
pub async fn bench(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Proxy(options) => proxy::proxy(options).await,
        BenchCommand::Routing => run(cargo().args(["bench", "--package", "homing-routing"])),
        BenchCommand::Spill => run(cargo().args(["run", "--quiet", "--release", "--package", "homing-bench", "--", "spill"])),
    }
}
