//! `homing-bench`: the stand-in replica, the load generator, and what a filter costs in a proxy.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use homing_bench::engine::EngineConfig;
use homing_bench::load::LoadArgs;
use homing_bench::proxy::{self, Case, IdPlace, ProxyConfig, Subject, upstream};
use homing_bench::replica::{Replica, ReplicaConfig};
use homing_bench::simulate::{self, HomingOptions, PolicyName, Simulation, SimulationReport, SpillLine, Workload, WorkloadName};
use homing_routing::policy::Limit;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// What Homing is measured with.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replica(ReplicaArgs),
    Load(LoadArgs),
    Simulate(SimulateArgs),
    Spill(SpillArgs),
    Proxy(ProxyArgs),
    Upstreams(UpstreamsArgs),
}

/// A stand-in for a vLLM replica: a model of the engine behind vLLM's HTTP endpoints and metrics.
///
/// For tests of a proxy in front of it there are two endpoints that vLLM does not have.
///
/// GET /debug/requests answers the last 256 requests (but those to /metrics and /debug/) as JSON: a list of
/// {"method","path","headers":[[name,value],..],"body_length","body_sha256"}, oldest first.
///
/// POST /debug/fault with {"mode":MODE} makes the generation endpoints misbehave from now on. MODE is "none", "hang" (accept and never
/// answer), "error500" (a 500 at once) or "reset" (close the connection without an answer).
#[derive(Args)]
struct ReplicaArgs {
    /// Loopback address and port to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Name of the model.
    #[arg(long, default_value = "qwen3-4b")]
    model: String,
    /// Run the engine's clock this many times faster.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Tokens that the KV cache holds.
    #[arg(long, default_value_t = EngineConfig::default().kv_cache_tokens)]
    kv_tokens: usize,
    /// Requests that run at once.
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = EngineConfig::default().max_num_batched_tokens)]
    max_num_batched_tokens: usize,
    /// Tokens a request may have, prompt and output. Lowered to what the KV cache holds.
    #[arg(long, default_value_t = ReplicaConfig::default().max_model_len)]
    max_model_len: usize,
    /// Tokens in a block of the KV cache.
    #[arg(long, default_value_t = EngineConfig::default().block_size)]
    block_size: usize,
    /// Once listening, print one line of JSON, {"address":"127.0.0.1:PORT"}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

/// Runs agent sessions on modelled engines in virtual time, under one or more policies, and prints a line for each.
#[derive(Args)]
struct SimulateArgs {
    /// Where turns go; several are compared.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "least-request,homing")]
    policy: Vec<PolicyName>,
    /// Sessions at once; several are run.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,24,32")]
    sessions: Vec<usize>,
    /// What sessions send.
    #[arg(long, value_enum, default_value = "reference")]
    workload: WorkloadName,
    /// Replicas.
    #[arg(long, default_value_t = 4)]
    replicas: usize,
    /// Minutes of the model's time.
    #[arg(long, default_value_t = 30)]
    minutes: u64,
    /// Tokens that each KV cache holds.
    #[arg(long, default_value_t = EngineConfig::default().kv_cache_tokens)]
    kv_tokens: usize,
    /// Requests that run at once in an engine.
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Homing's spill threshold; automatic if not given.
    #[arg(long)]
    threshold: Option<u32>,
    /// Homing's spill margin; automatic if not given.
    #[arg(long)]
    margin: Option<u32>,
    /// Turns in a row away after which a conversation moves.
    #[arg(long, default_value_t = HomingOptions::default().turns_away)]
    turns_away: u8,
    /// Texts and think times depend on it alone.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print each report as a line of JSON.
    #[arg(long)]
    json: bool,
}

fn simulate(args: &SimulateArgs) -> Result<()> {
    if !args.json {
        say(SimulationReport::HEADER)?;
    }
    let limit = |number: Option<u32>| number.map_or(Limit::Auto, Limit::Fixed);
    for sessions in &args.sessions {
        for policy in &args.policy {
            let simulation = Simulation {
                replicas: args.replicas,
                engine: EngineConfig {
                    kv_cache_tokens: args.kv_tokens,
                    max_num_seqs: args.max_num_seqs,
                    ..EngineConfig::default()
                },
                sessions: *sessions,
                workload: Workload::new(args.workload, args.seed),
                policy: *policy,
                homing: HomingOptions { threshold: limit(args.threshold), margin: limit(args.margin), turns_away: args.turns_away },
                duration: Duration::from_secs(60 * args.minutes),
            };
            let report = simulate::run(&simulation);
            if args.json { say(&serde_json::to_string(&report)?)? } else { say(&report.to_string())? }
        }
    }
    Ok(())
}

