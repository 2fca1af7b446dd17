//! `homing-bench simulate`, `spill` and `frontier`: the model in virtual time.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use homing_bench::engine::EngineConfig;
use homing_bench::simulate::{self, HomingOptions, PolicyName, ReferenceRow, Simulation, SimulationReport};
use homing_bench::workload::{Workload, WorkloadArgs};
use homing_routing::admission::Admission;
use homing_routing::policy::Limit;

use crate::say;

/// Runs agent sessions on modelled engines in virtual time, under one or more policies, and prints a line for each.
///
/// With several seeds a line has the mean, and the one below it the standard deviation.
#[derive(Args)]
pub(crate) struct SimulateArgs {
    /// Run the published measurement of session affinity on the model instead, and print its table beside the model's. Takes --seeds,
    /// --kv-tokens and --max-num-seqs.
    #[arg(long, conflicts_with_all = ["policy", "sessions", "workload", "trace", "replicas", "minutes"])]
    reference: bool,
    /// Where requests go; several are compared.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "least-request,homing")]
    policy: Vec<PolicyName>,
    /// Sessions at once, in a closed loop; several are run.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,24,32")]
    sessions: Vec<usize>,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Replicas.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    replicas: u16,
    /// Minutes of the model's time.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Tokens that each KV cache holds.
    #[arg(long, default_value_t = EngineConfig::default().kv_cache_tokens)]
    kv_tokens: usize,
    /// Requests that run at once in an engine.
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Homing's spill threshold; automatic if not given.
    #[arg(long)]
    threshold: Option<u32>,
    /// Homing's spill margin; automatic if not given.
    #[arg(long)]
    margin: Option<u32>,
    /// Turns in a row away after which a conversation moves.
    #[arg(long, default_value_t = HomingOptions::default().turns_away)]
    turns_away: u8,
    /// Homing admits by working set.
    #[arg(long)]
    admission: bool,
    /// With --admission: milliseconds for which a quiet session keeps its place, at least.
    #[arg(long, default_value_t = Admission::default().min_grace_ms)]
    min_grace_ms: u64,
    /// With --admission: the same, at most.
    #[arg(long, default_value_t = Admission::default().max_grace_ms)]
    max_grace_ms: u64,
    /// With --admission: turns for which a session keeps its place while others wait; 0 is until it ends.
    #[arg(long, default_value_t = 0)]
    grant_turns: u16,
    /// With --admission: seconds a request is held at most.
    #[arg(long, default_value_t = 120)]
    max_wait_s: u64,
    /// With --admission: tokens that all sessions share; learned if not given.
    #[arg(long)]
    shared_tokens: Option<u32>,
    /// The first seed: sessions, and what policies leave to chance, depend on it alone.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Print each report as a line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn simulate(args: &SimulateArgs) -> Result<()> {
    ensure!(args.max_num_seqs > 0, "--max-num-seqs is 0: nothing would ever run");
    if args.reference {
        return reference(args);
    }
    let limit = |number: Option<u32>| number.map_or(Limit::Auto, Limit::Fixed);
    let seeds = (args.seed..).take(args.seeds as usize);
    let workloads: Vec<_> = seeds.map(|seed| Ok((seed, args.workload.workload(seed)?))).collect::<Result<_>>()?;
    // In an open loop there is no number of sessions to vary.
    let is_open = workloads.iter().all(|(_, workload)| workload.is_open());
    let sessions = if is_open { &args.sessions[..1] } else { &args.sessions[..] };
    if !args.json {
        say(SimulationReport::HEADER)?;
    }
    let mut refused = 0.0;
    for sessions in sessions {
        for policy in &args.policy {
            let simulation = |(seed, workload): &(u64, Workload)| Simulation {
                replicas: args.replicas.into(),
                engine: args.engine(),
                sessions: *sessions,
                workload: workload.clone(),
                policy: *policy,
                homing: HomingOptions {
                    threshold: limit(args.threshold),
                    margin: limit(args.margin),
                    turns_away: args.turns_away,
                    admission: args.admission.then(|| Admission {
                        turns: args.grant_turns,
                        max_wait_ms: 1000 * args.max_wait_s,
                        min_grace_ms: args.min_grace_ms,
                        max_grace_ms: args.max_grace_ms,
                        ..Admission::default()
                    }),
                    shared_tokens: args.shared_tokens,
                },
                duration: Duration::from_secs(60 * args.minutes),
                seed: *seed,
                network: Duration::ZERO,
            };
            let simulations: Vec<_> = workloads.iter().map(simulation).collect();
            let report = SimulationReport::of(&simulations[0], &simulate::run_all(&simulations));
            refused += report.mean.refused_calls;
            say_report(&report, args.json)?;
        }
    }
    if refused > 0.0 {
        eprintln!("some calls have more tokens than a KV cache holds and were refused: raise --kv-tokens ({})", args.kv_tokens);
    }
    Ok(())
}

impl SimulateArgs {
    fn engine(&self) -> EngineConfig {
        EngineConfig { kv_cache_tokens: self.kv_tokens, max_num_seqs: self.max_num_seqs, ..EngineConfig::default() }
    }
}

fn reference(args: &SimulateArgs) -> Result<()> {
    let rows = simulate::compare_with_reference(&args.engine(), args.seeds);
    if args.json {
        return rows.iter().try_for_each(|row| say(&serde_json::to_string(row)?));
    }
    say(ReferenceRow::HEADER)?;
    rows.iter().try_for_each(|row| say(&row.to_string()))
}

/// Which spill settings pay: the same simulated loads under one setting after another, averaged. Some minutes.
#[derive(Args)]
pub(crate) struct SpillArgs {
    /// Print each line as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn spill(args: &SpillArgs) -> Result<()> {
    if !args.json {
        say(SimulationReport::HEADER)?;
    }
    simulate::compare(|report| say_report(&report, args.json))
}

pub(crate) fn frontier(args: &simulate::FrontierArgs) -> Result<()> {
    say(SimulationReport::HEADER)?;
    simulate::frontier(args, |report| say_report(&report, false))
}

fn say_report(report: &SimulationReport, json: bool) -> Result<()> {
    if json { say(&serde_json::to_string(report)?) } else { say(&report.to_string()) }
}
