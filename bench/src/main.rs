//! `homing-bench`: the stand-in replica, the load generator, and what a filter costs in a proxy.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use homing_bench::balancer::BalancerKind;
use homing_bench::engine::EngineConfig;
use homing_bench::load::LoadArgs;
use homing_bench::proxy::ext_proc::ExternalProcessor;
use homing_bench::proxy::{self, Case, IdPlace, ProxyConfig, Subject, upstream};
use homing_bench::replica::{Replica, ReplicaConfig, Version};
use homing_bench::report::ReportArgs;
use homing_bench::simulate::{self, HomingOptions, PolicyName, ReferenceRow, Simulation, SimulationReport};
use homing_bench::workload::{Workload, WorkloadArgs, trace};
use homing_routing::admission::Admission;
use homing_routing::policy::Limit;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
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
    Report(ReportArgs),
    Simulate(SimulateArgs),
    Spill(SpillArgs),
    Frontier(simulate::FrontierArgs),
    Workload(WorkloadFileArgs),
    Proxy(ProxyArgs),
    Upstreams(UpstreamsArgs),
    ExtProc(ExtProcArgs),
}

/// A stand-in for a vLLM replica: a model of the engine behind vLLM's HTTP endpoints and metrics.
///
/// For tests of a proxy in front of it there are two endpoints that vLLM does not have.
///
/// GET /debug/requests answers the last 256 requests (but those to /metrics and /debug/) as JSON: a list of
/// {"method","path","headers":[[name,value],..],"body_length","body_sha256"}, oldest first.
///
/// POST /debug/fault with {"mode":MODE} makes it misbehave from now on. MODE is "none"; of generation endpoints "hang" (accept and never
/// answer), "error500" (a 500 at once), "reset" (close the connection without an answer), "reset-mid-stream" (close it behind a stream's
/// first token) or "slow" (work on a request "delay_ms" milliseconds later); "sleep" (engines sleep, and the metrics say so); "stall" (as
/// vLLM after SIGTERM: nobody can connect, what is in flight stalls with its connection open; for good).
#[derive(Args)]
struct ReplicaArgs {
    /// Loopback address and port to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Let it listen where others can reach it, as in a container: they can read what clients sent, and make it misbehave.
    #[arg(long)]
    allow_remote: bool,
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
    /// Engines behind the one port, as vLLM's --data-parallel-size; each has the settings above. x-data-parallel-rank names one.
    #[arg(long, default_value_t = ReplicaConfig::default().ranks)]
    ranks: usize,
    /// The first engine's label in the metrics; the header has the local index all the same. As on a second node of vLLM's hybrid
    /// load balancing.
    #[arg(long, default_value_t = ReplicaConfig::default().first_engine_label)]
    first_engine_label: usize,
    /// Which vLLM's rule chooses a rank for requests that name none, vllm-0.26 or vllm-0.27; that of --version if not given.
    #[arg(long, value_parser = balancer)]
    balancer: Option<BalancerKind>,
    /// Which vLLM's answers it gives.
    #[arg(long, value_enum, default_value_t)]
    version: Version,
    /// Once listening, print one line of JSON, {"address":"127.0.0.1:PORT"}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

/// Runs agent sessions on modelled engines in virtual time, under one or more policies, and prints a line for each.
///
/// With several seeds a line has the mean, and the one below it the standard deviation.
#[derive(Args)]
struct SimulateArgs {
    /// Run the published measurement of session affinity on the model instead, and print its table beside the model's. Takes --seeds,
    /// --kv-tokens and --max-num-seqs.
    #[arg(long, conflicts_with_all = ["policy", "sessions", "workload", "trace", "replicas", "minutes"])]
    reference: bool,
    /// Where requests go; several are compared.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "least-request,homing")]
    policy: Vec<PolicyName>,
    /// Sessions at once, in a closed loop; several are run.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,24,32")]
    sessions: Vec<usize>,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Replicas.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    replicas: u16,
    /// Minutes of the model's time.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
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
    /// Homing admits by working set.
    #[arg(long)]
    admission: bool,
    /// With --admission: milliseconds for which a quiet session keeps its place, at least.
    #[arg(long, default_value_t = Admission::default().min_grace_ms)]
    min_grace_ms: u64,
    /// With --admission: the same, at most.
    #[arg(long, default_value_t = Admission::default().max_grace_ms)]
    max_grace_ms: u64,
    /// With --admission: turns for which a session keeps its place while others wait; 0 is until it ends.
    #[arg(long, default_value_t = 0)]
    grant_turns: u16,
    /// With --admission: seconds a request is held at most.
    #[arg(long, default_value_t = 120)]
    max_wait_s: u64,
    /// With --admission: tokens that all sessions share; learned if not given.
    #[arg(long)]
    shared_tokens: Option<u32>,
    /// The first seed: sessions, and what policies leave to chance, depend on it alone.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Print each report as a line of JSON.
    #[arg(long)]
    json: bool,
}

fn simulate(args: &SimulateArgs) -> Result<()> {
    ensure!(args.max_num_seqs > 0, "--max-num-seqs is 0: nothing would ever run");
    if args.reference {
        return reference(args);
    }
    let limit = |number: Option<u32>| number.map_or(Limit::Auto, Limit::Fixed);
    let seeds = (args.seed..).take(args.seeds as usize);
    let workloads: Vec<_> = seeds.map(|seed| Ok((seed, args.workload.workload(seed)?))).collect::<Result<_>>()?;
    // In an open loop there is no number of sessions to vary.
    let is_open = workloads.iter().all(|(_, workload)| workload.is_open());
    let sessions = if is_open { &args.sessions[..1] } else { &args.sessions[..] };
    if !args.json {
        say(SimulationReport::HEADER)?;
    }
    let mut refused = 0.0;
    for sessions in sessions {
        for policy in &args.policy {
            let simulation = |(seed, workload): &(u64, Workload)| Simulation {
                replicas: args.replicas.into(),
                engine: args.engine(),
                sessions: *sessions,
                workload: workload.clone(),
                policy: *policy,
                homing: HomingOptions {
                    threshold: limit(args.threshold),
                    margin: limit(args.margin),
                    turns_away: args.turns_away,
                    admission: args.admission.then(|| Admission {
                        turns: args.grant_turns,
                        max_wait_ms: 1000 * args.max_wait_s,
                        min_grace_ms: args.min_grace_ms,
                        max_grace_ms: args.max_grace_ms,
                        ..Admission::default()
                    }),
                    shared_tokens: args.shared_tokens,
                },
                duration: Duration::from_secs(60 * args.minutes),
                seed: *seed,
                network: Duration::ZERO,
            };
            let simulations: Vec<_> = workloads.iter().map(simulation).collect();
            let report = SimulationReport::of(&simulations[0], &simulate::run_all(&simulations));
            refused += report.mean.refused_calls;
            say_report(&report, args.json)?;
        }
    }
    if refused > 0.0 {
        eprintln!("some calls have more tokens than a KV cache holds and were refused: raise --kv-tokens ({})", args.kv_tokens);
    }
    Ok(())
}

impl SimulateArgs {
    fn engine(&self) -> EngineConfig {
        EngineConfig { kv_cache_tokens: self.kv_tokens, max_num_seqs: self.max_num_seqs, ..EngineConfig::default() }
    }
}

fn reference(args: &SimulateArgs) -> Result<()> {
    let rows = simulate::compare_with_reference(&args.engine(), args.seeds);
    if args.json {
        return rows.iter().try_for_each(|row| say(&serde_json::to_string(row)?));
    }
    say(ReferenceRow::HEADER)?;
    rows.iter().try_for_each(|row| say(&row.to_string()))
}

/// Which spill settings pay: the same simulated loads under one setting after another, averaged. Some minutes.
#[derive(Args)]
struct SpillArgs {
    /// Print each line as JSON.
    #[arg(long)]
    json: bool,
}

fn spill(args: &SpillArgs) -> Result<()> {
    if !args.json {
        say(SimulationReport::HEADER)?;
    }
    simulate::compare(|report| say_report(&report, args.json))
}

fn frontier(args: &simulate::FrontierArgs) -> Result<()> {
    say(SimulationReport::HEADER)?;
    simulate::frontier(args, |report| say_report(&report, false))
}

fn say_report(report: &SimulationReport, json: bool) -> Result<()> {
    if json { say(&serde_json::to_string(report)?) } else { say(&report.to_string()) }
}

/// Writes a workload's sessions as a trace: session plans, one a line of JSON.
#[derive(Args)]
struct WorkloadFileArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// How many sessions.
    #[arg(long, default_value_t = 100)]
    sessions: usize,
    /// Sessions depend on it alone.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of the first session, counted from 0.
    #[arg(long, default_value_t = 0)]
    first_session: u64,
    /// Where to; `-` is stdout.
    #[arg(long, value_name = "FILE", default_value = "-")]
    out: PathBuf,
}

