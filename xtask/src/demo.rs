//! `cargo xtask demo`: agent sessions through Envoy, first with affinity off, then on, and what it changed.

use anyhow::Result;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::load::{Pace, load};
use crate::process::unless_signalled;
use crate::stack::{ReplicaKind, Stack, StackOptions};
use crate::tools::{Tools, say};
use crate::vllm::Vllm;

/// A quarter of the reference workload, in bytes of text: the tiny model's small vocabulary makes 2.6 tokens of what is one with a
/// large one, and the longest conversation must fit its context.
const VLLM_SHAPE: &str = "--system-tokens 875 --first-tokens 1825 --turn-tokens 100 --max-tokens 64 --ignore-eos";

/// KV cache of each vLLM rank: 24,576 tokens of 512 bytes, which are some three conversations, as many as a replica of the reference
/// has room for.
const VLLM_KV_BYTES: u32 = 24_576 * 512;

/// Seconds a stage takes unless told, on stand-ins.
const SECONDS: u64 = 22;
/// The same, on vLLM.
const VLLM_SECONDS: u64 = 40;

/// What to show.
#[derive(Debug, Args)]
pub struct DemoOptions {
    /// Sessions at the same time, one stage each; 4,8,16 unless told, 2,4,8 with --vllm.
    #[arg(long, value_delimiter = ',')]
    sessions: Vec<u32>,
    /// Seconds a stage takes on the clock of the machine; 22 unless told, 40 with --vllm.
    #[arg(long)]
    seconds: Option<u64>,
    /// How many times faster than an RTX A4000 the stand-in replicas compute.
    #[arg(long, default_value_t = 20.0)]
    speed: f64,
    /// Two real vLLM servers with a tiny random model on the CPU, instead of stand-ins. The first time, this installs vLLM.
    #[arg(long, conflicts_with = "speed")]
    vllm: bool,
    /// Data-parallel ranks in each vLLM server; each rank is a replica.
    #[arg(long, default_value_t = 1, requires = "vllm", value_parser = clap::value_parser!(u16).range(1..=8))]
    data_parallel: u16,
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
    unless_signalled(run(&options)).await
}

async fn run(options: &DemoOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    let plan = Plan::new(options).await?;
    let mut stages = Vec::new();
    let mut stack = Stack::start(&tools, plan.stack).await?;
    for affinity in [false, true] {
        // The replicas are not restarted, as in the measurement this follows.
        stack.restart_envoy(json!({ "affinity": affinity })).await?;
        for sessions in &plan.sessions {
            say(&format!("{sessions} sessions for {} s, affinity {}", plan.pace.seconds, on_off(affinity)));
            // Sessions of one stage are not those of another.
            let first = stages.len() * 1_000_000;
            let own = ["--sessions", &sessions.to_string(), "--first-session", &first.to_string()].map(str::to_owned);
            let args: Vec<_> = own.into_iter().chain(plan.load_args.iter().cloned()).collect();
            let replicas: Vec<_> = stack.replicas.iter().map(|(_, address)| *address).collect();
            let figures: Stage = load(&tools, &format!("http://{}", stack.proxy), &replicas, plan.pace, &args).await?;
            stages.push((affinity, figures));
        }
    }
    if options.json {
        let stages: Vec<_> = stages.iter().map(|(affinity, stage)| json!({ "affinity": affinity, "figures": stage })).collect();
        println!("{}", json!({ "speed": plan.pace.speed, "stages": stages }));
        return Ok(());
    }
    println!("\n{}\n", plan.about);
    print_table(&plan.sessions, &stages);
    println!("\nEverything is stopped. `cargo xtask up` keeps the same stack running.");
    Ok(())
}

/// What the options come to.
struct Plan {
    about: String,
    stack: StackOptions,
    sessions: Vec<u32>,
    pace: Pace,
    load_args: Vec<String>,
}

impl Plan {
    async fn new(options: &DemoOptions) -> Result<Self> {
        let sessions =
            |unless_told: [u32; 3]| if options.sessions.is_empty() { unless_told.into() } else { options.sessions.clone() };
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        if options.vllm {
            let (servers, ranks) = (2, options.data_parallel);
            let replica_args = words(&format!("--data-parallel-size {ranks} --kv-cache-memory-bytes {VLLM_KV_BYTES}"));
            let kind = ReplicaKind::Vllm(Vllm::ensure().await?);
            return Ok(Self {
                about: format!(
                    "{servers} vLLM servers, data-parallel ranks in each: {ranks}; a tiny random model on the CPU, behind a real Envoy; off \
                     is Envoy's least_request."
                ),
                stack: StackOptions { kind, replicas: servers, replica_args, ..StackOptions::default() },
                sessions: sessions([2, 4, 8]),
                pace: Pace { seconds: options.seconds.unwrap_or(VLLM_SECONDS), speed: 1.0 },
                load_args: words(VLLM_SHAPE),
            });
        }
        let speed = options.speed;
        Ok(Self {
            about: format!(
                "Four stand-in replicas behind a real Envoy; off is Envoy's least_request. Their clock runs {speed} times faster;\n\
                 times and rates are those of the model's clock."
            ),
            stack: StackOptions { replica_args: words(&format!("--speed {speed}")), ..StackOptions::default() },
            sessions: sessions([4, 8, 16]),
            pace: Pace { seconds: options.seconds.unwrap_or(SECONDS), speed },
            load_args: Vec::new(),
        })
    }
}

fn on_off(affinity: bool) -> &'static str {
    if affinity { "on" } else { "off" }
}

fn print_table(sessions: &[u32], stages: &[(bool, Stage)]) {
    let figure = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    println!("sessions  affinity  output tok/min  TTFB p50 s  TTFB p95 s  prefix hits %  replicas busy  stayed %  turns  errors");
    for sessions in sessions {
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
}
