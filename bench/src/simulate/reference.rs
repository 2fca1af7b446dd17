//! The published measurement of session affinity that the reference workload is taken from, and the same five stages on the model.
//!
//! Published for LM Warden on 2026-10-04: four NVIDIA RTX A4000, Qwen3-4B-Instruct-2507 in bf16, vLLM 0.26.0 with data parallel 4, three
//! minutes a stage, one stage after the other on the same engines, clients over the internet. "Off" is vLLM's own balancer, "on" is
//! session affinity with spill above 8 requests. The model runs the stages in the same way: on engines that are not restarted in between.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::report::{Figures, mean_and_deviation};
use super::{HomingOptions, PolicyName, Simulation, on_all_cpus, run_stages};
use crate::engine::EngineConfig;
use crate::workload::{Workload, WorkloadName};

/// Sessions at once, by stage.
const STAGES: [usize; 5] = [4, 8, 16, 24, 32];
/// How long each stage lasts.
const STAGE: Duration = Duration::from_secs(180);
/// Replicas of the fleet.
const REPLICAS: usize = 4;
/// From a client to the fleet and back; the shortest median that was published is 0.38 s.
const NETWORK: Duration = Duration::from_millis(200);

/// What was published of one stage.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Published {
    /// Sessions that ended, an hour.
    pub sessions_per_hour: f64,
    /// Output tokens a minute.
    pub output_tokens_per_minute: f64,
    /// Seconds to the first token, median.
    pub ttfb_p50_s: f64,
    /// Seconds to the first token, 95th percentile.
    pub ttfb_p95_s: f64,
    /// Replicas with a running request at each poll, averaged.
    pub replicas_busy: f64,
    /// Prompt tokens from the cache, per cent.
    pub prefix_hits: f64,
    /// Turns that went where the turn before went, per cent; with affinity only.
    pub stayed: Option<f64>,
}

const fn published(columns: [f64; 6], stayed: Option<f64>) -> Published {
    let [sessions_per_hour, output_tokens_per_minute, ttfb_p50_s, ttfb_p95_s, replicas_busy, prefix_hits] = columns;
    Published { sessions_per_hour, output_tokens_per_minute, ttfb_p50_s, ttfb_p95_s, replicas_busy, prefix_hits, stayed }
}

/// The stages without affinity.
const OFF: [Published; 5] = [
    published([180.0, 5_886.0, 2.05, 3.5, 2.71, 56.2], None),
    published([300.0, 8_364.0, 2.33, 6.32, 3.74, 44.3], None),
    published([300.0, 9_558.0, 3.25, 26.24, 3.91, 33.2], None),
    published([300.0, 9_048.0, 5.06, 58.82, 3.91, 32.8], None),
    published([520.0, 14_760.0, 12.32, 82.84, 4.0, 31.6], None),
];

/// The stages with affinity.
const ON: [Published; 5] = [
    published([240.0, 6_744.0, 0.38, 2.84, 2.83, 86.4], Some(100.0)),
    published([380.0, 10_752.0, 0.48, 5.03, 3.74, 86.1], Some(100.0)),
    published([360.0, 12_204.0, 0.85, 24.88, 3.69, 48.6], Some(100.0)),
    published([420.0, 11_178.0, 13.14, 38.34, 4.0, 37.9], Some(89.1)),
    published([620.0, 16_638.0, 27.66, 38.92, 4.0, 31.6], Some(67.3)),
];

/// What the model shows for each half of the measurement, and Homing beside them.
const OFF_MODELS: [PolicyName; 2] = [PolicyName::Vllm, PolicyName::Random];
const ON_MODELS: [PolicyName; 2] = [PolicyName::StickySpill, PolicyName::Homing];

/// One stage of one half: what was published, and what the model shows.
#[derive(Clone, Debug, Serialize)]
pub struct ReferenceRow {
    /// Sessions at once.
    pub sessions: usize,
    /// Whether with affinity.
    pub affinity: bool,
    /// What was published.
    pub published: Published,
    /// By policy, the mean over the seeds and the standard deviation.
    pub model: Vec<ModelRow>,
}

