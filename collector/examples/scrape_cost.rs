//! What polling costs and how old figures are when they reach Envoy: the collector polls a number of endpoints that all serve a real
//! vLLM text, and pushes what it read to one control listener.
//!
//! `cargo xtask bench collector`, or `cargo run --release -p homing-collector --example scrape_cost -- --endpoints 200`
//!
//! The endpoints and the control listener are served by a process of their own, so their time is not counted. CPU time comes from
//! `/proc/self/stat`, so this runs on Linux only.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::routing::{get, post};
use clap::Parser;
use homing_collector::Collector;
use homing_collector::config::Config;
use homing_collector::vllm::read_engines;
use homing_routing::sync::{MAX_SYNC_BYTES, SYNC_PATH, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::net::TcpListener;

/// 57 KB, one engine.
const TEXT: &str = include_str!("../testdata/vllm-0.26.0.txt");

/// Clock ticks a second in `/proc`, the same on every Linux (`USER_HZ`).
const TICKS: f64 = 100.0;

#[derive(Parser)]
struct Arguments {
    /// Endpoints to poll.
    #[arg(long, default_value_t = 1000)]
    endpoints: usize,
    /// The time between two polls of each.
    #[arg(long, default_value = "1s")]
    interval: humantime::Duration,
    /// How long to measure.
    #[arg(long, default_value = "20s")]
    duration: humantime::Duration,
    /// Serve the endpoints instead, until standard input closes.
    #[arg(long)]
    serve: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.serve { serve(arguments.endpoints).await } else { measure(&arguments).await }
}

/// Serves the endpoints, and first a control listener that keeps the ages it was told, each figure's in milliseconds.
async fn serve(endpoints: usize) -> anyhow::Result<()> {
    let ages = Arc::new(Mutex::new(Vec::<u64>::new()));
    let told = Arc::clone(&ages);
    let sync = post(async move |body: axum::body::Bytes| {
        let snapshot: SyncRequest = serde_json::from_slice(&body).map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))?;
        let replicas = snapshot.pools.iter().flat_map(|pool| &pool.replicas);
        lock(&told).extend(replicas.filter_map(|replica| replica.age_ms));
        Ok::<_, (StatusCode, String)>(axum::Json(SyncAnswer { version: SYNC_VERSION, ..SyncAnswer::default() }))
    });
    let taken = get(async move || axum::Json(std::mem::take(&mut *lock(&ages))));
    let control = Router::new().route(SYNC_PATH, sync).route("/ages", taken).layer(DefaultBodyLimit::max(MAX_SYNC_BYTES));
    let metrics = Router::new().route("/metrics", get(async || TEXT));
    let mut addresses = Vec::new();
    for router in std::iter::once(control).chain(std::iter::repeat_n(metrics, endpoints)) {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, router).await });
    }
    let mut output = std::io::stdout();
    writeln!(output, "{}", serde_json::to_string(&addresses)?)?;
    output.flush()?;
    // The parent's end, however it comes, closes standard input.
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The ages since the last call, sorted.
async fn ages(envoy: SocketAddr) -> anyhow::Result<Vec<u64>> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let mut ages: Vec<u64> = client.get(format!("http://{envoy}/ages")).send().await?.json().await?;
    ages.sort_unstable();
    Ok(ages)
}

async fn measure(arguments: &Arguments) -> anyhow::Result<()> {
    let rounds = 2000_u32;
    let started = Instant::now();
    for _ in 0..rounds {
        black_box(read_engines(black_box(TEXT.as_bytes())));
    }
    println!("reading one text of {} bytes: {:?}", TEXT.len(), started.elapsed() / rounds);

    let (server, addresses) = server(arguments.endpoints)?;
    let (envoy, replicas) = addresses.split_first().context("no addresses")?;
    let replicas: Vec<_> = replicas.iter().map(|address| format!("{{address: '{address}'}}")).collect();
    let config = format!(
        "listen: 127.0.0.1:0\nscrape: {{ interval: {} }}\nenvoys: [{{url: 'http://{envoy}'}}]\npools: [{{cluster: a, replicas: [{}]}}]\n",
        arguments.interval,
        replicas.join(", ")
    );
    let collector = Collector::start(&Config::parse(&config, "scrape_cost")?).await?;
    // All connections are open and every buffer has its size after the first rounds.
    tokio::time::sleep(*arguments.interval * 3).await;
    ages(*envoy).await?;
    let before = (cpu_seconds()?, scrapes(&collector).await?, Instant::now());
    tokio::time::sleep(*arguments.duration).await;
    let after = (cpu_seconds()?, scrapes(&collector).await?, Instant::now());
    let ages = ages(*envoy).await?;
    drop(collector);
    drop(server);

    let (cpu, seconds) = (after.0 - before.0, after.2.duration_since(before.2).as_secs_f64());
    let polls = after.1 - before.1;
    anyhow::ensure!(polls > 0.0, "nothing was polled");
    println!(
        "{} endpoints every {}: {:.0} polls/s, {:.1} % of one core, {:.0} us of CPU a poll",
        arguments.endpoints,
        arguments.interval,
        polls / seconds,
        100.0 * cpu / seconds,
        1e6 * cpu / polls
    );
    let age = |share: f64| ages.get((ages.len() as f64 * share) as usize).copied().context("no snapshot came");
    println!("age of a figure in a snapshot: p50 {} ms, p99 {} ms", age(0.5)?, age(0.99)?);
    Ok(())
}

/// The process that serves the endpoints; it ends when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn server(endpoints: usize) -> anyhow::Result<(Server, Vec<SocketAddr>)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--serve", "--endpoints", &endpoints.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("no output")?;
    let server = Server(child);
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    Ok((server, serde_json::from_str(&line)?))
}

/// User and system time of this process so far.
fn cpu_seconds() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("/proc is needed, so this runs on Linux only")?;
    // The command's name may hold spaces and ends with the last parenthesis; utime and stime are the 12th and 13th after it.
    let (_, after) = stat.rsplit_once(')').context("an unknown form of /proc/self/stat")?;
    let fields: Vec<_> = after.split_whitespace().collect();
    let ticks =
        |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).context("an unknown form of /proc/self/stat");
    Ok((ticks(11)? + ticks(12)?) / TICKS)
}

/// Polls that succeeded so far, by the collector's own metrics.
async fn scrapes(collector: &Collector) -> anyhow::Result<f64> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let text = client.get(format!("http://{}/metrics", collector.address())).send().await?.text().await?;
    let sum = |name: &str| -> f64 {
        text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    };
    Ok(sum("homing_collector_scrapes_total{") - sum("homing_collector_scrape_failures_total{"))
}
