//! A simulation is a measurement: the same every time, and right where it can be worked out.

use clap::ValueEnum;
use std::time::Duration;

use super::*;
use crate::engine::EngineConfig;
use crate::workload::{Call, Kind, SessionPlan, SessionShape, Step, Text, Workload, mooncake};

const REFERENCE: Kind =
    Kind::Reference(SessionShape { system_tokens: 3500, first_tokens: 7300, turns: 6, turn_tokens: 400, max_tokens: 256 });

fn simulation(policy: PolicyName, sessions: usize, workload: Workload) -> Simulation {
    Simulation {
        replicas: 4,
        engine: EngineConfig::default(),
        sessions,
        workload,
        policy,
        homing: HomingOptions::default(),
        duration: Duration::from_secs(300),
        seed: 1,
        network: Duration::ZERO,
    }
}

fn reference(policy: PolicyName, sessions: usize) -> Figures {
    run(&simulation(policy, sessions, Workload::new(REFERENCE, 1)))
}

fn mooncake_sample() -> Workload {
    Workload::from_trace(mooncake::read(&include_bytes!("../../testdata/mooncake.jsonl")[..]).expect("the sample"))
}

fn call(seed: u64, output: usize) -> Call {
    Call { think_ms: 100, text: vec![Text { seed, tokens: 100 }], output, hang_up_ms: None }
}

fn plan(id: &str, steps: Vec<Step>) -> SessionPlan {
    SessionPlan { id: id.into(), parent: None, arrival_ms: Some(0), system: Vec::new(), steps }
}

/// What these sessions alone do on one replica.
fn run_plans(plans: Vec<SessionPlan>) -> Figures {
    let simulation = simulation(PolicyName::RoundRobin, 1, Workload::from_trace(plans));
    run(&Simulation { replicas: 1, ..simulation })
}

fn ended(figures: &Figures) -> [f64; 4] {
    [figures.sessions_done, figures.sessions_abandoned, figures.sessions_refused, figures.sessions_unfinished]
}

#[test]
fn every_policy_runs_every_workload_and_every_session_is_accounted_for() {
    let kinds = [REFERENCE, Kind::Agents, Kind::Subagents, Kind::Long, Kind::Skewed, Kind::Open { per_minute: 8.0 }];
    let workloads = kinds.map(|kind| Workload::new(kind, 1)).into_iter().chain([mooncake_sample()]);
    let each = |workload: Workload| {
        PolicyName::value_variants().iter().map(move |policy| Simulation {
            engine: EngineConfig { kv_cache_tokens: 120_000, ..EngineConfig::default() },
            duration: Duration::from_secs(90),
            ..simulation(*policy, 5, workload.clone())
        })
    };
    let simulations: Vec<_> = workloads.flat_map(each).collect();
    assert_eq!(simulations.len(), 7 * 11);
    for (simulation, figures) in simulations.iter().zip(run_all(&simulations)) {
        assert!(figures.turns > 5.0 && figures.sessions_started > 3.0, "{simulation:?}\n{figures:?}");
        assert_eq!(ended(&figures).iter().sum::<f64>(), figures.sessions_started, "{simulation:?}\n{figures:?}");
        assert_eq!(figures.refused_calls, 0.0, "{simulation:?}");
    }
}

#[test]
fn it_is_the_same_every_time_and_another_with_another_seed() {
    for policy in PolicyName::value_variants() {
        let agents = |seed| {
            let engine = EngineConfig { kv_cache_tokens: 120_000, ..EngineConfig::default() };
            Simulation { engine, seed, ..simulation(*policy, 6, Workload::new(Kind::Agents, seed)) }
        };
        let figures = run_all(&[agents(1), agents(1), agents(2)]);
        assert_eq!(figures[0], figures[1], "{policy:?}");
        assert_ne!(figures[0], figures[2], "{policy:?}");
    }
}

#[test]
fn four_sessions_on_four_replicas_each_have_one_to_themselves() {
    let figures = reference(PolicyName::Homing, 4);
    assert_eq!((figures.stayed, figures.preemptions), (100.0, 0.0));
    // A later turn computes about 420 tokens: 22 ms + 420 x 0.25 ms and what the context costs.
    assert!((0.12..0.18).contains(&figures.ttfb_p50_s), "{figures:?}");
    assert!(figures.prefix_hits > 83.0, "{figures:?}");
}

#[test]
fn at_low_load_affinity_beats_spreading_on_hits() {
    use PolicyName::*;
    let hits = |policy: PolicyName| (policy, reference(policy, 8).prefix_hits);
    let affine = [Hash, BoundedHash, StickySpill, LlmD, Higress, Homing].map(hits);
    let spread = [RoundRobin, Random, LeastRequest].map(hits);
    let least = affine.iter().map(|(_, hits)| *hits).fold(f64::INFINITY, f64::min);
    let most = spread.iter().map(|(_, hits)| *hits).fold(0.0, f64::max);
    assert!(least > most + 5.0, "{affine:?} {spread:?}");
}

#[test]
fn sending_each_turn_elsewhere_costs_time() {
    let (spread, homing) = (reference(PolicyName::RoundRobin, 8), reference(PolicyName::Homing, 8));
    assert!(spread.ttfb_p50_s > 3.0 * homing.ttfb_p50_s, "{spread:?}\n{homing:?}");
    assert!(spread.output_tokens_per_minute < homing.output_tokens_per_minute, "{spread:?}\n{homing:?}");
}

