//! Agent sessions sent by `homing-bench load`.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use tokio::process::Command;
use tokio::time::timeout;

use crate::stack::MODEL;
use crate::tools::Tools;

/// How long it may take beyond its time: turns on their way at the end have half a minute to end.
const GRACE: Duration = Duration::from_secs(60);

/// How long to send, and in whose time to report.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Seconds of real time.
    pub seconds: u64,
    /// How many times faster than real time the engines compute.
    pub speed: f64,
}

/// Sends sessions to `url`, in front of these replicas; returns the report that `homing-bench load --json` prints.
///
/// # Errors
/// If the load does not run to its end. Turns that fail are counted in the report.
pub async fn load<Report: DeserializeOwned>(
    tools: &Tools,
    url: &str,
    replicas: &[SocketAddr],
    pace: Pace,
    more: &[String],
) -> Result<Report> {
    let replicas: Vec<_> = replicas.iter().map(|address| format!("http://{address}")).collect();
    let mut command = Command::new(&tools.bench);
    command.args(["load", "--json", "--model", MODEL, "--url", url, "--replicas", &replicas.join(",")]);
    command.args(["--duration", &format!("{}s", pace.seconds), "--speed", &pace.speed.to_string()]);
    command.args(more).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let limit = Duration::from_secs(pace.seconds) + GRACE;
    let output = timeout(limit, command.spawn()?.wait_with_output()).await.context("the load did not end")??;
    ensure!(output.status.success(), "the load failed ({}).\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("the load's figures")
}
