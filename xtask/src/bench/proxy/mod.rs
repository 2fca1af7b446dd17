//! `cargo xtask bench proxy`: what the filter costs, beside a plain Envoy and beside other ways to choose an upstream in one.
//!
//! One Envoy has a listener for each subject. `homing-bench` sends the same requests through each in turn and measures; here is what
//! it measures them on, and the check that every request of Homing's was a turn at home.

mod snapshots;
mod subjects;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use homing_routing::sync::{OutcomeCounts, SyncAnswer};
use tokio::process::Command;

use crate::envoy::Envoy;
use crate::process::{Process, unless_signalled};
use crate::tools::{self, Tools, say};
use snapshots::Snapshots;
use subjects::{Setup, Subject, envoy_config};

/// Conversations the requests belong to. Each is known twice: by its id in a header, and by its id in a body.
const CONVERSATIONS: u64 = 4096;

/// What to measure.
#[derive(Debug, Args)]
pub struct ProxyOptions {
    /// What is measured beside `plain`, which always is.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "empty,homing,lua,ext_proc")]
    subjects: Vec<SubjectName>,
    /// Envoy's workers; several are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u16).range(1..))]
    workers: Vec<u16>,
    /// How often each kind of request goes to each subject.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds each time.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Sizes of the requests' bodies in KB.
    #[arg(long, value_delimiter = ',', default_value = "1,64,256,1024")]
    body_kb: Vec<usize>,
    /// One more subject: Homing with the filter from this file, such as an earlier build. May be given several times.
    #[arg(long = "filter", value_name = "NAME=FILE", value_parser = named_file)]
    filters: Vec<(String, PathBuf)>,
    /// Keep everything running after the measurement until Ctrl-C, and print where it listens: for a profiler.
    #[arg(long)]
    keep: bool,
    /// Print the figures as JSON, a line for each number of workers, instead of tables.
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
enum SubjectName {
    /// Envoy with the router alone.
    Plain,
    /// A wasm filter that does nothing.
    Empty,
    /// Homing as it is shipped.
    Homing,
    /// A Lua script that computes an upstream from the session's id.
    Lua,
    /// An external processor that does the same.
    ExtProc,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("give NAME=FILE")?;
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    if path.is_file() { Ok((name.to_owned(), path)) } else { Err(format!("{} is no file", path.display())) }
}

/// Measures what the filter costs.
///
/// # Errors
/// If something cannot be built or started, a request fails, or a subject did not do what it is measured for.
pub async fn proxy(options: ProxyOptions) -> Result<()> {
    unless_signalled(run(&options)).await
}

async fn run(options: &ProxyOptions) -> Result<()> {
    ensure!(!options.keep || options.workers.len() == 1, "one Envoy can be kept: give one number of --workers");
    let tools = Tools::ensure()?;
    let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
    let servers = Servers::start(&tools, dir.path()).await?;
    let subjects = subjects(options, &tools, &servers)?;
    for (index, workers) in options.workers.iter().enumerate() {
        if index > 0 && !options.json {
            println!();
        }
        run_with(*workers, options, &tools, &subjects, &servers.addresses, dir.path()).await?;
    }
    Ok(())
}

/// What runs beside Envoy.
struct Servers {
    addresses: Vec<SocketAddr>,
    processor: Process,
    processor_address: SocketAddr,
    _upstreams: Process,
}

impl Servers {
    async fn start(tools: &Tools, dir: &Path) -> Result<Self> {
        let args = ["upstreams", "--ready-json"].map(str::to_owned);
        let (upstreams, ready) = Process::start_ready("upstreams", &tools.bench, &args, dir).await?;
        let addresses: Vec<SocketAddr> = serde_json::from_value(ready["addresses"].clone()).context("the upstreams' addresses")?;
        let list = addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
        let args = ["ext-proc", "--ready-json", "--upstreams", &list].map(str::to_owned);
        let (processor, ready) = Process::start_ready("processor", &tools.bench, &args, dir).await?;
        let processor_address = serde_json::from_value(ready["address"].clone()).context("the processor's address")?;
        Ok(Self { addresses, processor, processor_address, _upstreams: upstreams })
    }
}

fn subjects(options: &ProxyOptions, tools: &Tools, servers: &Servers) -> Result<Vec<Subject>> {
    let mut names = options.subjects.clone();
    names.push(SubjectName::Plain);
    names.sort();
    names.dedup();
    let mut subjects = Vec::new();
    for name in names {
        let setup = match name {
            SubjectName::Plain => Setup::Plain,
            SubjectName::Empty => Setup::OtherFilter(tools::build_empty_filter()?),
            SubjectName::Homing => Setup::Homing(tools.filter.clone()),
            SubjectName::Lua => Setup::Lua,
            SubjectName::ExtProc => Setup::ExtProc(servers.processor_address, pid(&servers.processor)?),
        };
        let name = name.to_possible_value().context("every subject has a name")?.get_name().to_owned();
        subjects.push(Subject { name, setup });
    }
    for (name, file) in &options.filters {
        ensure!(subjects.iter().all(|subject| subject.name != *name), "the name `{name}` is taken: give --filter another one");
        subjects.push(Subject { name: name.clone(), setup: Setup::Homing(file.clone()) });
    }
    Ok(subjects)
}

/// One Envoy with this many workers.
async fn run_with(
    workers: u16,
    options: &ProxyOptions,
    tools: &Tools,
    subjects: &[Subject],
    upstreams: &[SocketAddr],
    dir: &Path,
) -> Result<()> {
    let config = envoy_config(subjects, upstreams)?;
    let mut envoy = Envoy::start(&tools.envoy, &config, workers.into(), dir).await?;
    let mut controls = Vec::new();
    for subject in subjects.iter().filter(|subject| subject.is_homing()) {
        controls.push(envoy.listener(&subject.control())?);
    }
    let mut snapshots = Snapshots::new(controls, upstreams)?;
    snapshots.push().await?;
    say(&format!("measuring Envoy with {workers} worker{}", if workers == 1 { "" } else { "s" }));
    tokio::select! {
        measured = measure(workers, options, tools, subjects, upstreams.len(), &envoy) => measured?,
        failed = snapshots.keep_pushing() => failed?,
    }
    ensure_at_home(&snapshots.push().await?)?;
    if options.keep {
        say(&format!("Envoy is process {}, its admin interface {}; Ctrl-C stops everything", pid(&envoy.process)?, envoy.admin));
        for subject in subjects {
            say(&format!("{} listens on {}", subject.name, envoy.listener(&subject.name)?));
        }
        snapshots.keep_pushing().await?;
    }
    envoy.process.kill().await
}

fn pid(process: &Process) -> Result<u32> {
    process.id().with_context(|| format!("a process has ended.\n{}", process.tail()))
}

async fn measure(
    workers: u16,
    options: &ProxyOptions,
    tools: &Tools,
    subjects: &[Subject],
    upstreams: usize,
    envoy: &Envoy,
) -> Result<()> {
    let mut command = Command::new(&tools.bench);
    command.args(["proxy", "--progress", "--pid", &pid(&envoy.process)?.to_string()]);
    command.args(["--workers", &workers.to_string(), "--upstreams", &upstreams.to_string()]);
    command.args(["--rounds", &options.rounds.to_string(), "--seconds", &options.seconds.to_string()]);
    command.args(["--conversations", &CONVERSATIONS.to_string()]);
    command.args(["--body-kb", &options.body_kb.iter().map(usize::to_string).collect::<Vec<_>>().join(",")]);
    for subject in subjects {
        command.args(["--subject", &subject.argument(envoy.listener(&subject.name)?)]);
    }
    if options.json {
        command.arg("--json");
    }
    let status = command.stdin(Stdio::null()).kill_on_drop(true).status().await.context("starting the measurement")?;
    ensure!(status.success(), "the measurement failed ({status}). Envoy said last:\n{}", envoy.process.tail());
    Ok(())
}

/// Fails unless each filter placed each conversation once, and every other request was a turn served at its home: anything else
/// would be another measurement than this one.
fn ensure_at_home(answers: &[SyncAnswer]) -> Result<()> {
    // Counters are Envoy's own, so each filter answers with those of all. Without a filter there are none.
    let Some(answer) = answers.first() else { return Ok(()) };
    let replicas: Vec<_> = answer.pools.iter().flat_map(|pool| &pool.replicas).collect();
    let sum = |of: fn(&OutcomeCounts) -> u64| replicas.iter().map(|replica| of(&replica.requests)).sum::<u64>();
    let (sticky, placed) = (sum(|counts| counts.sticky), sum(|counts| counts.placed));
    let others = sum(|counts| counts.spilled + counts.pinned + counts.unkeyed + counts.rehomed + counts.passed);
    say(&format!("Homing placed {placed} conversations, served {sticky} turns at home, and {others} requests otherwise"));
    let expected = 2 * CONVERSATIONS * u64::try_from(answers.len())?;
    ensure!(
        sticky > 0 && others == 0 && placed <= expected,
        "this is no measurement of turns at home: {expected} conversations were to be placed, and everything else to be served at home"
    );
    Ok(())
}
