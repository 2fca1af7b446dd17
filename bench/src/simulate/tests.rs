//! A simulation is a measurement: the same every time, and right where it can be worked out.

use std::time::Duration;

use super::*;
use crate::engine::EngineConfig;

fn simulation(policy: PolicyName, sessions: usize) -> Simulation {
    Simulation {
        replicas: 4,
        engine: EngineConfig::default(),
        sessions,
        workload: Workload::new(WorkloadName::Reference, 1),
        policy,
        homing: HomingOptions::default(),
        duration: Duration::from_secs(300),
    }
}

#[test]
fn it_is_the_same_every_time() {
    for policy in [PolicyName::LeastRequest, PolicyName::Homing] {
        let [one, two] = [(); 2].map(|()| serde_json::to_string(&run(&simulation(policy, 6))).expect("JSON"));
        assert_eq!(one, two);
    }
}

#[test]
fn four_sessions_on_four_replicas_each_have_one_to_themselves() {
    let report = run(&simulation(PolicyName::Homing, 4));
    assert_eq!(report.stayed, 100.0);
    assert_eq!(report.preemptions, 0);
    // A later turn computes about 420 tokens: 24 ms + 420 x 0.29 ms and what the context costs.
    assert!((0.14..0.22).contains(&report.ttfb_p50_s), "{report}");
    assert!(report.prefix_hits > 83.0, "{report}");
}

#[test]
fn sending_each_turn_elsewhere_costs_hits_and_time() {
    let (spread, homing) = (run(&simulation(PolicyName::RoundRobin, 8)), run(&simulation(PolicyName::Homing, 8)));
    assert!(spread.prefix_hits < 70.0 && homing.prefix_hits > 83.0, "{spread}\n{homing}");
    assert!(spread.ttfb_p50_s > 3.0 * homing.ttfb_p50_s, "{spread}\n{homing}");
    assert!(spread.output_tokens_per_minute < homing.output_tokens_per_minute, "{spread}\n{homing}");
}
