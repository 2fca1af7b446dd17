//! The dial of admission's fairness: the same load with more and more turns a grant.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use homing_routing::admission::Admission;

use super::{HomingOptions, PolicyName, Simulation, SimulationReport, run_all};
use crate::engine::EngineConfig;
use crate::report::{FrontierPoint, frontier_svg};
use crate::workload::{Workload, WorkloadName};

const DURATION: Duration = Duration::from_secs(30 * 60);

/// Turns a grant; 0 is to the end.
const TURNS: [u16; 7] = [1, 2, 3, 4, 5, 6, 0];

/// What admission's turns a grant buy and cost: output by the 95th percentile of waits, on modelled engines. Half a minute.
#[derive(Debug, Args)]
pub struct FrontierArgs {
    /// Sessions at once of the reference workload.
    #[arg(long, default_value_t = 24)]
    sessions: usize,
    /// How many seeds, from 1 on.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Also draw the figure into this SVG file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs every setting, calls `done` with each one's report as it is there, and draws the figure.
///
/// # Errors
/// What `done` returns, and a file that cannot be written.
pub fn frontier(args: &FrontierArgs, mut done: impl FnMut(SimulationReport) -> Result<()>) -> Result<()> {
    let admitted = |turns: u16| {
        let name = if turns == 0 { "to the end".to_owned() } else { format!("{turns} turns a grant") };
        let admission = Some(Admission { turns, ..Admission::default() });
        (name, PolicyName::Homing, HomingOptions { admission, ..HomingOptions::default() })
    };
    let beside = [
        ("sticky".to_owned(), PolicyName::StickySpill, HomingOptions::default()),
        ("no admission".to_owned(), PolicyName::Homing, HomingOptions::default()),
    ];
    let mut points = Vec::new();
    for (name, policy, homing) in TURNS.map(admitted).into_iter().chain(beside) {
        let simulation = |seed| Simulation {
            replicas: 4,
            engine: EngineConfig::default(),
            sessions: args.sessions,
            workload: Workload::new(WorkloadName::Reference.kind(0.0), seed),
            policy,
            homing,
            duration: DURATION,
            seed,
            network: Duration::ZERO,
        };
        let simulations: Vec<_> = (1..=args.seeds).map(simulation).collect();
        let report = SimulationReport::new(name.clone(), Some(args.sessions), &run_all(&simulations));
        let (cost, gain) = (report.mean.ttfb_p95_s, report.mean.output_tokens_per_minute);
        let name = name.split_once(" turns").map_or(name.as_str(), |(turns, _)| turns).to_owned();
        points.push(FrontierPoint { name, cost, gain, is_on_dial: homing.admission.is_some() });
        done(report)?;
    }
    if let Some(path) = &args.out {
        let title = format!("Turns a grant: {} sessions of the reference workload", args.sessions);
        let svg = frontier_svg(&title, "TTFB, 95th percentile, s", "output tokens/min", &points)?;
        fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
