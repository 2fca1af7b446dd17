//! `cargo xtask demo`: agent sessions through Envoy, first with affinity off, then on, and what it changed.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

use crate::stack::{MODEL, Stack, StackOptions};
use crate::tools::{Tools, say};

/// What to show.
#[derive(Debug, Args)]
pub struct DemoOptions {
    /// Sessions at the same time, one stage each.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16")]
    sessions: Vec<u32>,
    /// Seconds a stage takes on the clock of the machine.
    #[arg(long, default_value_t = 22)]
    seconds: u64,
    /// How many times faster than an RTX A4000 the stand-in replicas compute.
    #[arg(long, default_value_t = 20.0)]
    speed: f64,
    /// Print the figures as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// The figures of one stage, as `homing-bench load --json` prints them.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Stage {
    sessions: u32,
    output_tokens_per_minute: f64,
    ttfb_p50_s: Option<f64>,
    ttfb_p95_s: Option<f64>,
    prefix_hits: Option<f64>,
    replicas_busy: Option<f64>,
    stayed: Option<f64>,
    turns: u64,
    errors: serde_json::Value,
}

/// Runs the demonstration.
///
/// # Errors
/// If something cannot be built, started or measured.
pub async fn demo(options: DemoOptions) -> Result<()> {
    // Caught, so that the stack is stopped in order.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        done = run(&options) => done,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

async fn run(options: &DemoOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    let mut stages = Vec::new();
    let mut stack = Stack::start(&tools, stack_options(options)).await?;
    for affinity in [false, true] {
        // The replicas are not restarted, as in the measurement this follows.
        stack.restart_envoy(json!({ "affinity": affinity })).await?;
        for sessions in &options.sessions {
            say(&format!("{sessions} sessions for {} s, affinity {}", options.seconds, on_off(affinity)));
            // Sessions of one stage are not those of another.
            let figures = stage(&tools, &stack, options, *sessions, stages.len() * 1_000_000).await?;
            stages.push((affinity, figures));
        }
    }
    if options.json {
        let stages: Vec<_> = stages.iter().map(|(affinity, stage)| json!({ "affinity": affinity, "figures": stage })).collect();
        println!("{}", json!({ "speed": options.speed, "stages": stages }));
        return Ok(());
    }
    print_table(options, &stages);
    Ok(())
}

fn stack_options(options: &DemoOptions) -> StackOptions {
    StackOptions { replica_args: vec!["--speed".into(), options.speed.to_string()], ..StackOptions::default() }
}

async fn stage(tools: &Tools, stack: &Stack, options: &DemoOptions, sessions: u32, first_session: usize) -> Result<Stage> {
    let replicas: Vec<_> = stack.replicas.iter().map(|(_, address)| format!("http://{address}")).collect();
    let mut command = Command::new(&tools.bench);
    command.args(["load", "--json", "--model", MODEL, "--url", &format!("http://{}", stack.proxy)]);
    command.args(["--sessions", &sessions.to_string(), "--duration", &format!("{}s", options.seconds)]);
    command.args(["--speed", &options.speed.to_string(), "--replicas", &replicas.join(",")]);
    command.args(["--first-session", &first_session.to_string()]);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).kill_on_drop(true);
    let limit = Duration::from_secs(options.seconds.saturating_add(60));
    let output = tokio::time::timeout(limit, command.spawn()?.wait_with_output()).await.context("the load did not end")??;
    if !output.status.success() {
        bail!("the load failed ({})", output.status);
    }
    serde_json::from_slice(&output.stdout).context("the load's figures")
}

fn on_off(affinity: bool) -> &'static str {
    if affinity { "on" } else { "off" }
}

fn print_table(options: &DemoOptions, stages: &[(bool, Stage)]) {
    let figure = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    println!();
    println!(
        "Four stand-in replicas behind a real Envoy; off is Envoy's least_request. Their clock runs {} times faster;",
        options.speed
    );
    println!("times and rates are those of the model's clock.\n");
    println!("sessions  affinity  output tok/min  TTFB p50 s  TTFB p95 s  prefix hits %  replicas busy  stayed %  turns  errors");
    for sessions in &options.sessions {
        for (affinity, stage) in stages.iter().filter(|(_, stage)| stage.sessions == *sessions) {
            let errors =
                stage.errors.as_object().map_or(0, |kinds| kinds.values().filter_map(serde_json::Value::as_u64).sum::<u64>());
            println!(
                "{:>8}  {:>8}  {:>14.0}  {:>10}  {:>10}  {:>13}  {:>13}  {:>8}  {:>5}  {:>6}",
                sessions,
                on_off(*affinity),
                stage.output_tokens_per_minute,
                figure(stage.ttfb_p50_s, 2),
                figure(stage.ttfb_p95_s, 2),
                figure(stage.prefix_hits, 1),
                figure(stage.replicas_busy, 2),
                figure(stage.stayed, 1),
                stage.turns,
                errors,
            );
        }
    }
    println!("\nEverything is stopped. `cargo xtask up` keeps the same stack running.");
}
