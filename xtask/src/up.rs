//! `cargo xtask up`: the whole stack, kept running until it is told to stop.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::stack::{MODEL, ReplicaKind, Stack, StackOptions};
use crate::tools::{Tools, say};
use crate::vllm::Vllm;

/// What to run.
#[derive(Debug, Args)]
pub struct UpOptions {
    /// Print one line of JSON once everything runs: {"proxy","admin","control","console","replicas":[..]}.
    #[arg(long)]
    json: bool,
    /// How many replicas; 4 unless told, 2 with --vllm.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    replicas: Option<u16>,
    /// Real vLLM servers with a tiny random model on the CPU, instead of stand-ins. The first time, this installs vLLM.
    #[arg(long, conflicts_with = "speed")]
    vllm: bool,
    /// Data-parallel ranks in each vLLM server; each rank is a replica.
    #[arg(long, default_value_t = 1, requires = "vllm", value_parser = clap::value_parser!(u16).range(1..=8))]
    data_parallel: u16,
    /// Envoy's worker threads.
    #[arg(long, default_value_t = 2)]
    concurrency: usize,
    /// How many times faster than an RTX A4000 the stand-in replicas compute.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// YAML or JSON with the whole configuration of the filter's route role.
    #[arg(long, value_name = "FILE")]
    filter_config: Option<PathBuf>,
}

/// Runs the stack until SIGINT or SIGTERM.
///
/// # Errors
/// If something cannot be built or started.
pub async fn up(options: UpOptions) -> Result<()> {
    // Asked for before anything starts, so that no signal ends this process and leaves others behind.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let running = async {
        let stack = start(&options).await?;
        print(&options, &stack)?;
        Ok::<_, anyhow::Error>(stack)
    };
    let stack = tokio::select! {
        stack = running => stack?,
        _ = interrupt.recv() => return Ok(()),
        _ = terminate.recv() => return Ok(()),
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    drop(stack);
    if !options.json {
        say("stopped");
    }
    Ok(())
}

async fn start(options: &UpOptions) -> Result<Stack> {
    let filter_config = match &options.filter_config {
        None => None,
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            Some(serde_saphyr::from_str(&text).with_context(|| format!("{} is neither YAML nor JSON", path.display()))?)
        }
    };
    let tools = Tools::ensure()?;
    let (kind, replicas, replica_args) = if options.vllm {
        let ranks = ["--data-parallel-size".to_owned(), options.data_parallel.to_string()];
        (ReplicaKind::Vllm(Vllm::ensure().await?), 2, ranks)
    } else {
        (ReplicaKind::StandIn, 4, ["--speed".to_owned(), options.speed.to_string()])
    };
    let stack = StackOptions {
        kind,
        replicas: options.replicas.map_or(replicas, usize::from),
        replica_args: replica_args.into(),
        concurrency: options.concurrency,
        filter_config,
        ..StackOptions::default()
    };
    Stack::start(&tools, stack).await
}

fn print(options: &UpOptions, stack: &Stack) -> Result<()> {
    let url = |address: std::net::SocketAddr| format!("http://{address}");
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let replicas: Vec<_> = stack.replicas.iter().map(|(_, address)| url(*address)).collect();
    if options.json {
        let line = json!({
            "proxy": url(stack.proxy),
            "admin": url(stack.envoy.admin),
            "control": url(stack.control),
            "console": url(*console),
            "replicas": replicas,
        });
        println!("{line}");
        return Ok(());
    }
    println!("proxy     {}  (OpenAI and Anthropic clients; the model is `{MODEL}`)", url(stack.proxy));
    println!("console   {}", url(*console));
    println!("admin     {}/stats/prometheus?filter=homing", url(stack.envoy.admin));
    println!("control   {}", url(stack.control));
    println!("replicas  {}", replicas.join(" "));
    println!("logs      {}", stack.dir.path().display());
    println!("\nTry it twice, and look at x-homing-outcome:\n");
    println!("  curl -i {}/v1/chat/completions -H 'content-type: application/json' -H 'x-session-id: mine' \\", url(stack.proxy));
    println!("    -d '{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'\n");
    println!("Ctrl-C stops everything.");
    Ok(())
}
