//! `cargo xtask bench sync`: what it costs that Envoys agree.
//!
//! Real Envoys, a real collector and Redis; nobody sends requests, so that what is measured is the exchange alone. Conversations' homes
//! come in through the store, as another collector's would.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Args;
use homing_routing::binding::Binding;
use homing_routing::identity::Digest;
use homing_routing::replica::ReplicaName;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::fleet::{FleetOptions, FleetStack};
use crate::process::Process;
use crate::tools::{Tools, say};

/// Bindings in one entry of the store's stream.
const ENTRY: usize = 256;

/// Of an active conversation the others are told once in this time.
const RENEWED: Duration = Duration::from_secs(60);

/// How long everything may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(60);

/// Ticks of a process's time in a second (`getconf CLK_TCK` is 100 on Linux).
const TICKS: f64 = 100.0;

/// What to measure.
#[derive(Debug, Args)]
pub struct SyncOptions {
    /// Conversations.
    #[arg(long, default_value_t = 65_536)]
    conversations: u32,
    /// Envoys.
    #[arg(long, default_value_t = 8)]
    envoys: usize,
    /// Seconds of each phase.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// What everything has cost so far.
#[derive(Clone, Copy)]
struct Cost {
    at: Instant,
    collector_s: f64,
    envoys_s: f64,
    sent: u64,
    answered: u64,
    exchanges: u64,
}

/// Measures.
///
/// # Errors
/// If something cannot be built or started, or bindings do not arrive.
pub async fn sync(options: &SyncOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    say(&format!("{} Envoys, one collector and Redis", options.envoys));
    let fleet_options = FleetOptions { envoys: options.envoys, collectors: 1, redis: true, ..FleetOptions::default() };
    let mut fleet = FleetStack::start(&tools, &fleet_options).await?;
    let homes: Vec<_> = fleet.replicas.iter().map(|(_, address)| *address).collect();
    let mut store = TcpStream::connect(fleet.store().context("Redis")?).await?;
    let phase = Duration::from_secs(options.seconds);

    println!(
        "{:<44}{:>11}{:>12}{:>14}{:>14}{:>12}",
        "per second", "exchanges", "sent KB", "answered KB", "collector ms", "Envoy ms"
    );
    let before = cost(&fleet).await?;
    sleep(phase).await;
    report("no conversations", before, cost(&fleet).await?, options.envoys);

    let before = cost(&fleet).await?;
    let all: Vec<_> = (0..options.conversations).map(|number| binding(number, &homes)).collect();
    for entry in all.chunks(ENTRY) {
        append(&mut store, entry).await?;
    }
    let wanted = u64::from(options.conversations);
    until_sent(&fleet, |_, sent| sent >= wanted).await?;
    let arrived = before.at.elapsed();
    let after = cost(&fleet).await?;
    report("all conversations at once", before, after, options.envoys);

    sleep(Duration::from_secs(1)).await;
    let before = cost(&fleet).await?;
    sleep(phase).await;
    report("conversations known, none active", before, cost(&fleet).await?, options.envoys);

    let before = cost(&fleet).await?;
    let step = Duration::from_millis(50);
    let each = (f64::from(options.conversations) * step.as_secs_f64() / RENEWED.as_secs_f64()) as u32;
    let mut next = 0;
    while before.at.elapsed() < phase {
        let renewed: Vec<_> = (next..next + each).map(|number| binding(number % options.conversations, &homes)).collect();
        append(&mut store, &renewed).await?;
        next += each;
        sleep(step).await;
    }
    let label = format!("all active: {} homes a second renewed", f64::from(next) as u64 / options.seconds.max(1));
    report(&label, before, cost(&fleet).await?, options.envoys);

    println!("\nall {} homes were at every Envoy after {:.1} s", options.conversations, arrived.as_secs_f64());
    fleet.proxies[0].envoy.take().context("an Envoy")?.process.kill().await?;
    fleet.start_envoy(0).await?;
    let started = Instant::now();
    fleet.until_ready(0).await?;
    println!("an Envoy that restarts is ready, with all of them, {:.1} s after it listens", started.elapsed().as_secs_f64());
    Ok(())
}

/// A conversation whose last turn is now.
fn binding(number: u32, homes: &[SocketAddr]) -> Binding {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Binding {
        conversation: Digest(u128::from(number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)),
        home: ReplicaName::endpoint(homes[number as usize % homes.len()]).id(),
        bound_at_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        last_turn_s: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
        bytes: 60_000,
    }
}

/// Writes bindings into the store's stream as another collector does, in Redis' protocol.
async fn append(store: &mut TcpStream, bindings: &[Binding]) -> Result<()> {
    let packed: Vec<u8> = bindings.iter().flat_map(Binding::pack).collect();
    let words: [&[u8]; 7] = [b"XADD", b"homing:changes", b"*", b"w", b"bench", b"b", &packed];
    let mut command = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        command.extend(format!("${}\r\n", word.len()).into_bytes());
        command.extend(word);
        command.extend(b"\r\n");
    }
    store.write_all(&command).await?;
    let mut answer = [0; 128];
    let length = store.read(&mut answer).await?;
    ensure!(answer[..length].starts_with(b"$"), "Redis said {}", String::from_utf8_lossy(&answer[..length]));
    Ok(())
}

