//! Whatever replicas and Envoys say.

use std::time::Duration;

use homing_corpus::{mutated, seeds};
use homing_routing::control::Control;
use homing_routing::host::MemoryHost;
use proptest::prelude::*;

use super::*;
use crate::console::Live;
use crate::exposition::samples;
use crate::history::History;
use crate::status::Status;
use crate::sync::read_answer;
use crate::telemetry::Telemetry;
use crate::vllm::read_engines;

fn fleet() -> Arc<Fleet> {
    let text = "envoys: [{url: 'http://10.0.0.8:9901'}, {url: 'http://10.0.0.9:9901'}]\n\
                pools: [{cluster: a, replicas: [{address: '10.0.0.1:80'}, {address: '10.0.0.2:80', drain: true}]}]";
    let fleet = Fleet::new(&Config::parse(text, "test").expect("a configuration"));
    fleet.pools[0].reconcile();
    Arc::new(fleet)
}

proptest! {
    #[test]
    fn any_metrics_and_answers_make_a_snapshot_that_the_filter_takes_and_a_status_that_can_be_shown(
        metrics in prop::collection::vec(mutated(seeds("metrics")), 2),
        answers in prop::collection::vec(mutated(seeds("answer")), 2),
    ) {
        let fleet = fleet();
        let history = Arc::new(History::default());
        let live = Arc::new(Live::new(Arc::clone(&fleet), Arc::clone(&history)));
        let telemetry = Telemetry::new(Arc::clone(&fleet), live);
        let mut now = Instant::now();
        for (sequence, (text, body)) in metrics.iter().zip(&answers).enumerate() {
            now += Duration::from_secs(1);
            for endpoint in fleet.pools[0].endpoints() {
                lock(&endpoint).read(now, &read_engines(text));
            }
            for envoy in fleet.envoys() {
                let mut exchanges = envoy.exchanges();
                if let Ok(answer) = read_answer(body) {
                    (exchanges.answer, exchanges.answered_at) = (Some(answer), Some(now));
                }
            }
            for envoy in fleet.envoys() {
                let snapshot = fleet.snapshot(&envoy, sequence as u64, now);
                let taken = Control::new(MemoryHost::new(now_ms())).exchange(&serde_json::to_vec(&snapshot).expect("JSON"));
                prop_assert!(taken.is_ok(), "{:?}: {:?}", taken, snapshot);
            }
            let status = Status::of(&fleet, &history, now);
            history.record(&status, now);
            for replica in status.pools.iter().flat_map(|pool| &pool.replicas) {
                prop_assert!(replica.report.prefix_hit_rate.is_none_or(|rate| (0.0..=1.0).contains(&rate)), "{:?}", replica.report);
            }
            prop_assert!(serde_json::to_string(&status).is_ok());
        }
        let own = telemetry.text().expect("metrics");
        prop_assert!(samples(own.as_bytes()).all(|sample| sample.parts().is_some()), "{}", own);
    }
}
