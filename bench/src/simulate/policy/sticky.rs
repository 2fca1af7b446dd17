//! The plain rule: stay at home while few run there.

use std::collections::HashMap;
use std::time::Duration;

use super::{Fleet, Policy, Routed, View, least};
use crate::engine::Gauges;

/// How often it looks at the engines' metrics. Not published; with it the model's turns stay about as often as was published.
const LOOK: Duration = Duration::from_millis(500);

/// Session affinity with a spill threshold, the rule of the published measurement that the reference workload is taken from: a new session
/// goes to the least loaded replica; later turns go home, but while the load there is above a quarter of `max_num_seqs`, to the least
/// loaded one. The home stays. Load is what the metrics said at the last look: running and waiting, for with the KV caches of that
/// measurement no engine ever runs more than five of its requests, and yet turns were sent away.
#[derive(Debug)]
pub(super) struct StickySpill {
    homes: HashMap<u64, usize>,
    threshold: usize,
    load: Vec<usize>,
    next: usize,
}

impl StickySpill {
    pub(super) fn new(fleet: &Fleet) -> Self {
        Self { homes: HashMap::new(), threshold: (fleet.max_num_seqs / 4).max(1), load: vec![0; fleet.replicas], next: 0 }
    }
}

impl Policy for StickySpill {
    fn choose(&mut self, request: &Routed<'_>, _view: &View<'_>) -> Option<usize> {
        self.next += 1;
        let least = least(self.load.len(), self.next, |replica| self.load[replica]);
        let home = *self.homes.entry(request.session).or_insert(least);
        Some(if self.load[home] > self.threshold { least } else { home })
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(LOOK)
    }

    fn looked(&mut self, engines: &[Gauges], _view: &View<'_>) {
        self.load = engines.iter().map(|engine| engine.running + engine.waiting).collect();
    }
}
