//! Which spill settings pay: the same loads under one setting after another, averaged.

use std::fmt;
use std::time::Duration;

use homing_routing::policy::Limit;
use serde::Serialize;

use super::{HomingOptions, PolicyName, Simulation, SimulationReport, Workload, WorkloadName, run};
use crate::engine::EngineConfig;

/// Sessions at once and the engines' `max_num_seqs`: loads at which homes are full at times and others are not.
const LOADS: [(usize, usize); 3] = [(20, 16), (28, 16), (40, 32)];
const SEEDS: [u64; 3] = [1, 2, 3];
const WORKLOADS: [WorkloadName; 2] = [WorkloadName::Agents, WorkloadName::Skewed];
/// Caches that hold every conversation, so that what is seen is spilling and not thrashing.
const KV_TOKENS: usize = 100_000;
const DURATION: Duration = Duration::from_secs(20 * 60);

/// One setting's figures, averaged over every load, workload and seed.
#[derive(Clone, Debug, Serialize)]
pub struct SpillLine {
    /// The setting.
    pub setting: String,
    /// Tokens of answers, a minute.
    pub output_tokens_per_minute: f64,
    /// Seconds to the first token: the mean of the simulations' medians, 95th percentiles and means.
    pub ttfb_p50_s: f64,
    /// As above.
    pub ttfb_p95_s: f64,
    /// As above.
    pub ttfb_mean_s: f64,
    /// Prompt tokens from the cache, per cent.
    pub prefix_hits: f64,
    /// Turns served where the one before was, per cent.
    pub stayed: f64,
}

/// The settings that are compared, in order.
fn settings() -> Vec<(String, PolicyName, HomingOptions)> {
    let homing = |margin, turns_away| HomingOptions { margin, turns_away, ..HomingOptions::default() };
    let default = HomingOptions::default().turns_away;
    let mut settings = vec![
        ("least request".to_owned(), PolicyName::LeastRequest, HomingOptions::default()),
        ("sticky, spill to least".to_owned(), PolicyName::StickySpill, HomingOptions::default()),
    ];
    for margin in [1, 2, 4, 8] {
        settings.push((format!("Homing, margin {margin}"), PolicyName::Homing, homing(Limit::Fixed(margin), default)));
    }
    for turns_away in [1, 2, 3, u8::MAX] {
        let name = if turns_away == u8::MAX { "never".to_owned() } else { format!("after {turns_away}") };
        settings.push((format!("Homing, moves {name}"), PolicyName::Homing, homing(Limit::Auto, turns_away)));
    }
    settings
}

/// Runs every simulation, and calls `done` with each line as it is there.
pub fn compare(mut done: impl FnMut(SpillLine)) {
    for (setting, policy, homing) in settings() {
        let simulations: Vec<_> = LOADS
            .into_iter()
            .flat_map(|load| WORKLOADS.map(|workload| (load, workload)))
            .flat_map(|(load, workload)| SEEDS.map(|seed| simulation(load, workload, seed, policy, homing)))
            .collect();
        let halves = simulations.chunks(simulations.len().div_ceil(2));
        let reports: Vec<SimulationReport> = std::thread::scope(|scope| {
            let threads: Vec<_> = halves.map(|half| scope.spawn(move || half.iter().map(run).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
        });
        let mean = |figure: fn(&SimulationReport) -> f64| reports.iter().map(figure).sum::<f64>() / reports.len() as f64;
        done(SpillLine {
            setting,
            output_tokens_per_minute: mean(|report| report.output_tokens_per_minute),
            ttfb_p50_s: mean(|report| report.ttfb_p50_s),
            ttfb_p95_s: mean(|report| report.ttfb_p95_s),
            ttfb_mean_s: mean(|report| report.ttfb_mean_s),
            prefix_hits: mean(|report| report.prefix_hits),
            stayed: mean(|report| report.stayed),
        });
    }
}

fn simulation(
    (sessions, max_num_seqs): (usize, usize),
    workload: WorkloadName,
    seed: u64,
    policy: PolicyName,
    homing: HomingOptions,
) -> Simulation {
    Simulation {
        replicas: 4,
        engine: EngineConfig { kv_cache_tokens: KV_TOKENS, max_num_seqs, ..EngineConfig::default() },
        sessions,
        workload: Workload::new(workload, seed),
        policy,
        homing,
        duration: DURATION,
    }
}

impl SpillLine {
    /// The columns of its line.
    pub const HEADER: &'static str = "setting                   output tok/min  TTFB p50 s   p95 s  mean s  hits %  stayed %";
}

impl fmt::Display for SpillLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<24}  {:>14.0}  {:>10.2}  {:>6.2}  {:>6.2}  {:>6.1}  {:>8.1}",
            self.setting,
            self.output_tokens_per_minute,
            self.ttfb_p50_s,
            self.ttfb_p95_s,
            self.ttfb_mean_s,
            self.prefix_hits,
            self.stayed,
        )
    }
}
