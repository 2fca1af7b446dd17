//! Consistent hashing of the session's name, by rendezvous (Thaler and Ravishankar, 1998): each session has an order of all replicas of its
//! own, and goes to the first. It spreads sessions as a ring with very many points does.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash as _, Hasher};

use super::{Policy, Routed, View};

/// In-flight requests that a replica may have, in per cent of the mean: KubeAI's default (`meanLoadFactor`). Envoy has none and calls 120
/// to 200 typical (`hash_balance_factor`).
const BOUND_PERCENT: usize = 125;

/// Always the session's first replica, as Envoy's `RING_HASH` and `MAGLEV`.
#[derive(Debug)]
pub(super) struct Hash;

impl Policy for Hash {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        Some(order(request.session, view.in_flight.len())[0])
    }
}

/// The first of the session's replicas that has room: fewer than `ceil(1.25 * (requests in flight + 1) / replicas)`. Consistent hashing
/// with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016), as Envoy's `hash_balance_factor` and KubeAI's `PrefixHash`.
#[derive(Debug)]
pub(super) struct BoundedHash;

impl Policy for BoundedHash {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        let bound = bound(view.in_flight);
        let order = order(request.session, view.in_flight.len());
        // One always has room: not all can have more than the mean.
        Some(order.iter().copied().find(|replica| view.in_flight[*replica] < bound).unwrap_or(order[0]))
    }
}

/// The most in flight that a replica may have with one request more.
pub(super) fn bound(in_flight: &[u32]) -> u32 {
    let after: u32 = in_flight.iter().sum::<u32>() + 1;
    (after as usize * BOUND_PERCENT).div_ceil(100 * in_flight.len()) as u32
}

fn order(session: u64, replicas: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..replicas).collect();
    order.sort_by_cached_key(|replica| {
        let mut hasher = DefaultHasher::new();
        (session, replica).hash(&mut hasher);
        Reverse(hasher.finish())
    });
    order
}