#[test]
fn a_trace_is_run_once_and_then_there_is_silence() {
    let figures = run(&simulation(PolicyName::Homing, 1, mooncake_sample()));
    assert_eq!((figures.sessions_started, figures.turns), (4.0, 7.0));
    assert_eq!(ended(&figures), [4.0, 0.0, 0.0, 0.0]);
    // Turns go home, and find what their hash ids share: 2 blocks of 512 and 4, 4 more in the second conversation.
    assert_eq!(figures.stayed, 100.0);
    assert!(figures.prefix_hits > 100.0 * (2.0 + 4.0 + 4.0) * 512.0 / 14_000.0, "{figures:?}");
}

#[test]
fn an_open_loop_goes_on_at_its_rate_however_slow_the_engines_are() {
    let open = |per_minute| {
        let simulation = simulation(PolicyName::LeastRequest, 1, Workload::new(Kind::Open { per_minute }, 1));
        run(&Simulation { duration: Duration::from_secs(1200), ..simulation })
    };
    for per_minute in [4.0, 20.0] {
        let figures = open(per_minute);
        assert!((0.8..1.2).contains(&(figures.sessions_started / (20.0 * per_minute))), "{figures:?}");
    }
    assert!(open(20.0).sessions_unfinished > open(4.0).sessions_unfinished + 20.0);
}

#[test]
fn subagents_run_side_by_side_and_their_parent_waits_for_all() {
    let subagent =
        |id: &str, output| SessionPlan { parent: Some("a".into()), ..plan(id, vec![Step::Turn(call(output as u64, output))]) };
    let fan_out = Step::FanOut(vec![subagent("b", 50), subagent("c", 500)]);
    let figures = run_plans(vec![plan("a", vec![Step::Turn(call(1, 10)), fan_out.clone(), Step::Turn(call(2, 10))])]);
    assert_eq!((figures.turns, ended(&figures)), (4.0, [1.0, 0.0, 0.0, 0.0]));

    // A subagent that does not come to its end holds up its parent.
    let endless = Step::FanOut(vec![subagent("b", 50), subagent("c", 20_000)]);
    let figures = run_plans(vec![plan("a", vec![Step::Turn(call(1, 10)), endless, Step::Turn(call(2, 10))])]);
    assert_eq!((figures.turns, ended(&figures)), (2.0, [0.0, 0.0, 0.0, 1.0]));

    // One that stops without notice does not.
    let stops = Step::FanOut(vec![plan("b", vec![Step::Stop])]);
    assert_eq!(run_plans(vec![plan("a", vec![stops, Step::Turn(call(2, 10))])]).turns, 1.0);
    // Nor does a fan-out to nobody.
    assert_eq!(run_plans(vec![plan("a", vec![Step::FanOut(Vec::new()), Step::Turn(call(2, 10))])]).turns, 1.0);
}

#[test]
fn a_client_that_hangs_up_frees_its_engine_and_sends_nothing_more() {
    let leaves = Call { hang_up_ms: Some(2_000), ..call(1, 30_000) };
    let after = SessionPlan { arrival_ms: Some(10_000), ..plan("b", vec![Step::Turn(call(3, 10))]) };
    let one_at_a_time = EngineConfig { max_num_seqs: 1, ..EngineConfig::default() };
    let workload = Workload::from_trace(vec![plan("a", vec![Step::Turn(leaves.clone()), Step::Turn(call(2, 10))]), after]);
    let simulation = simulation(PolicyName::Homing, 1, workload);
    let figures = run(&Simulation { replicas: 1, engine: one_at_a_time, ..simulation });
    assert_eq!((figures.turns, ended(&figures)), (1.0, [1.0, 1.0, 0.0, 0.0]));
    assert!(figures.ttfb_mean_s < 1.0, "the second client waits for nobody: {figures:?}");

    // An answer that came before is whole.
    let figures = run_plans(vec![plan("a", vec![Step::Turn(Call { output: 5, ..leaves }), Step::Turn(call(2, 10))])]);
    assert_eq!((figures.turns, ended(&figures)), (1.0, [0.0, 1.0, 0.0, 0.0]));
}

#[test]
fn a_side_call_is_no_turn_and_hits_nothing() {
    let figures = run_plans(vec![plan("a", vec![Step::Turn(call(1, 10)), Step::Side(call(9, 10)), Step::Turn(call(2, 10))])]);
    assert_eq!((figures.turns, figures.stayed), (2.0, 100.0));
    let minutes = 5.0;
    assert_eq!(figures.output_tokens_per_minute, 30.0 / minutes);
}

#[test]
fn a_compacted_history_shares_the_system_prompt_alone() {
    let system = vec![Text { seed: 77, tokens: 1000 }];
    let with = |second: Step| SessionPlan { system: system.clone(), ..plan("a", vec![Step::Turn(call(1, 400)), second]) };
    let hits = |second: Step| run_plans(vec![with(second)]).prefix_hits;
    let (turn, compact) = (hits(Step::Turn(call(2, 10))), hits(Step::Compact(call(2, 10))));
    // Of 2 x 1,116 tokens and of 1,116 + 1,625.
    assert!((44.0..45.5).contains(&compact), "{compact}");
    assert!(turn > 54.0, "{turn}");
}

#[test]
fn a_call_that_fits_no_cache_is_refused_and_the_load_goes_on() {
    let engine = EngineConfig { kv_cache_tokens: 8_000, ..EngineConfig::default() };
    let simulation = simulation(PolicyName::Homing, 4, Workload::new(Kind::Long, 1));
    let figures = run(&Simulation { engine, ..simulation });
    assert!(figures.sessions_refused > 10.0 && figures.sessions_done > 10.0, "{figures:?}");
    assert_eq!(figures.refused_calls, figures.sessions_refused);
}
