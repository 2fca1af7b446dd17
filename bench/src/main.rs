//! `homing-bench`: the stand-in replica, the load generator, the simulator, and what a filter costs in a proxy.
#![forbid(unsafe_code)]

mod command;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use homing_bench::load::LoadArgs;
use homing_bench::report::ReportArgs;
use homing_bench::simulate::FrontierArgs;
use homing_bench::workload::{WorkloadArgs, trace};

use command::proxy::{ExtProcArgs, ProxyArgs, UpstreamsArgs, ext_proc, measure_proxy, upstreams};
use command::replica::{ReplicaArgs, replica};
use command::simulate::{SimulateArgs, SpillArgs, frontier, simulate, spill};

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
    Frontier(FrontierArgs),
    Workload(WorkloadFileArgs),
    Proxy(ProxyArgs),
    Upstreams(UpstreamsArgs),
    ExtProc(ExtProcArgs),
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

/// A line on stdout, out at once: whoever started this may be waiting for it.
pub(crate) fn say(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to stdout")
}
