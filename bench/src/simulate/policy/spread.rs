//! Policies that know nothing of conversations.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Policy, Routed, View};

/// One after the other, as Envoy's `ROUND_ROBIN` with equal weights.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    next: usize,
}

impl Policy for RoundRobin {
    fn choose(&mut self, _request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        let chosen = self.next % view.in_flight.len();
        self.next = chosen + 1;
        Some(chosen)
    }
}

/// Any, as Envoy's `RANDOM`.
#[derive(Debug)]
pub(super) struct Random(ChaCha8Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Policy for Random {
    fn choose(&mut self, _request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        Some(self.0.random_range(0..view.in_flight.len()))
    }
}

/// Envoy's `LEAST_REQUEST` with its default of two choices and equal weights: two replicas at random, which may be the same one, and of
/// them the one with fewer requests in flight.
#[derive(Debug)]
pub(super) struct LeastRequest(ChaCha8Rng);

impl LeastRequest {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Policy for LeastRequest {
    fn choose(&mut self, _request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        let [one, two] = [0; 2].map(|_| self.0.random_range(0..view.in_flight.len()));
        Some(if view.in_flight[two] < view.in_flight[one] { two } else { one })
    }
}
