//! `cargo xtask bench ...`: measurements.

pub mod balance;
pub mod faults;
pub mod peers;
pub mod proxy;
pub mod soak;
pub mod sync;

use anyhow::Result;
use clap::Subcommand;

use crate::tools::{self, cargo, run, say};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// What the filter costs beside a plain Envoy, and beside a Lua script and an external processor that choose an upstream: requests
    /// per second, latency, CPU time. About 13 minutes.
    Proxy(proxy::ProxyOptions),
    /// What the decision itself costs: naming a conversation, a turn at home, a placement, admission; natively, then as wasm in V8.
    /// About seven minutes.
    Routing,
    /// Homing beside Envoy's own policies, vllm-router and smg, under the same load. About 55 minutes; `--rounds 1 --stages 8` takes
    /// three.
    Peers(peers::PeersOptions),
    /// Homing with and without admission by working set on a real Envoy, beside the simulator with the same sessions. About eight
    /// minutes.
    Admission(peers::admission::AdmissionOptions),
    /// The dial of admission's fairness, on modelled engines: output by the longest wait, as a figure. About a minute.
    Frontier,
    /// What the collector costs with 1,000 replicas, and how old the figures are that reach Envoy. Half a minute.
    Collector,
    /// What it costs that several Envoys agree: bytes and processor time of the exchange. About two minutes.
    Sync(sync::SyncOptions),
    /// How evenly several Envoys place new conversations, beside the simulation of the routing code. About four minutes.
    Balance(balance::BalanceOptions),
    /// What each fault costs under load: requests lost, the time until it is over, counters afterwards. About seven minutes.
    Faults(faults::FaultsOptions),
    /// Half an hour of load with conversations, replicas and drains that come and go: memory and counters before and after.
    Soak(soak::SoakOptions),
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
        BenchCommand::Routing => routing(),
        BenchCommand::Balance(options) => balance::balance(&options).await,
        BenchCommand::Faults(options) => faults::faults(&options).await,
        BenchCommand::Soak(options) => soak::soak(&options).await,
        BenchCommand::Sync(options) => sync::sync(&options).await,
        BenchCommand::Peers(options) => peers::peers(options).await,
        BenchCommand::Admission(options) => peers::admission::admission(options).await,
        BenchCommand::Frontier => {
            let svg = tools::root().join("docs/results/admission-frontier.svg");
            run(cargo().args(["run", "--quiet", "--release", "--package", "homing-bench", "--", "frontier", "--out"]).arg(svg))
        }
        BenchCommand::Collector => {
            run(cargo().args(["run", "--quiet", "--release", "--package", "homing-collector", "--example", "scrape_cost"]))
        }
        BenchCommand::Spill => run(cargo().args(["run", "--quiet", "--release", "--package", "homing-bench", "--", "spill"])),
    }
}

fn routing() -> Result<()> {
    say("natively");
    run(cargo().args(["bench", "--package", "homing-routing"]))?;
    let mut command = cargo();
    tools::under_node(command.args(["bench", "--package", "homing-routing"]))?;
    say("as wasm, in Node's V8");
    run(&mut command)
}
