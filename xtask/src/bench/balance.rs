//! `cargo xtask bench balance`: how evenly several Envoys place new conversations, beside the simulation of the routing code.
//!
//! Every conversation is one request that its client leaves after a fixed time, as in the simulation (`routing/src/router/tests/fleet.rs`),
//! so that how long it takes does not depend on where it went.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use reqwest::Client;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use crate::fleet::{FleetOptions, FleetStack};
use crate::stack::{MODEL, StackOptions};
use crate::tools::{Tools, cargo, run, say};

/// Requests at one replica at any time, and replicas.
const EACH: u32 = 20;
const REPLICAS: usize = 4;

/// How often it is looked who has how many.
const STEP: Duration = Duration::from_millis(25);

/// What to measure.
#[derive(Debug, Args)]
pub struct BalanceOptions {
    /// Envoys, of one worker each, beside one alone.
    #[arg(long, default_value_t = 8)]
    envoys: usize,
    /// New conversations a second; several are measured.
    #[arg(long, value_delimiter = ',', default_value = "4,40", value_parser = clap::value_parser!(u32).range(1..=80))]
    rates: Vec<u32>,
    /// Seconds of each measurement, after as many requests are under way as there will be.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
}

/// A request that was served.
struct Served {
    began: Instant,
    replica: String,
}

/// Measures.
///
/// # Errors
/// If something cannot be built or started, or a request fails.
pub async fn balance(options: &BalanceOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    let counts = if options.envoys == 1 { vec![1] } else { vec![1, options.envoys] };
    println!("{EACH} requests on each of {REPLICAS} replicas; the fullest replica has more than the emptiest by, on average");
    println!("{:>12}{:>10}{:>12}", "a second", "Envoys", "measured");
    for rate in &options.rates {
        for &envoys in &counts {
            let difference = measure(&tools, envoys, *rate, Duration::from_secs(options.seconds)).await?;
            println!("{rate:>12}{envoys:>10}{difference:>12.2}");
        }
    }
    say("the same in the simulation of the routing code");
    let test = "eight_envoys_spread_new_conversations_though_they_hear_late_of_each_other";
    run(cargo().args(["test", "--quiet", "--package", "homing-routing", "--lib", test, "--", "--nocapture"]))
}

async fn measure(tools: &Tools, envoys: usize, rate: u32, phase: Duration) -> Result<f64> {
    // Each engine has room for all, and few tokens to write.
    let replica_args = ["--max-num-seqs", "128", "--kv-tokens", "400000"].map(str::to_owned).to_vec();
    let stack = StackOptions { concurrency: 1, replicas: REPLICAS, replica_args, ..StackOptions::default() };
    let fleet = FleetStack::start(tools, &FleetOptions { stack, envoys, collectors: 1, ..FleetOptions::default() }).await?;
    let lasts = Duration::from_secs(u64::from(EACH) * REPLICAS as u64) / rate;
    let from = Instant::now() + lasts + Duration::from_secs(5);
    let until = from + phase;

    let client = Client::builder().pool_max_idle_per_host(0).build()?;
    let (mut requests, mut random) = (JoinSet::new(), 7_u64);
    let mut ticks = interval(Duration::from_secs(1) / rate);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0_u64.. {
        ticks.tick().await;
        if Instant::now() >= until {
            break;
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let proxy = fleet.proxies[(random >> 33) as usize % envoys].proxy;
        let client = client.clone();
        requests.spawn(async move {
            let began = Instant::now();
            let messages = json!([{ "role": "user", "content": format!("conversation {number}") }]);
            let body = json!({ "model": MODEL, "max_tokens": 8_000, "stream": true, "messages": messages });
            let request =
                client.post(format!("http://{proxy}/v1/chat/completions")).header("x-session-id", format!("new-{number}"));
            let mut answer = request.json(&body).send().await?.error_for_status()?;
            let replica = answer.headers().get("x-homing-replica").and_then(|name| name.to_str().ok());
            let replica = replica.context("an answer names its replica")?.to_owned();
            while let Ok(read) = timeout_at(began + lasts, answer.chunk()).await {
                ensure!(read?.is_some(), "an answer ended before its client left");
            }
            Ok(Served { began, replica })
        });
    }
    let mut served = Vec::new();
    while let Some(request) = requests.join_next().await {
        served.push(request??);
    }

    let (mut at, mut sum, mut samples) = (from, 0, 0);
    while at < until {
        let open: Vec<_> = served.iter().filter(|request| request.began <= at && at < request.began + lasts).collect();
        let loads = fleet.replicas.iter().map(|(_, address)| {
            let name = address.to_string();
            open.iter().filter(|request| request.replica == name).count()
        });
        let loads: Vec<_> = loads.collect();
        ensure!(loads.iter().sum::<usize>() == open.len(), "a request went to a replica that is none of these");
        sum += loads.iter().max().context("a replica")? - loads.iter().min().context("a replica")?;
        (at, samples) = (at + STEP, samples + 1);
    }
    Ok(sum as f64 / f64::from(samples))
}
