//! `cargo xtask bench faults`: what each fault costs under load.
//!
//! Every row is a fleet of its own, agents that work all the time, and one fault that is made and, where that makes sense, ended.

mod collectors;
mod envoys;
mod network;
mod replicas;
mod report;
mod store;
mod trial;

use std::fs;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use tokio::sync::oneshot;

use self::report::Row;
use crate::process::unless_signalled;
use crate::tools::{Tools, say};

/// Which faults to make.
#[derive(Debug, Args)]
pub struct FaultsOptions {
    /// Only these.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Fault>,
    /// Print the rows as JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Runs in a network namespace of its own, writes the rows into this file, and ends when its stdin does.
    #[arg(long, hide = true, value_name = "FILE")]
    own_network: Option<PathBuf>,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// A replica is killed, and started again.
    ReplicaKilled,
    /// A replica accepts connections and does nothing.
    ReplicaHung,
    /// A replica begins each request 1.5 s late.
    ReplicaSlow,
    /// A replica cuts every stream behind its first token.
    ReplicaCutsStreams,
    /// A replica answers 500 at once.
    ReplicaAnswers500,
    /// A replica stops as vLLM does at SIGTERM: nobody can connect, what is in flight stalls.
    ReplicaTerminated,
    /// The collector is killed, and started again.
    CollectorKilled,
    /// The collector accepts connections and does nothing.
    CollectorFrozen,
    /// Another collector is heard that tells lies of load, states and replicas.
    CollectorLies,
    /// Another collector is heard whose clock is six hours ahead, then six hours behind.
    ClockSkewed,
    /// The filter's VM fails at one of two workers.
    WorkerTrapped,
    /// Envoy gets its listeners anew, 20 times in a row.
    ListenerUpdates,
    /// One of two Envoys is killed, and started again.
    EnvoyKilled,
    /// Envoy hands its sockets to another process.
    EnvoyHotRestarted,
    /// Redis is killed, and started again with nothing in it.
    RedisKilled,
    /// Everything to and from Redis takes half a second.
    RedisSlow,
    /// Packets between the collector and Envoy are dropped.
    CutCollectorEnvoy,
    /// Packets between the collector and a replica are dropped.
    CutCollectorReplica,
    /// Packets between Envoy and a replica are dropped.
    CutEnvoyReplica,
}

impl Fault {
    /// As it is called on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    async fn make(self, tools: &Tools) -> Result<Row> {
        match self {
            Self::ReplicaKilled => replicas::killed(tools).await,
            Self::ReplicaHung => replicas::hung(tools).await,
            Self::ReplicaSlow => replicas::slow(tools).await,
            Self::ReplicaCutsStreams => replicas::cuts_streams(tools).await,
            Self::ReplicaAnswers500 => replicas::answers_500(tools).await,
            Self::ReplicaTerminated => replicas::terminated(tools).await,
            Self::CollectorKilled => collectors::killed(tools).await,
            Self::CollectorFrozen => collectors::frozen(tools).await,
            Self::CollectorLies => collectors::lies(tools).await,
            Self::ClockSkewed => collectors::skewed(tools).await,
            Self::WorkerTrapped => envoys::trapped(tools).await,
            Self::ListenerUpdates => envoys::listener_updates(tools).await,
            Self::EnvoyKilled => envoys::killed(tools).await,
            Self::EnvoyHotRestarted => envoys::hot_restarted(tools).await,
            Self::RedisKilled => store::killed(tools).await,
            Self::RedisSlow => store::slow(tools).await,
            Self::CutCollectorEnvoy => network::cut_collector_envoy(tools).await,
            Self::CutCollectorReplica => network::cut_collector_replica(tools).await,
            Self::CutEnvoyReplica => network::cut_envoy_replica(tools).await,
        }
    }

    fn needs_own_network(self) -> bool {
        matches!(self, Self::CutCollectorEnvoy | Self::CutCollectorReplica | Self::CutEnvoyReplica)
    }
}

/// Makes the faults, one after the other.
///
/// # Errors
/// If something cannot be built, installed or started; if a request was lost that nothing carried which failed, or a counter is wrong.
pub async fn faults(options: &FaultsOptions) -> Result<()> {
    let asked = asked_to_end(options.own_network.is_some());
    let rows = unless_signalled(async {
        tokio::select! {
            rows = make(options) => rows,
            () = asked => anyhow::bail!("nobody waits for the rows"),
        }
    });
    let rows = rows.await?;
    if let Some(file) = &options.own_network {
        return fs::write(file, serde_json::to_vec(&rows)?).with_context(|| format!("writing {}", file.display()));
    }
    if options.json {
        println!("{}", serde_json::to_string(&rows)?);
    } else {
        println!("{}", report::table(&rows));
    }
    let failed: Vec<_> = rows.iter().filter(|row| !row.wrong.is_empty()).map(|row| row.name.as_str()).collect();
    ensure!(failed.is_empty(), "not as it must be: {}", failed.join(", "));
    Ok(())
}

async fn make(options: &FaultsOptions) -> Result<Vec<Row>> {
    let tools = Tools::ensure()?;
    let faults = if options.only.is_empty() { Fault::value_variants().to_vec() } else { options.only.clone() };
    let mut rows = Vec::new();
    for (number, fault) in faults.iter().enumerate() {
        let name = fault.name();
        if options.own_network.is_none() {
            say(&format!("{} of {}: {name}", number + 1, faults.len()));
        }
        let row = match fault.needs_own_network() && options.own_network.is_none() {
            true => network::in_own_network(&name).await,
            false => fault.make(&tools).await,
        };
        let row = row.with_context(|| name.clone())?.named(&name);
        if options.own_network.is_none() {
            eprintln!("    {}", row.brief());
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Ends when stdin does, if it is to be heeded.
async fn asked_to_end(heeded: bool) {
    let (ended, end) = oneshot::channel();
    if heeded {
        // A thread of its own: a read of stdin cannot be given up.
        thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _ = ended.send(());
        });
        let _ = end.await;
    } else {
        std::future::pending::<()>().await;
    }
}
