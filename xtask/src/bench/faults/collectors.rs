//! Collectors that fail.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::report::Row;
use super::trial::{Culprit, Recovery, Trial, without_spilling};
use crate::pusher::{Pusher, report};
use crate::statistics::Statistics;
use crate::tools::Tools;
use crate::wait::eventually;

/// How long a collector is away: longer than its last snapshot counts.
const LASTS: Duration = Duration::from_secs(8);

/// How long each lie is told, and how often.
const LIE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(250);

const HOUR_MS: u64 = 3_600_000;

/// The size of a cache in what is made up.
const CACHE_TOKENS: u64 = 36_000;

pub(super) const FRESH: &str = "its end to the next snapshot in Envoy";

/// Waits until Envoy has another snapshot than now.
pub(super) async fn until_fresh(trial: &Trial) -> Result<Duration> {
    let (admin, since) = (trial.fleet.proxies[0].admin()?, Instant::now());
    let version = async || Ok::<_, anyhow::Error>(Statistics::read(admin).await?.sum("homing_snapshot_version", &[]));
    let before = version().await?;
    eventually("a fresh snapshot", async || Ok(version().await? != before)).await?;
    Ok(since.elapsed())
}

pub(super) async fn killed(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &without_spilling()).await?;
    trial.begin();
    trial.fleet.collectors[0].process.take().context("a collector")?.kill().await?;
    sleep(LASTS).await;
    trial.end();
    let since = Instant::now();
    trial.fleet.start_collector(0).await?;
    until_fresh(&trial).await?;
    let took = since.elapsed();
    trial.judge(Culprit::Nothing, Recovery::Seen(took, "its start to the first snapshot in Envoy")).await
}

pub(super) async fn frozen(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &without_spilling()).await?;
    let freeze =
        async |trial: &Trial, frozen| trial.fleet.collectors[0].process.as_ref().context("a collector")?.freeze(frozen).await;
    trial.begin();
    freeze(&trial, true).await?;
    sleep(LASTS).await;
    freeze(&trial, false).await?;
    trial.end();
    let took = until_fresh(&trial).await?;
    trial.judge(Culprit::Nothing, Recovery::Seen(took, FRESH)).await
}

/// Pushes the same for a while.
async fn push_for(pusher: &mut Pusher, replicas: &[Value], now_ms: impl Fn() -> u64) -> Result<()> {
    let until = Instant::now() + LIE;
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while Instant::now() < until {
        ticks.tick().await;
        pusher.push(replicas, now_ms()).await?;
    }
    Ok(())
}

pub(super) async fn lies(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &without_spilling()).await?;
    // It claims to have started later than the true one, and is heard.
    let mut liar = Pusher::new(trial.fleet.proxies[0].control, unix_ms() + HOUR_MS);
    let all: Vec<_> = trial.fleet.replicas.iter().map(|(_, address)| *address).collect();
    let busy = |at: &SocketAddr| {
        let mut replica = report(*at, "ready", CACHE_TOKENS);
        (replica["running"], replica["waiting"], replica["kv_usage"]) = (json!(u32::MAX), json!(u32::MAX), json!(1.0));
        replica
    };
    let but_one = all.iter().enumerate().map(|(place, at)| if place == 0 { report(*at, "ready", u64::MAX) } else { busy(at) });
    let unknown = (1..=4).map(|port| report((Ipv4Addr::LOCALHOST, port).into(), "ready", CACHE_TOKENS));
    let lies: [Vec<Value>; 5] = [
        all.iter().map(busy).collect(),
        but_one.collect(),
        all.iter().map(|at| report(*at, "down", 0)).collect(),
        unknown.collect(),
        Vec::new(),
    ];
    // Where Envoy does not know the chosen replica, it chooses, and that is counted.
    trial.allow(&["mismatch"]);
    trial.begin();
    for lie in &lies {
        push_for(&mut liar, lie, unix_ms).await?;
    }
    trial.end();
    trial.judge(Culprit::Nothing, Recovery::AtHomeSinceEnd).await
}

pub(super) async fn skewed(tools: &Tools) -> Result<Row> {
    let mut trial = Trial::start(tools, &without_spilling()).await?;
    let truth: Vec<_> = trial.fleet.replicas.iter().map(|(_, address)| report(*address, "ready", CACHE_TOKENS)).collect();
    let (control, start) = (trial.fleet.proxies[0].control, unix_ms());
    trial.begin();
    push_for(&mut Pusher::new(control, start + HOUR_MS), &truth, || unix_ms() + 6 * HOUR_MS).await?;
    push_for(&mut Pusher::new(control, start + 2 * HOUR_MS), &truth, || unix_ms() - 6 * HOUR_MS).await?;
    trial.end();
    trial.judge(Culprit::Nothing, Recovery::AtHomeSinceBegin).await
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
