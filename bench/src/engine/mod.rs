//! A model of one vLLM engine, step by step: what a request waits for, what its prompt finds in the prefix cache, and how long each step
//! takes.
//!
//! It is pure: no I/O and no clock. Whoever drives it (a server in real time, a simulator in virtual time) submits and aborts requests at
//! any moment, calls [`Engine::start_step`] to learn how long the next step takes, and [`Engine::finish_step`] when that time has passed.
//! Requests submitted during a step are scheduled with the next one, as in vLLM.
//!
//! Modelled after vLLM's V1 scheduler and KV cache manager (`vllm/v1/core`, 0.26): first come first served, chunked prefill, automatic
//! prefix caching, preemption by recompute. Left out: speculative decoding, LoRA, several KV cache groups, KV connectors, priorities, and
//! asynchronous scheduling (each step starts when the one before has ended).

mod blocks;
mod config;
mod request;
mod scheduler;
#[cfg(test)]
mod tests;

use std::ops::{Add, Sub};

pub use config::{EngineConfig, StepCost};
pub use request::{Event, FinishReason, Rejected, Request, RequestId};
pub use scheduler::Engine;

/// What an engine has counted since its start; token counts unless said otherwise. Named after vLLM's metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens looked up in the prefix cache. A request that is looked up and cannot be admitted is counted again at its next try; one that
    /// was preempted is not counted again.
    pub prefix_cache_queries: u64,
    /// Tokens of those lookups that were found.
    pub prefix_cache_hits: u64,
    /// Prompt tokens of requests that have reached their first token, computed here. Counted once a request.
    pub prompt_tokens_computed: u64,
    /// Prompt tokens of requests that have reached their first token, found in the prefix cache. Counted once a request.
    pub prompt_tokens_cached: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Requests put back into the queue because the KV cache was full.
    pub preemptions: u64,
    /// Requests that ended with [`FinishReason::Stop`].
    pub finished_stop: u64,
    /// Requests that ended with [`FinishReason::Length`].
    pub finished_length: u64,
    /// Requests that were aborted. vLLM shows them in no metric.
    pub aborted: u64,
}

impl Counters {
    /// Combines each count with its counterpart.
    fn zip(self, other: Self, with: fn(u64, u64) -> u64) -> Self {
        Self {
            prefix_cache_queries: with(self.prefix_cache_queries, other.prefix_cache_queries),
            prefix_cache_hits: with(self.prefix_cache_hits, other.prefix_cache_hits),
            prompt_tokens_computed: with(self.prompt_tokens_computed, other.prompt_tokens_computed),
            prompt_tokens_cached: with(self.prompt_tokens_cached, other.prompt_tokens_cached),
            generation_tokens: with(self.generation_tokens, other.generation_tokens),
            preemptions: with(self.preemptions, other.preemptions),
            finished_stop: with(self.finished_stop, other.finished_stop),
            finished_length: with(self.finished_length, other.finished_length),
            aborted: with(self.aborted, other.aborted),
        }
    }
}

impl Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, |one, other| one + other)
    }
}

/// What has been counted since `earlier`.
impl Sub for Counters {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        self.zip(earlier, |now, earlier| now - earlier)
    }
}

/// An engine's state at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Requests in the running batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Share of the KV cache's blocks held by running requests, 0 to 1. Blocks that are only cached count as free.
    pub kv_cache_usage: f64,
}
