//! Envoys that fail, or are told to change.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::report::Row;
use super::trial::{Culprit, Recovery, Trial, options, without_spilling};
use crate::fleet::FleetOptions;
use crate::memory::Memory;
use crate::tools::{self, Tools};
use crate::wait::eventually;

/// Updates of the listeners.
const UPDATES: u64 = 20;

/// After this an Envoy closes what is left of a listener that was replaced, and of the process before it ends.
const DRAIN: &str = "4";
const PARENT_ENDS: &str = "8";

/// How much an Envoy may have grown after the updates: 4 MiB; one VM more at each would be ten times that.
const GROWTH: i64 = 4 << 20;

pub(super) async fn trapped(tools: &Tools) -> Result<Row> {
    let mut options = options();
    options.stack.filter = Some(tools::build_trapping_filter()?);
    let mut trial = Trial::start(tools, &options).await?;
    // What it held is given back for it, and counted as that.
    trial.allow(&["leak"]);
    let url = format!("http://{}/v1/models", trial.fleet.proxies[0].proxy);
    trial.begin();
    // The worker that traps may cut the connection.
    let _ = Client::new().get(url).header("x-homing-test-trap", "1").send().await;
    trial.end();
    trial.judge(Culprit::Worker, Recovery::AnsweredSinceBegin).await
}

pub(super) async fn listener_updates(tools: &Tools) -> Result<Row> {
    let envoy_args = ["--disable-hot-restart", "--drain-time-s", DRAIN].map(str::to_owned).to_vec();
    let options = FleetOptions { listeners_from_file: true, envoy_args, ..without_spilling() };
    let mut trial = Trial::start(tools, &options).await?;
    // The first one makes what every update needs.
    update(&trial, 0).await?;
    until_drained(&trial).await?;
    let before = memory(&trial).await?;
    trial.begin();
    for number in 1..=UPDATES {
        update(&trial, number).await?;
    }
    trial.end();
    until_drained(&trial).await?;
    let after = memory(&trial).await?;
    trial.note(format!("Envoy's memory was {before} before and {after} after"));
    let mut row = trial.judge(Culprit::Nothing, Recovery::AtHomeSinceBegin).await?;
    let grown = after.allocated as i64 - before.allocated as i64;
    if grown > GROWTH {
        row.wrong.push(format!("Envoy has grown by {:.1} MiB", grown as f64 / f64::from(1 << 20)));
    }
    Ok(row)
}

async fn memory(trial: &Trial) -> Result<Memory> {
    let envoy = trial.fleet.proxies[0].envoy.as_ref().context("an Envoy")?;
    Memory::of_envoy(envoy).await
}

/// Changes the filter's configuration in the clients' listener, and waits until Envoy has taken that.
async fn update(trial: &Trial, number: u64) -> Result<()> {
    let proxy = &trial.fleet.proxies[0];
    let taken = async || stat(trial, "listener_manager.lds.update_success").await;
    let before = taken().await?;
    proxy.write_listeners(|config| {
        if let Some(route) = config.filter_config("route") {
            route["max_body_bytes"] = json!(33_554_432 - number - 1);
        }
    })?;
    eventually("Envoy to take the listeners", async || Ok(taken().await? > before)).await?;
    ensure!(stat(trial, "listener_manager.lds.update_rejected").await? == 0, "Envoy refused the listeners");
    Ok(())
}

async fn until_drained(trial: &Trial) -> Result<()> {
    eventually("replaced listeners to be gone", async || {
        let chains = stat(trial, "listener_manager.total_filter_chains_draining").await?;
        Ok(chains + stat(trial, "listener_manager.total_listeners_draining").await? == 0)
    })
    .await
}

async fn stat(trial: &Trial, name: &str) -> Result<u64> {
    let admin = trial.fleet.proxies[0].admin()?;
    let stats: Value = reqwest::get(format!("http://{admin}/stats?format=json&filter=^{name}$")).await?.json().await?;
    stats["stats"][0]["value"].as_u64().with_context(|| format!("Envoy has no {name}"))
}

pub(super) async fn killed(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &FleetOptions { envoys: 2, ..without_spilling() }).await?;
    trial.begin();
    trial.fleet.proxies[0].envoy.take().context("an Envoy")?.process.kill().await?;
    trial.counts_anew(false);
    // As a load balancer does whose connections break, and that asks whether it is ready.
    trial.agents.set_open(0, false);
    sleep(Duration::from_secs(1)).await;
    trial.fleet.start_envoy(0).await?;
    trial.fleet.until_ready(0).await?;
    trial.end();
    trial.agents.set_open(0, true);
    trial.judge(Culprit::Envoy(0), Recovery::AtHomeSinceBegin).await
}

pub(super) async fn hot_restarted(tools: &Tools) -> Result<Row> {
    let base_id = tempfile::NamedTempFile::new()?;
    let times = ["--drain-time-s", DRAIN, "--parent-shutdown-time-s", PARENT_ENDS].map(str::to_owned);
    let first = ["--use-dynamic-base-id".to_owned(), "--base-id-path".to_owned(), base_id.path().display().to_string()];
    let envoy_args = first.into_iter().chain(times.clone()).collect();
    let mut trial = Trial::start(tools, &FleetOptions { envoy_args, ..without_spilling() }).await?;
    let base_id = fs::read_to_string(base_id.path())?.trim().to_owned();
    let second = ["--base-id".to_owned(), base_id, "--restart-epoch".to_owned(), "1".to_owned()];
    trial.begin();
    let child = trial.fleet.another_envoy(0, &second.into_iter().chain(times).collect::<Vec<_>>()).await?;
    let mut parent = trial.fleet.proxies[0].envoy.replace(child).context("an Envoy")?;
    eventually("the process before to end", async || Ok(parent.process.check().is_err())).await?;
    trial.end();
    // Of what the other process counted, Envoy hands on what is newer than its last flush of statistics.
    trial.counts_anew(true);
    trial.judge(Culprit::Nothing, Recovery::AtHomeSinceBegin).await
}
