//! The engine's settings.

use std::time::Duration;

/// Settings of an [`Engine`](super::Engine). Names are vLLM's where it has one; the defaults are a 4B model in bf16 on an RTX A4000, with
/// 5.1 GiB left for its KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens the KV cache holds; a last partial block is not used.
    pub kv_cache_tokens: usize,
    /// Tokens in a block, at least 1.
    pub block_size: usize,
    /// Requests that run at once, at least 1.
    pub max_num_seqs: usize,
    /// Tokens computed in one step, prefill and decode together, at least 1.
    pub max_num_batched_tokens: usize,
    /// Admit a waiting request only when all of it fits, not merely its first chunk (vLLM's `scheduler_reserve_full_isl`, on there too).
    pub reserve_full_sequence: bool,
    /// How long a step takes.
    pub cost: StepCost,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv_cache_tokens: 37_000,
            block_size: 16,
            max_num_seqs: 32,
            max_num_batched_tokens: 2048,
            reserve_full_sequence: true,
            cost: StepCost::default(),
        }
    }
}

impl EngineConfig {
    /// Blocks in the KV cache.
    pub fn blocks(&self) -> usize {
        self.kv_cache_tokens / self.block_size
    }

    /// Blocks that requests can use: vLLM keeps one, the null block, for itself.
    pub fn usable_blocks(&self) -> usize {
        self.blocks().saturating_sub(1)
    }

    /// Tokens that one request's prompt and output may have together.
    pub fn max_request_tokens(&self) -> usize {
        self.usable_blocks() * self.block_size
    }
}

/// How long a step takes: `base + prefill tokens * per_prefill_token + decoding sequences * per_decode_sequence + context tokens *
/// per_context_token`, where the context is that of every sequence in the step.
///
/// The defaults were found by calibration to a published measurement (docs/results/reference.md), and are plausible for that card and that
/// model: reading 8 GB of weights at 448 GB/s takes 18 ms, a step's overhead a few more; 147,456 bytes of KV cache a token (36 layers of 8
/// KV heads of 128, keys and values, 2 bytes) at 82 % of that bandwidth take 0.4 us; 8 GFLOP a prompt token in 250 us are 32 TFLOP/s, 42 %
/// of the card's peak. Then a lone sequence of 11,000 tokens decodes in 27.4 ms a token, and prompts are read at 3,700 tokens/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    /// Every step.
    pub base: Duration,
    /// Each prompt token computed.
    pub per_prefill_token: Duration,
    /// Each sequence that decodes.
    pub per_decode_sequence: Duration,
    /// Each token of context that is read.
    pub per_context_token: Duration,
}

impl Default for StepCost {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(22),
            per_prefill_token: Duration::from_micros(250),
            per_decode_sequence: Duration::from_micros(1_000),
            per_context_token: Duration::from_nanos(400),
        }
    }
}

/// What one step computes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepWork {
    pub(super) prefill_tokens: usize,
    pub(super) decode_sequences: usize,
    pub(super) context_tokens: usize,
}

impl StepCost {
    pub(super) fn of(&self, work: StepWork) -> Duration {
        let times = |each: Duration, count: usize| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        self.base
            + times(self.per_prefill_token, work.prefill_tokens)
            + times(self.per_decode_sequence, work.decode_sequences)
            + times(self.per_context_token, work.context_tokens)
    }
}
