//! `cargo xtask bench ...`: measurements.

pub mod proxy;

use anyhow::Result;
use clap::Subcommand;

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// What the filter costs beside a plain Envoy: requests per second, latency, CPU time. About four minutes.
    Proxy(proxy::ProxyOptions),
}

/// Measures.
///
/// # Errors
/// If something cannot be built, started or measured.
pub async fn bench(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Proxy(options) => proxy::proxy(options).await,
    }
}
