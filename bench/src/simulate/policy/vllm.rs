//! vLLM's own balancer in front of data-parallel ranks.

use std::collections::HashMap;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Policy, Routed, View};
use crate::balancer::{Balancer, BalancerKind, REFRESH};
use crate::engine::Gauges;

/// As many API servers as ranks, which is vLLM's default since 0.15, each with a [`Balancer`]; the kernel gives each connection to one of
/// them by chance.
#[derive(Debug)]
pub(super) struct Vllm {
    servers: Vec<Balancer>,
    /// Which server took a request, and the rank it chose.
    taken: HashMap<u64, (usize, usize)>,
    rng: ChaCha8Rng,
}

impl Vllm {
    pub(super) fn new(kind: BalancerKind, ranks: usize, seed: u64) -> Self {
        let servers = (0..ranks).map(|server| Balancer::of_server(kind, ranks, server, ranks)).collect();
        Self { servers, taken: HashMap::new(), rng: ChaCha8Rng::seed_from_u64(seed) }
    }
}

impl Policy for Vllm {
    fn choose(&mut self, request: &Routed<'_>, _view: &View<'_>) -> Option<usize> {
        let server = self.rng.random_range(0..self.servers.len());
        let rank = self.servers[server].choose();
        self.taken.insert(request.id, (server, rank));
        Some(rank)
    }

    fn ended(&mut self, id: u64, _view: &View<'_>) {
        if let Some((server, rank)) = self.taken.remove(&id) {
            self.servers[server].ended(rank);
        }
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(REFRESH)
    }

    fn looked(&mut self, engines: &[Gauges], _view: &View<'_>) {
        self.servers.iter_mut().for_each(|server| server.refresh(engines));
    }
}