/// Which spill settings pay: the same simulated loads under one setting after another, averaged. About two minutes.
#[derive(Args)]
struct SpillArgs {
    /// Print each line as JSON.
    #[arg(long)]
    json: bool,
}

fn spill(args: &SpillArgs) -> Result<()> {
    if !args.json {
        say(SpillLine::HEADER)?;
    }
    let mut said = Ok(());
    simulate::compare(|line| {
        let text = if args.json { serde_json::to_string(&line).unwrap_or_default() } else { line.to_string() };
        said = std::mem::replace(&mut said, Ok(())).and_then(|()| say(&text));
    });
    said
}

/// Sends the same requests through several listeners of one proxy, side by side, and reports what each costs beside the first.
///
/// A request is a chat request that names one of many conversations, in a header or at the end of its body alone.
#[derive(Args)]
struct ProxyArgs {
    /// A listener of the proxy and its name; the first one is what the others are compared with.
    #[arg(long = "subject", value_name = "NAME=IP:PORT", required = true)]
    subjects: Vec<Subject>,
    /// Process id of the proxy, whose CPU time is measured.
    #[arg(long)]
    pid: u32,
    /// Sizes of the requests' bodies in KB.
    #[arg(long, value_delimiter = ',', default_value = "1,64,256")]
    body_kb: Vec<usize>,
    /// How often each kind of request goes to each subject.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// How long each time.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Connections at once.
    #[arg(long, default_value_t = 8)]
    connections: u32,
    /// Conversations the requests belong to.
    #[arg(long, default_value_t = 4096)]
    conversations: u32,
    /// Print the report as one line of JSON.
    #[arg(long)]
    json: bool,
    /// Show progress on stderr even if that is no terminal.
    #[arg(long)]
    progress: bool,
}

/// Servers for a proxy that is measured: they answer every request at once with the same small answer.
#[derive(Args)]
struct UpstreamsArgs {
    /// How many, each on a free port of the loopback interface.
    #[arg(long, default_value_t = 4)]
    count: usize,
    /// Once listening, print one line of JSON, {"addresses":["127.0.0.1:PORT",..]}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Replica(args) => replica(args).await,
        Command::Load(args) => load(&args).await,
        Command::Simulate(args) => simulate(&args),
        Command::Spill(args) => spill(&args),
        Command::Proxy(args) => measure_proxy(args),
        Command::Upstreams(args) => upstreams(&args).await,
    }
}

async fn replica(args: ReplicaArgs) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let engine = EngineConfig {
        kv_cache_tokens: args.kv_tokens,
        block_size: args.block_size,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        ..EngineConfig::default()
    };
    let config =
        ReplicaConfig { listen: args.listen, model: args.model, speed: args.speed, max_model_len: args.max_model_len, engine };
    let replica = Replica::start(config).await?;
    if args.ready_json {
        say(&format!("{{\"address\":\"{}\"}}", replica.address()))?;
    } else {
        say(&format!("listening on {}; Ctrl-C ends it", replica.url()))?;
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

async fn load(args: &LoadArgs) -> Result<()> {
    let report = args.run().await?;
    if args.json { say(&serde_json::to_string(&report)?) } else { say(&report.to_string()) }
}

fn measure_proxy(args: ProxyArgs) -> Result<()> {
    let both = |kb: &usize| [IdPlace::Header, IdPlace::Body].map(|id| Case { body_bytes: kb << 10, id });
    let config = ProxyConfig {
        subjects: args.subjects,
        pid: args.pid,
        cases: args.body_kb.iter().flat_map(both).collect(),
        rounds: args.rounds,
        time: Duration::try_from_secs_f64(args.seconds).context("--seconds")?,
        connections: args.connections,
        conversations: args.conversations,
        progress: args.progress || io::stderr().is_terminal(),
    };
    let report = proxy::run(&config)?;
    if args.json { say(&serde_json::to_string(&report)?) } else { say(report.to_string().trim_end()) }
}

async fn upstreams(args: &UpstreamsArgs) -> Result<()> {
    let addresses: Vec<_> = upstream::start(args.count, upstream::Answer::default())?.iter().map(SocketAddr::to_string).collect();
    if args.ready_json {
        say(&serde_json::json!({ "addresses": addresses }).to_string())?;
    } else {
        say(&format!("listening on {}; Ctrl-C ends it", addresses.join(" ")))?;
    }
    std::future::pending().await
}

/// A line on stdout, out at once: whoever started this may be waiting for it.
fn say(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to stdout")
}