/// The model under one policy.
#[derive(Clone, Debug, Serialize)]
pub struct ModelRow {
    /// Where requests went.
    pub policy: String,
    /// The mean over the seeds.
    pub mean: Figures,
    /// The sample standard deviation; None with one seed.
    pub deviation: Option<Figures>,
}

/// Runs the five stages under each policy with this engine, with seeds from 1 on.
pub fn compare_with_reference(engine: &EngineConfig, seeds: u64) -> Vec<ReferenceRow> {
    let policies = [OFF_MODELS, ON_MODELS].concat();
    let simulations: Vec<Simulation> =
        policies.iter().flat_map(|policy| (1..=seeds).map(|seed| simulation(engine, *policy, seed))).collect();
    let stages = on_all_cpus(&simulations, |simulation| run_stages(simulation, &STAGES));
    let model = |policy: PolicyName, stage: usize| {
        let runs: Vec<Figures> = simulations
            .iter()
            .zip(&stages)
            .filter(|(simulation, _)| simulation.policy == policy)
            .map(|(_, stages)| stages[stage])
            .collect();
        let (mean, deviation) = mean_and_deviation(&runs);
        ModelRow { policy: policy.as_str(), mean, deviation }
    };
    let rows = |(stage, sessions): (usize, &usize)| {
        [(false, OFF[stage], OFF_MODELS), (true, ON[stage], ON_MODELS)].map(|(affinity, published, policies)| ReferenceRow {
            sessions: *sessions,
            affinity,
            published,
            model: policies.map(|policy| model(policy, stage)).into(),
        })
    };
    STAGES.iter().enumerate().flat_map(rows).collect()
}

fn simulation(engine: &EngineConfig, policy: PolicyName, seed: u64) -> Simulation {
    Simulation {
        replicas: REPLICAS,
        engine: engine.clone(),
        sessions: 0,
        workload: Workload::new(WorkloadName::Reference.kind(0.0), seed),
        policy,
        homing: HomingOptions::default(),
        duration: STAGE,
        seed,
        network: NETWORK,
    }
}

// === impl ReferenceRow ===

impl ReferenceRow {
    /// The columns of its lines.
    pub const HEADER: &'static str =
        "sessions  affinity             sessions/h  output tok/min  TTFB p50 s   p95 s  mean s  busy  hits %  looked up  stayed %";
}

impl fmt::Display for ReferenceRow {
    /// A line of what was published, and one of means for each policy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Published { sessions_per_hour, output_tokens_per_minute, ttfb_p50_s, ttfb_p95_s, replicas_busy, prefix_hits, stayed } =
            self.published;
        let stayed = stayed.map_or_else(|| "-".to_owned(), |stayed| format!("{stayed:.1}"));
        write!(
            f,
            "{:>8}  {:<3}  {:<14}  {sessions_per_hour:>10.0}  {output_tokens_per_minute:>14.0}  {ttfb_p50_s:>10.2}  {ttfb_p95_s:>6.2}  \
             {:>6}  {replicas_busy:>4.2}  {prefix_hits:>6.1}  {:>9}  {stayed:>8}",
            self.sessions,
            if self.affinity { "on" } else { "off" },
            "published",
            "-",
            "-",
        )?;
        for ModelRow { policy, mean, .. } in &self.model {
            write!(
                f,
                "\n{:>8}  {:<3}  {policy:<14}  {:>10.0}  {:>14.0}  {:>10.2}  {:>6.2}  {:>6.2}  {:>4.2}  {:>6.1}  {:>9.1}  {:>8.1}",
                "",
                "",
                mean.sessions_per_hour,
                mean.output_tokens_per_minute,
                mean.ttfb_p50_s,
                mean.ttfb_p95_s,
                mean.ttfb_mean_s,
                mean.replicas_busy,
                mean.prefix_hits,
                mean.looked_up_hits,
                mean.stayed,
            )?;
        }
        Ok(())
    }
}
