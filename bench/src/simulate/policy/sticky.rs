//! The plain rule: stay at home while few run there.

use std::collections::HashMap;
use std::time::Duration;

use super::{Fleet, Policy, Routed, View, least};
use crate::engine::Gauges;

/// Its age of metrics is not published; this is Homing's, so that the two differ by their rules alone.
const LOOK: Duration = Duration::from_millis(250);

/// Session affinity with a spill threshold, the rule of the published measurement that the reference workload is taken from: a new session
/// goes to the replica with the fewest requests in flight; later turns go home, but while more than a quarter of `max_num_seqs` run there,
/// to the replica with the fewest in flight. The home stays.
#[derive(Debug)]
pub(super) struct StickySpill {
    homes: HashMap<u64, usize>,
    threshold: usize,
    running: Vec<usize>,
    next: usize,
}

impl StickySpill {
    pub(super) fn new(fleet: &Fleet) -> Self {
        Self { homes: HashMap::new(), threshold: (fleet.max_num_seqs / 4).max(1), running: vec![0; fleet.replicas], next: 0 }
    }
}

impl Policy for StickySpill {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> usize {
        self.next += 1;
        let least = least(view.in_flight.len(), self.next, |replica| view.in_flight[replica]);
        let home = *self.homes.entry(request.session).or_insert(least);
        if self.running[home] > self.threshold { least } else { home }
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(LOOK)
    }

    fn looked(&mut self, engines: &[Gauges], _view: &View<'_>) {
        self.running = engines.iter().map(|engine| engine.running).collect();
    }
}
