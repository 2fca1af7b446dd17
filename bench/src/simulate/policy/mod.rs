//! Where each request goes: Homing's own routing code, and others beside it, each as its source describes it.
//!
//! A policy knows what the real one knows: the request, what it has itself in flight, and the engines' metrics at the age at which the real
//! one has them. None sees an engine as it is now.

mod hash;
mod homing;
mod prefix;
mod scorers;
mod spread;
mod sticky;
#[cfg(test)]
mod tests;
mod vllm;

use std::time::Duration;

use clap::ValueEnum;

use crate::engine::{Counters, EngineConfig, Gauges};
pub use homing::HomingOptions;

/// Policies that can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// One replica after the other.
    RoundRobin,
    /// Any replica, by chance.
    Random,
    /// Envoy's `least_request`: the one with fewer requests in flight of two taken at random.
    LeastRequest,
    /// vLLM's own balancer of ranks, 0.11 to 0.26: the least 4 x waiting + running, 100 ms old.
    Vllm,
    /// vLLM's own balancer of ranks since 0.27: in flight or running and waiting, and more with a queue before a full cache.
    #[value(name = "vllm-0.27")]
    Vllm027,
    /// Consistent hashing of the session: always the same replica.
    Hash,
    /// Consistent hashing with bounded loads: no replica has more than 125 % of the mean in flight.
    BoundedHash,
    /// Sticky, and to the least loaded replica while more than a quarter of `max_num_seqs` run at home: no margin, no memory.
    StickySpill,
    /// Weighted scorers of the Gateway API inference extension and llm-d, by default: queue 2, KV use 2, prefix 3.
    LlmD,
    /// Higress' endpoint picker, by default: queue 2, KV use 2, prefix 3, own requests in flight 1.
    Higress,
    /// Homing's own routing code.
    Homing,
}

/// The fleet, as far as policies are configured with it.
#[derive(Clone, Copy, Debug)]
pub struct Fleet {
    /// Replicas, at least 1.
    pub replicas: usize,
    /// Requests that run at once in each.
    pub max_num_seqs: usize,
    /// Tokens in a block of their KV caches.
    pub block_size: usize,
    /// Blocks in each KV cache.
    pub blocks: usize,
}

/// A request that is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// The request's number.
    pub id: u64,
    /// Stands for the session's name.
    pub session: u64,
    /// The session that started this one, if it is a subagent's.
    pub parent: Option<u64>,
    /// Its prompt.
    pub prompt: &'a [u32],
    /// Where each message ends in the prompt, ascending.
    pub messages: &'a [usize],
    /// The size of its body.
    pub bytes: u32,
}

/// What every proxy knows at once.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Since the start.
    pub now: Duration,
    /// Requests sent to each replica that have not ended.
    pub in_flight: &'a [u32],
}

/// Chooses a replica for each request.
pub trait Policy {
    /// The replica that a request goes to; None while it is held.
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> Option<usize>;

    /// Those of the held requests that go now, and where.
    fn released(&mut self, _view: &View<'_>) -> Vec<(u64, usize)> {
        Vec::new()
    }

    /// A request has ended, however it ended: served, refused, or given up by its client.
    fn ended(&mut self, _id: u64, _view: &View<'_>) {}

    /// How often it looks at the engines' metrics; None if it never does.
    fn looks_every(&self) -> Option<Duration> {
        None
    }

    /// What all engines have counted together, at its look.
    fn counted(&mut self, _counters: &Counters) {}

    /// The engines' metrics, of each replica, as they are at its look.
    fn looked(&mut self, _engines: &[Gauges], _view: &View<'_>) {}
}

impl Fleet {
    /// `replicas` of these engines.
    pub fn new(replicas: usize, engine: &EngineConfig) -> Self {
        Self { replicas, max_num_seqs: engine.max_num_seqs, block_size: engine.block_size, blocks: engine.blocks() }
    }
}

impl PolicyName {
    /// The policy at its start. What it leaves to chance depends on the seed alone.
    pub fn policy(self, fleet: &Fleet, homing: HomingOptions, seed: u64) -> Box<dyn Policy> {
        use crate::balancer::BalancerKind;
        match self {
            Self::RoundRobin => Box::new(spread::RoundRobin::default()),
            Self::Random => Box::new(spread::Random::new(seed)),
            Self::LeastRequest => Box::new(spread::LeastRequest::new(seed)),
            Self::Vllm => Box::new(vllm::Vllm::new(BalancerKind::Vllm026, fleet.replicas, seed)),
            Self::Vllm027 => Box::new(vllm::Vllm::new(BalancerKind::Vllm027, fleet.replicas, seed)),
            Self::Hash => Box::new(hash::Hash),
            Self::BoundedHash => Box::new(hash::BoundedHash),
            Self::StickySpill => Box::new(sticky::StickySpill::new(fleet)),
            Self::LlmD => Box::new(scorers::Scorers::llm_d(fleet, seed)),
            Self::Higress => Box::new(scorers::Scorers::higress(fleet, seed)),
            Self::Homing => Box::new(homing::Homing::new(fleet, homing)),
        }
    }

    /// As it is written on the command line.
    pub fn as_str(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The replica with the least, found from `from` on: ties go round if `from` does.
fn least<K: Ord>(replicas: usize, from: usize, key: impl Fn(usize) -> K) -> usize {
    (0..replicas).map(|offset| (from + offset) % replicas).min_by_key(|replica| key(*replica)).unwrap_or(0)
}
