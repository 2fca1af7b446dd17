//! `cargo xtask bench admission`: Homing with and without admission by working set on a real Envoy, beside the simulator with the same
//! sessions for as long.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;
use tokio::process::Command;

use super::load::{self, Stage};
use super::machine::Busy;
use super::variant::{self, Setting, Variant};
use crate::load::Pace;
use crate::process::unless_signalled;
use crate::tools::{Tools, say};

/// What to run.
#[derive(Debug, Args)]
pub struct AdmissionOptions {
    /// Sessions at once of the reference workload; several are run.
    #[arg(long, value_delimiter = ',', default_value = "24,32")]
    sessions: Vec<u32>,
    /// Minutes of the model's time of each run.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// How many times faster than an RTX A4000 the stand-in replicas compute; grace and longest wait are as many times shorter.
    #[arg(long, default_value_t = 4.0)]
    speed: f64,
    /// The sessions' seed, on Envoy and in the simulator.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What one run showed.
struct Figures {
    output: f64,
    hits: f64,
    p50_s: f64,
    p95_s: f64,
    mean_s: f64,
    /// How busy processors were; a simulation has no say in that.
    busy: Option<Busy>,
}

/// The two that are compared, and whether they admit by working set.
const VARIANTS: [(Variant, &str, bool); 2] =
    [(Variant::Homing, "homing", false), (Variant::HomingAdmission, "homing-admission", true)];

/// Runs both on Envoy and in the simulator and prints a table.
///
/// # Errors
/// If something cannot be built, started or measured.
pub async fn admission(options: AdmissionOptions) -> Result<()> {
    ensure!(options.speed.is_finite() && options.speed > 0.0, "--speed must be more than 0");
    unless_signalled(measure(&options)).await
}

async fn measure(options: &AdmissionOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    let seconds = (options.minutes as f64 * 60.0 / options.speed).round() as u64;
    let pace = Pace { seconds, speed: options.speed };
    let setting = Setting { tools: tools.clone(), peers: Default::default(), pace, calibration: None };
    let mut table = String::from(
        "| sessions | | output tok/min | hits % | TTFB p50 s | p95 s | mean s | processors busy % |\n|--:|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for sessions in &options.sessions {
        let stage: Stage = sessions.to_string().parse().map_err(anyhow::Error::msg)?;
        for (variant, name, admits) in VARIANTS {
            say(&format!("{sessions} sessions, {name}: {seconds} s"));
            let running = variant::start(variant, &setting).await?;
            let run = load::run(&tools, &running, name, &stage, options.seed, pace).await?;
            let on_envoy = Figures {
                output: number(&run.report["output_tokens_per_minute"])?,
                hits: number(&run.report["prefix_hits"])?,
                p50_s: number(&run.report["ttfb_p50_s"])?,
                p95_s: number(&run.report["ttfb_p95_s"])?,
                mean_s: number(&run.report["ttfb_s"]["mean"])?,
                busy: run.busy,
            };
            drop(running);
            let simulated = simulate(&tools, options, *sessions, admits).await?;
            on_envoy.write(&mut table, &format!("{sessions} | {name}, Envoy"));
            simulated.write(&mut table, "| the same, simulated");
            let _ = writeln!(
                table,
                "| | Envoy / simulated | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | |",
                on_envoy.output / simulated.output,
                on_envoy.hits / simulated.hits,
                on_envoy.p50_s / simulated.p50_s,
                on_envoy.p95_s / simulated.p95_s,
                on_envoy.mean_s / simulated.mean_s,
            );
        }
    }
    println!("{}", table.trim_end());
    Ok(())
}

async fn simulate(tools: &Tools, options: &AdmissionOptions, sessions: u32, admits: bool) -> Result<Figures> {
    let mut command = Command::new(&tools.bench);
    command.args(["simulate", "--json", "--policy", "homing", "--sessions", &sessions.to_string()]);
    command.args(["--minutes", &options.minutes.to_string(), "--seed", &options.seed.to_string()]);
    if admits {
        command.arg("--admission");
    }
    let output = command.kill_on_drop(true).output().await.context("running the simulator")?;
    ensure!(output.status.success(), "the simulator failed.\n{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).context("the simulator's figures")?;
    Ok(Figures {
        output: number(&report["output_tokens_per_minute"])?,
        hits: number(&report["prefix_hits"])?,
        p50_s: number(&report["ttfb_p50_s"])?,
        p95_s: number(&report["ttfb_p95_s"])?,
        mean_s: number(&report["ttfb_mean_s"])?,
        busy: None,
    })
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("a run without a finished turn: raise --minutes")
}

impl Figures {
    fn write(&self, table: &mut String, name: &str) {
        let Self { output, hits, p50_s, p95_s, mean_s, busy } = self;
        let busy = busy.map_or_else(String::new, |busy| format!("{:.0}, by the run {:.0}", busy.machine, busy.run));
        let _ = writeln!(table, "| {name} | {output:.0} | {hits:.1} | {p50_s:.2} | {p95_s:.2} | {mean_s:.2} | {busy} |");
    }
}
