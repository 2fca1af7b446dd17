//! The command `homing-collector`.
#![forbid(unsafe_code)]

mod drain_command;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use homing_collector::Collector;
use homing_collector::config::Config;
use tracing_subscriber::EnvFilter;

/// Polls the metrics of vLLM replicas and pushes load snapshots to the Homing filter in Envoy.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks a configuration and prints what was understood.
    Check {
        /// The configuration, YAML.
        file: PathBuf,
        /// Print it as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Runs until SIGTERM or Ctrl-C. RUST_LOG sets what is logged.
    Run {
        /// The configuration, YAML.
        file: PathBuf,
        /// Print one line `{"address":"ip:port"}` once it listens.
        #[arg(long)]
        ready_json: bool,
    },
    /// Drains a replica: what is in flight finishes, nothing new arrives. It holds until --undo or until the collector ends.
    Drain(drain_command::DrainArguments),
    /// Asks whether a server answers: ends with 0 if it does with a 2xx, for containers that have no other tool.
    Health {
        /// What to ask.
        #[arg(default_value = "http://127.0.0.1:9900/healthz")]
        url: reqwest::Url,
    },
    /// Prints the JSON schema of the configuration.
    Schema,
}

#[tokio::main]
async fn main() -> ExitCode {
    let level = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).with_ansi(ansi).with_target(false).init();
    let result = match Arguments::parse().command {
        Command::Check { file, json } => check(&file, json),
        Command::Run { file, ready_json } => run(&file, ready_json).await,
        Command::Drain(arguments) => drain_command::run(arguments).await,
        Command::Health { url } => health(url).await,
        Command::Schema => schema(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(file: &std::path::Path, json: bool) -> anyhow::Result<()> {
    let config = Config::load(file)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&config)?);
    } else {
        print!("{}", config.summary());
    }
    Ok(())
}

async fn health(url: reqwest::Url) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build()?;
    let status = client.get(url.clone()).send().await.with_context(|| format!("{url} does not answer"))?.status();
    anyhow::ensure!(status.is_success(), "{url} answers {status}");
    Ok(())
}

fn schema() -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(&Config::schema())?);
    Ok(())
}

async fn run(file: &std::path::Path, ready_json: bool) -> anyhow::Result<()> {
    // Before anything says that it runs: whoever starts it may end it at once.
    let stopped = stop_signal()?;
    let mut collector = Collector::start(&Config::load(file)?).await?;
    tracing::info!("console and API on http://{}", collector.address());
    if ready_json {
        println!("{}", serde_json::json!({ "address": collector.address() }));
    }
    tokio::select! {
        error = collector.failed() => Err(error),
        name = stopped => {
            tracing::info!("{name}: ending");
            Ok(())
        }
    }
}

/// From this call on, a request to end is noticed; the future tells its name.
#[cfg(unix)]
fn stop_signal() -> anyhow::Result<impl Future<Output = &'static str>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    })
}

/// From the future's first poll on, a request to end is noticed; it tells its name.
#[cfg(not(unix))]
fn stop_signal() -> anyhow::Result<impl Future<Output = &'static str>> {
    Ok(async {
        // Without Ctrl-C the process can still be ended by the system.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        "Ctrl-C"
    })
}
