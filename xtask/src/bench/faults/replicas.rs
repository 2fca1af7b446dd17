//! Replicas that fail.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::report::Row;
use super::trial::{Culprit, Recovery, Trial, options};
use crate::tools::Tools;

/// How long a fault lasts: longer than an attempt at a replica may be silent.
const LASTS: Duration = Duration::from_secs(6);

/// Tells a stand-in to misbehave.
async fn misbehave(replica: SocketAddr, how: Value) -> Result<()> {
    Client::new().post(format!("http://{replica}/debug/fault")).json(&how).send().await?.error_for_status()?;
    Ok(())
}

pub(super) async fn killed(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &options()).await?;
    let place = trial.victim();
    let victim = trial.fleet.replicas[place].1;
    trial.until_busy(place).await?;
    trial.begin();
    trial.fleet.replicas[place].0.kill().await?;
    sleep(LASTS).await;
    trial.fleet.restart_replica(place).await?;
    trial.end();
    trial.judge(Culprit::Replica(victim), Recovery::AnsweredSinceBegin).await
}

pub(super) async fn hung(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &options()).await?;
    let place = trial.victim();
    let victim = trial.fleet.replicas[place].1;
    trial.until_busy(place).await?;
    trial.begin();
    trial.fleet.replicas[place].0.freeze(true).await?;
    sleep(LASTS).await;
    trial.fleet.replicas[place].0.freeze(false).await?;
    trial.end();
    trial.judge(Culprit::Replica(victim), Recovery::AnsweredSinceBegin).await
}

/// Makes the first stand-in misbehave for a while.
async fn misbehaves(tools: &Tools, how: Value, loses: bool, recovery: Recovery) -> Result<Row> {
    let mut trial = Trial::start(tools, &options()).await?;
    let place = trial.victim();
    let victim = trial.fleet.replicas[place].1;
    trial.until_busy(place).await?;
    trial.begin();
    misbehave(victim, how).await?;
    sleep(LASTS).await;
    misbehave(victim, json!({ "mode": "none" })).await?;
    trial.end();
    trial.judge(if loses { Culprit::Replica(victim) } else { Culprit::Nothing }, recovery).await
}

pub(super) async fn slow(tools: &Tools) -> Result<Row> {
    misbehaves(tools, json!({ "mode": "slow", "delay_ms": 1500 }), false, Recovery::AnsweredSinceEnd).await
}

pub(super) async fn cuts_streams(tools: &Tools) -> Result<Row> {
    misbehaves(tools, json!({ "mode": "reset-mid-stream" }), true, Recovery::AnsweredSinceEnd).await
}

pub(super) async fn answers_500(tools: &Tools) -> Result<Row> {
    misbehaves(tools, json!({ "mode": "error500" }), true, Recovery::AnsweredSinceEnd).await
}

pub(super) async fn terminated(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &options()).await?;
    let place = trial.victim();
    let victim = trial.fleet.replicas[place].1;
    trial.until_busy(place).await?;
    trial.begin();
    misbehave(victim, json!({ "mode": "stall" })).await?;
    sleep(LASTS).await;
    // A supervisor's patience has ended, and it starts another one.
    trial.fleet.restart_replica(place).await?;
    trial.end();
    trial.judge(Culprit::Replica(victim), Recovery::AnsweredSinceBegin).await
}
