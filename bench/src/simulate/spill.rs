//! Which spill settings pay: the same loads under one setting after another, averaged.

use std::time::Duration;

use homing_routing::policy::Limit;

use super::{HomingOptions, PolicyName, Simulation, SimulationReport, run_all};
use crate::engine::EngineConfig;
use crate::workload::{Kind, Workload};

/// Sessions at once and the engines' `max_num_seqs`: loads at which homes are full at times and others are not.
const LOADS: [(usize, usize); 3] = [(20, 16), (28, 16), (40, 32)];
const SEEDS: [u64; 3] = [1, 2, 3];
const WORKLOADS: [Kind; 2] = [Kind::Agents, Kind::Skewed];
/// Caches that hold every conversation, so that what is seen is spilling and not thrashing.
const KV_TOKENS: usize = 1_000_000;
const DURATION: Duration = Duration::from_secs(20 * 60);

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

/// Runs every simulation, and calls `done` with each setting's report as it is there: its mean over every load, workload and seed.
///
/// # Errors
/// What `done` returns.
pub fn compare<E>(mut done: impl FnMut(SimulationReport) -> Result<(), E>) -> Result<(), E> {
    for (setting, policy, homing) in settings() {
        let mut simulations = Vec::new();
        for (sessions, max_num_seqs) in LOADS {
            for kind in WORKLOADS {
                simulations.extend(SEEDS.map(|seed| Simulation {
                    replicas: 4,
                    engine: EngineConfig { kv_cache_tokens: KV_TOKENS, max_num_seqs, ..EngineConfig::default() },
                    sessions,
                    workload: Workload::new(kind, seed),
                    policy,
                    homing,
                    duration: DURATION,
                    seed,
                    network: Duration::ZERO,
                }));
            }
        }
        // Loads differ far more than seeds: their deviation would say nothing of a setting.
        let report = SimulationReport { deviation: None, ..SimulationReport::new(setting, None, &run_all(&simulations)) };
        done(report)?;
    }
    Ok(())
}
