//! Weighted scorers: each gives every replica 0 to 1, and the highest weighted sum wins, ties by chance.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::prefix::{Piece, PrefixIndex, pieces};
use super::{Fleet, Policy, Routed, View};
use crate::engine::Gauges;

/// What each scorer weighs.
#[derive(Clone, Copy, Debug)]
struct Weights {
    /// Requests waiting: 1 for the fewest, 0 for the most.
    queue: f64,
    /// The share of the KV cache that is free.
    kv_use: f64,
    /// What of the prompt was sent there before.
    prefix: f64,
    /// The router's own requests in flight: 1 for the fewest, 0 for the most.
    in_flight: f64,
}

/// How prompts are compared.
#[derive(Clone, Copy, Debug)]
enum Prefixes {
    /// Blocks of so many tokens, at most so many blocks; the score is the share that matches.
    Blocks { tokens: usize, most: usize },
    /// Messages, long ones cut; the score is three quarters the share of tokens that match, one quarter how many they are.
    Messages { most_tokens: usize, most: usize },
}

/// A router with scorers.
#[derive(Debug)]
pub(super) struct Scorers {
    weights: Weights,
    prefixes: Prefixes,
    looks_every: Duration,
    block_size: usize,
    engines: Vec<Gauges>,
    sent: Vec<PrefixIndex>,
    rng: ChaCha8Rng,
}

impl Scorers {
    /// llm-d and the Gateway API inference extension as installed. Weights: `config/charts/inferencepool/templates/epp-config.yaml` of
    /// kubernetes-sigs/gateway-api-inference-extension (queue-scorer 2, kv-cache-utilization-scorer 2, prefix-cache-scorer 3). Metrics every
    /// 50 ms (`--refresh-metrics-interval`). Prefixes: blocks of the engine's size, at most 256 of a prompt (`maxPrefixBlocksToMatch`), and
    /// as many for each replica as its KV cache has (`autoTune`).
    pub(super) fn llm_d(fleet: &Fleet, seed: u64) -> Self {
        let weights = Weights { queue: 2.0, kv_use: 2.0, prefix: 3.0, in_flight: 0.0 };
        let prefixes = Prefixes::Blocks { tokens: fleet.block_size, most: 256 };
        Self::new(weights, prefixes, Duration::from_millis(50), fleet, fleet.blocks, seed)
    }

    /// Higress' `ai-endpoint-picker` as its README describes it (alibaba/higress, `plugins/wasm-go/extensions/ai-endpoint-picker`): weights
    /// queue 2, kvCache 2, prefixCache 3, inflight 1; pieces of at most 1,024 tokens that end with their message, at most 32; as many blocks
    /// for each replica as its KV cache has, up to 31,250. Its metrics come with Envoy's health checks, here every 2 s as in its published
    /// measurement.
    pub(super) fn higress(fleet: &Fleet, seed: u64) -> Self {
        let weights = Weights { queue: 2.0, kv_use: 2.0, prefix: 3.0, in_flight: 1.0 };
        let prefixes = Prefixes::Messages { most_tokens: 1024, most: 32 };
        Self::new(weights, prefixes, Duration::from_secs(2), fleet, fleet.blocks.min(31_250), seed)
    }

    fn new(weights: Weights, prefixes: Prefixes, looks_every: Duration, fleet: &Fleet, blocks: usize, seed: u64) -> Self {
        Self {
            weights,
            prefixes,
            looks_every,
            block_size: fleet.block_size,
            engines: vec![Gauges::default(); fleet.replicas],
            sent: (0..fleet.replicas).map(|_| PrefixIndex::new(blocks)).collect(),
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    fn score(&self, replica: usize, prompt: &[Piece], view: &View<'_>) -> f64 {
        let waiting = |replica: usize| self.engines[replica].waiting;
        let in_flight = |replica: usize| view.in_flight[replica] as usize;
        let matched = self.sent[replica].matched(prompt);
        self.weights.queue * self.fewest(waiting, replica)
            + self.weights.kv_use * (1.0 - self.engines[replica].kv_cache_usage)
            + self.weights.prefix * self.prefixes.score(prompt, matched)
            + self.weights.in_flight * self.fewest(in_flight, replica)
    }

    /// 1 for the replica with the fewest, 0 for the one with the most, 1 if all have the same.
    fn fewest(&self, count: impl Fn(usize) -> usize, replica: usize) -> f64 {
        let counts = || (0..self.engines.len()).map(&count);
        let (fewest, most) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
        if fewest == most { 1.0 } else { (most - count(replica)) as f64 / (most - fewest) as f64 }
    }
}

impl Prefixes {
    fn cut(self, request: &Routed<'_>) -> Vec<Piece> {
        match self {
            Self::Blocks { tokens, most } => {
                let whole = (request.prompt.len() / tokens).min(most);
                pieces(request.prompt, (1..=whole).map(|block| block * tokens))
            }
            Self::Messages { most_tokens, most } => {
                let mut from = 0;
                let cut = |end: &usize| {
                    let begin = std::mem::replace(&mut from, *end);
                    let cuts = (begin + most_tokens..*end).step_by(most_tokens);
                    cuts.chain([*end]).collect::<Vec<_>>()
                };
                let ends: Vec<_> = request.messages.iter().flat_map(cut).take(most).collect();
                pieces(request.prompt, ends)
            }
        }
    }

    fn score(self, prompt: &[Piece], matched: usize) -> f64 {
        if matched == 0 {
            return 0.0;
        }
        match self {
            Self::Blocks { .. } => matched as f64 / prompt.len() as f64,
            Self::Messages { .. } => {
                let tokens = |pieces: &[Piece]| pieces.iter().map(|piece| piece.tokens).sum::<usize>() as f64;
                let found = tokens(&prompt[..matched]);
                0.75 * found / tokens(prompt) + 0.25 * (found / 8192.0).min(1.0).powi(2)
            }
        }
    }
}

impl Policy for Scorers {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        let prompt = self.prefixes.cut(request);
        let scores: Vec<_> = (0..self.engines.len()).map(|replica| self.score(replica, &prompt, view)).collect();
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let tied: Vec<_> = (0..scores.len()).filter(|replica| scores[*replica] == best).collect();
        let chosen = tied[self.rng.random_range(0..tied.len())];
        let block_size = self.block_size;
        self.sent[chosen].sent(&prompt, |piece| piece.tokens.div_ceil(block_size));
        Some(chosen)
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(self.looks_every)
    }

    fn looked(&mut self, engines: &[Gauges], _view: &View<'_>) {
        self.engines.copy_from_slice(engines);
    }
}
