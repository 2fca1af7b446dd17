//! `cargo xtask bench peers`: Homing beside Envoy's own policies and two other routers, under the same load.
//!
//! Every run has replicas and a router of its own, so nothing is left of the run before. A round goes through all stages, a stage
//! through all variants, each time beginning with another one; all variants of a round get the same sessions.

pub mod admission;
mod calibrate;
mod load;
mod machine;
mod plain_envoy;
mod report;
mod variant;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use self::load::{Run, Stage};
use self::report::Results;
use self::variant::{Setting, VARIANTS, Variant};
use crate::load::Pace;
use crate::process::unless_signalled;
use crate::tools::{self, Tools, say};

/// What to compare, and how.
#[derive(Debug, Args)]
pub struct PeersOptions {
    /// How often each variant gets each stage, with other sessions each time.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Loads to send: a number of sessions of the reference workload, `open:RATE` for an open loop in which so many of them come a
    /// minute, `skewed:SESSIONS` for sessions of which every eighth is long.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,24,32,open:6,skewed:12")]
    stages: Vec<Stage>,
    /// Only these variants.
    #[arg(long, value_delimiter = ',', value_parser = VARIANTS.map(|(name, _)| name))]
    variants: Vec<String>,
    /// Seconds of each run, of real time.
    #[arg(long, default_value_t = 9)]
    seconds: u64,
    /// How many times faster than an RTX A4000 the stand-in replicas compute.
    #[arg(long, default_value_t = 20.0)]
    speed: f64,
    /// Print all runs as JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Also put the tables into this Markdown file, between its marker lines.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure nothing; take the runs of this file, such as target/bench/peers.json.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

/// Compares.
///
/// # Errors
/// If something cannot be built, installed, started or measured. Turns that fail are counted.
pub async fn peers(options: PeersOptions) -> Result<()> {
    let results = match &options.from {
        Some(path) => serde_json::from_slice(&fs::read(path).with_context(|| format!("reading {}", path.display()))?)
            .with_context(|| format!("{} holds no runs", path.display()))?,
        None => unless_signalled(measure(&options))
            .await
            .with_context(|| format!("the runs so far are in {}", results_file().display()))?,
    };
    if let Some(path) = &options.out {
        report::write_into(path, &results)?;
    }
    if options.json {
        println!("{}", serde_json::to_string(&results)?);
    } else {
        println!("{}", results.markdown());
    }
    Ok(())
}

/// Where all runs go.
fn results_file() -> PathBuf {
    tools::target().join("bench/peers.json")
}

async fn measure(options: &PeersOptions) -> Result<Results> {
    let pace = Pace { seconds: options.seconds, speed: options.speed };
    let wanted = |name: &str| options.variants.is_empty() || options.variants.iter().any(|variant| variant == name);
    let variants: Vec<(&str, Variant)> = VARIANTS.into_iter().filter(|(name, _)| wanted(name)).collect();
    let tools = Tools::ensure()?;
    let (mut peers, mut calibration) = (PathBuf::new(), None);
    if variants.iter().any(|(_, variant)| variant.is_peer()) {
        peers = tools::python_packages("peers")?;
        let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
        say("calibrating");
        calibration = Some(calibrate::calibrate(&tools, pace, dir.path()).await?);
    }
    let setting = Setting { tools, peers, pace, calibration };

    let rounds = usize::try_from(options.rounds)?;
    let all = rounds * options.stages.len() * variants.len();
    let started = Instant::now();
    let mut results = Results { speed: pace.speed, seconds: pace.seconds, runs: Vec::new() };
    fs::create_dir_all(results_file().parent().context("the results' folder")?)?;
    for round in 1..=options.rounds {
        for (place, stage) in options.stages.iter().enumerate() {
            for turn in 0..variants.len() {
                let (name, variant) = variants[(turn + place + usize::try_from(round)?) % variants.len()];
                let done = results.runs.len();
                let left = left(started.elapsed(), done, all);
                say(&format!("{} of {all}: round {round}, stage {}, {name}{left}", done + 1, stage.name));
                let run =
                    one(name, variant, stage, round, &setting).await.with_context(|| format!("{name}, stage {}", stage.name))?;
                say(&format!("  {}", report::line(&run)));
                results.runs.push(run);
                // After each, so that a measurement that is broken off leaves what it has.
                fs::write(results_file(), serde_json::to_vec_pretty(&results)?)?;
            }
        }
    }
    // Listed as the variants are, not as the order of the first round happened to be.
    let order = |run: &Run| VARIANTS.iter().position(|(name, _)| *name == run.variant);
    results.runs.sort_by_key(|run| (run.round, options.stages.iter().position(|stage| stage.name == run.stage), order(run)));
    fs::write(results_file(), serde_json::to_vec_pretty(&results)?)?;
    say(&format!("{all} runs in {} s; they are in {}", started.elapsed().as_secs(), results_file().display()));
    Ok(results)
}

async fn one(name: &str, variant: Variant, stage: &Stage, round: u64, setting: &Setting) -> Result<Run> {
    let running = variant::start(variant, setting).await?;
    let figures = load::run(&setting.tools, &running, name, stage, round, setting.pace).await?;
    Ok(Run { variant: name.to_owned(), stage: stage.name.clone(), round, figures })
}

/// How long it will take yet, once that can be said.
fn left(elapsed: Duration, done: usize, all: usize) -> String {
    if done == 0 {
        return String::new();
    }
    let seconds = elapsed.as_secs_f64() / done as f64 * (all - done) as f64;
    format!(", {:.0} min left", (seconds / 60.0).ceil())
}
