//! A store of conversations' homes that fails.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep};

use super::report::Row;
use super::trial::{Culprit, Recovery, Trial, without_spilling};
use crate::fleet::FleetOptions;
use crate::relay::Relay;
use crate::tools::Tools;
use crate::wait::eventually;

/// How long the store is away or slow.
const LASTS: Duration = Duration::from_secs(6);

/// How much longer everything takes, each way.
const SLOW: Duration = Duration::from_millis(500);

fn two_of_each() -> FleetOptions {
    FleetOptions { envoys: 2, collectors: 2, redis: true, ..without_spilling() }
}

pub(super) async fn killed(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &two_of_each()).await?;
    trial.begin();
    trial.fleet.redis.take().context("Redis")?.kill().await?;
    sleep(LASTS).await;
    trial.fleet.start_redis().await?;
    trial.end();
    let since = Instant::now();
    until_used(&trial).await?;
    let took = since.elapsed();
    trial.judge(Culprit::Nothing, Recovery::Seen(took, "its start until both collectors use it")).await
}

/// Waits until both collectors have a store.
async fn until_used(trial: &Trial) -> Result<()> {
    eventually("the store to be used", async || {
        let (one, other) = (trial.fleet.status(0).await?, trial.fleet.status(1).await?);
        Ok([one, other].iter().all(|status| status["affinity"]["store"]["up"] == true))
    })
    .await
}

pub(super) async fn slow(tools: &Tools) -> Result<Row> {
    let mut relay = Relay::listen().await?;
    let address = relay.address;
    let options = FleetOptions { redis_by: Some(address), ..two_of_each() };
    let mut trial = Trial::start(tools, &options).await?;
    relay.lead_to(trial.fleet.store().context("Redis")?);
    until_used(&trial).await?;
    trial.begin();
    relay.set_delay(SLOW);
    sleep(LASTS).await;
    relay.set_delay(Duration::ZERO);
    trial.end();
    trial.judge(Culprit::Nothing, Recovery::AtHomeSinceBegin).await
}