async fn cost(fleet: &FleetStack) -> Result<Cost> {
    let status = fleet.status(0).await?;
    let sum = |of: fn(&Value) -> u64| status["envoys"].as_array().into_iter().flatten().map(of).sum();
    let collector = fleet.collectors[0].process.as_ref().map_or(Ok(0.0), seconds_of)?;
    let envoys = fleet.proxies.iter().filter_map(|proxy| proxy.envoy.as_ref()).map(|envoy| seconds_of(&envoy.process));
    Ok(Cost {
        at: Instant::now(),
        collector_s: collector,
        envoys_s: envoys.sum::<Result<f64>>()?,
        sent: sum(|envoy| envoy["sync_bytes"][0].as_u64().unwrap_or(0)),
        answered: sum(|envoy| envoy["sync_bytes"][1].as_u64().unwrap_or(0)),
        exchanges: sum(|envoy| envoy["answered"].as_u64().unwrap_or(0)),
    })
}

/// Processor time of a process, in seconds (proc(5): user and system, fields 14 and 15).
fn seconds_of(process: &Process) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.id().context("a process")?))?;
    let fields = stat.rsplit_once(')').context("a process' state")?.1.split_whitespace().skip(11).take(2);
    Ok(fields.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / TICKS)
}

/// What one second cost: the collector for all Envoys, and one Envoy.
fn report(what: &str, before: Cost, after: Cost, envoys: usize) {
    let seconds = (after.at - before.at).as_secs_f64();
    let per = |before: u64, after: u64| (after - before) as f64 / seconds;
    println!(
        "{what:<44}{:>11.0}{:>12.1}{:>14.1}{:>14.1}{:>12.1}",
        per(before.exchanges, after.exchanges),
        per(before.sent, after.sent) / 1e3,
        per(before.answered, after.answered) / 1e3,
        (after.collector_s - before.collector_s) * 1e3 / seconds,
        (after.envoys_s - before.envoys_s) * 1e3 / seconds / envoys as f64,
    );
}

/// Waits until every Envoy has been sent enough.
async fn until_sent(fleet: &FleetStack, enough: impl Fn(usize, u64) -> bool) -> Result<()> {
    let started = Instant::now();
    loop {
        let status = fleet.status(0).await?;
        let envoys = status["envoys"].as_array().cloned().unwrap_or_default();
        let sent = envoys.iter().map(|envoy| envoy["bindings_sent"].as_u64().unwrap_or(0));
        if sent.enumerate().all(|(index, sent)| enough(index, sent)) {
            return Ok(());
        }
        ensure!(started.elapsed() < ARRIVAL, "homes did not arrive within {ARRIVAL:?}");
        sleep(Duration::from_millis(50)).await;
    }
}
