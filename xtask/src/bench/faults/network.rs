//! A network that loses every packet between two parts.
//!
//! Everything runs in a network namespace of its own, on its loopback interface, and packet filters there drop what goes between two
//! ports. Envoy calls replicas from another address than the collector does, so that the two can be told apart.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::time::sleep;

use super::collectors::{FRESH, until_fresh};
use super::report::Row;
use super::trial::{Culprit, Recovery, Trial, without_spilling};
use crate::fleet::FleetOptions;
use crate::process::Process;
use crate::tools::{self, Tools};

/// How long the network is cut: longer than an attempt at a replica may be silent, or a snapshot counts.
const LASTS: Duration = Duration::from_secs(8);

/// From where Envoy calls replicas.
const ENVOY: &str = "127.0.0.2";

/// Makes one row in a network namespace of its own.
pub(super) async fn in_own_network(name: &str) -> Result<Row> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Row::skipped("a network namespace of its own needs root"));
    }
    let [unshare, ..] = tools::network()?;
    let dir = tempfile::Builder::new().prefix("homing-network-").tempdir()?;
    let (this, rows) = (std::env::current_exe()?.display().to_string(), dir.path().join("rows.json"));
    let args = ["--net", &this, "bench", "faults", "--only", name, "--own-network", &rows.display().to_string()].map(str::to_owned);
    let mut process = Process::start_group("network", &unshare, &args, &[], dir.path())?;
    process.wait().await?;
    let rows: Vec<Row> = serde_json::from_slice(&fs::read(&rows).with_context(|| process.tail())?)?;
    rows.into_iter().next().context("a row")
}

/// Packet filters of this network namespace.
struct Filters {
    nft: std::path::PathBuf,
}

impl Filters {
    fn new() -> Result<Self> {
        let [_, ip, nft] = tools::network()?;
        let filters = Self { nft };
        command(Command::new(ip).args(["link", "set", "lo", "up"]))?;
        filters.rule("add table inet faults")?;
        filters.rule("add chain inet faults in { type filter hook input priority 0; }")?;
        Ok(filters)
    }

    /// Drops what goes between a server and clients at this address.
    fn cut(&self, server: SocketAddr, clients: &str) -> Result<()> {
        let port = server.port();
        self.rule(&format!("add rule inet faults in ip saddr {clients} tcp dport {port} drop"))?;
        self.rule(&format!("add rule inet faults in ip daddr {clients} tcp sport {port} drop"))
    }

    fn mend(&self) -> Result<()> {
        self.rule("flush chain inet faults in")
    }

    fn rule(&self, rule: &str) -> Result<()> {
        command(Command::new(&self.nft).arg(rule))
    }
}

fn command(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn options() -> FleetOptions {
    let mut options = without_spilling();
    let source = json!({ "source_address": { "address": ENVOY, "port_value": 0 } });
    options.stack.edits.push(("/static_resources/clusters/0/upstream_bind_config".to_owned(), source));
    options
}

pub(super) async fn cut_collector_envoy(tools: &Tools) -> Result<Row> {
    let filters = Filters::new()?;
    let mut trial = Trial::start(tools, &options()).await?;
    // A snapshot that was held up is older than the one before it when it arrives.
    trial.allow(&["refused"]);
    trial.begin();
    filters.cut(trial.fleet.proxies[0].control, "127.0.0.1")?;
    sleep(LASTS).await;
    filters.mend()?;
    trial.end();
    let took = until_fresh(&trial).await?;
    trial.judge(Culprit::Nothing, Recovery::Seen(took, FRESH)).await
}

/// Cuts one replica off from these clients.
async fn cut_replica(tools: &Tools, clients: &str, loses: bool) -> Result<Row> {
    let filters = Filters::new()?;
    let mut trial = Trial::start(tools, &options()).await?;
    let victim = trial.fleet.replicas[trial.victim()].1;
    trial.begin();
    filters.cut(victim, clients)?;
    sleep(LASTS).await;
    filters.mend()?;
    trial.end();
    trial.judge(if loses { Culprit::Replica(victim) } else { Culprit::Nothing }, Recovery::AnsweredSinceBegin).await
}

pub(super) async fn cut_collector_replica(tools: &Tools) -> Result<Row> {
    cut_replica(tools, "127.0.0.1", false).await
}

pub(super) async fn cut_envoy_replica(tools: &Tools) -> Result<Row> {
    cut_replica(tools, ENVOY, true).await
}