fn write_workload(args: &WorkloadFileArgs) -> Result<()> {
    let plans = args.workload.workload(args.seed)?.sessions(args.first_session).take(args.sessions);
    if args.out.as_os_str() == "-" {
        return trace::write(io::stdout().lock(), plans);
    }
    let file = File::create(&args.out).with_context(|| format!("cannot write {}", args.out.display()))?;
    trace::write(BufWriter::new(file), plans).with_context(|| format!("cannot write {}", args.out.display()))
}

/// Sends the same requests through several listeners of one proxy, side by side, and reports what each costs beside the first.
///
/// A request is a chat request that names one of many conversations, in a header or at the end of its body alone.
#[derive(Args)]
struct ProxyArgs {
    /// A listener of the proxy and its name; the first one is what the others are compared with. Behind it, after commas: `keeps-homes`
    /// fails the run if a conversation does not stay with its upstream; `header-only` leaves out requests that name their conversation
    /// in the body; `helper=PID` adds the CPU time of another process.
    #[arg(long = "subject", value_name = "NAME=IP:PORT", required = true)]
    subjects: Vec<Subject>,
    /// Process id of the proxy, whose CPU time is measured.
    #[arg(long)]
    pid: u32,
    /// The proxy's workers, to be named in the report.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// How many `homing-bench upstreams` are behind each listener.
    #[arg(long, default_value_t = 4)]
    upstreams: usize,
    /// Sizes of the requests' bodies in KB.
    #[arg(long, value_delimiter = ',', default_value = "1,64,256,1024")]
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

/// An external processor for Envoy: puts an upstream that it computes from a request's x-session-id into a header.
///
/// Envoy is to send it request headers alone.
#[derive(Args)]
struct ExtProcArgs {
    /// Addresses to choose from.
    #[arg(long, value_delimiter = ',', required = true, value_name = "IP:PORT,..")]
    upstreams: Vec<SocketAddr>,
    /// The header that carries the choice.
    #[arg(long, default_value = "x-homing-targets")]
    header: String,
    /// Once listening, print one line of JSON, {"address":"127.0.0.1:PORT"}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

fn balancer(name: &str) -> Result<BalancerKind> {
    match name {
        "vllm-0.26" => Ok(BalancerKind::Vllm026),
        "vllm-0.27" => Ok(BalancerKind::Vllm027),
        _ => anyhow::bail!("give vllm-0.26 or vllm-0.27"),
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Replica(args) => replica(args).await,
        Command::Load(args) => load(&args).await,
        Command::Report(args) => report(&args),
        Command::Simulate(args) => simulate(&args),
        Command::Spill(args) => spill(&args),
        Command::Frontier(args) => frontier(&args),
        Command::Workload(args) => write_workload(&args),
        Command::Proxy(args) => measure_proxy(args),
        Command::Upstreams(args) => upstreams(&args).await,
        Command::ExtProc(args) => ext_proc(&args).await,
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
    let config = ReplicaConfig {
        listen: args.listen,
        allow_remote: args.allow_remote,
        model: args.model,
        speed: args.speed,
        max_model_len: args.max_model_len,
        engine,
        version: args.version,
        ranks: args.ranks,
        first_engine_label: args.first_engine_label,
        balancer: args.balancer,
    };
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

async fn ext_proc(args: &ExtProcArgs) -> Result<()> {
    let processor = ExternalProcessor::bind(&args.upstreams, &args.header)?;
    let address = processor.address()?;
    if args.ready_json {
        say(&format!("{{\"address\":\"{address}\"}}"))?;
    } else {
        say(&format!("listening on {address}; Ctrl-C ends it"))?;
    }
    processor.serve().await
}

async fn load(args: &LoadArgs) -> Result<()> {
    let report = args.run().await?;
    if args.json { say(&serde_json::to_string(&report)?) } else { say(&report.to_string()) }
}

fn report(args: &ReportArgs) -> Result<()> {
    for path in args.run()? {
        say(&path.display().to_string())?;
    }
    Ok(())
}

fn measure_proxy(args: ProxyArgs) -> Result<()> {
    let both = |kb: &usize| [IdPlace::Header, IdPlace::Body].map(|id| Case { body_bytes: kb << 10, id });
    let config = ProxyConfig {
        subjects: args.subjects,
        pid: args.pid,
        workers: args.workers,
        upstreams: args.upstreams,
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
