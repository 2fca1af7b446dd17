//! What vLLM says of its engines in `/metrics`.
//!
//! The names are vLLM's (`vllm/v1/metrics/loggers.py`), read from 0.8 to 0.32. They have been renamed before, so an old name is
//! read as the new one, and a metric that is absent is unknown rather than an error: an engine writes its gauges only from its
//! first step on.

mod missing;

use std::collections::BTreeMap;

pub use self::missing::Missing;
use crate::exposition::{Parts, samples};

/// The most engines that are read from one endpoint; further ones are left out.
pub const MAX_ENGINES: usize = 256;

/// The greatest count that is taken for one, of tokens or anything else: the last up to which a float and JavaScript tell one from the next,
/// and small enough that those of a whole pool add up.
const MAX_COUNT: u64 = 1 << 53;

/// What one engine reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// Requests in the running batch (`num_requests_running`).
    pub running: u32,
    /// Requests that wait for a place in it (`num_requests_waiting`).
    pub waiting: u32,
    /// The share of the KV cache's blocks that running requests hold, 0 to 1 (`kv_cache_usage_perc`). Blocks that are cached but
    /// free count as free.
    pub kv_usage: f32,
    /// The size of the KV cache in tokens: `kv_cache_size_tokens` of `cache_config_info`, else its `num_gpu_blocks` times
    /// `block_size`; 0 when unknown.
    pub cache_tokens: u64,
    /// Whether the engine sleeps (`engine_sleep_state`): it then takes requests and never answers them.
    pub asleep: bool,
    /// Prompt tokens since the engine started (`prompt_tokens_total`).
    pub prompt_tokens: u64,
    /// Generated tokens since the engine started (`generation_tokens_total`).
    pub generation_tokens: u64,
    /// Requests put out of the running batch for want of KV cache, since the engine started (`num_preemptions_total`).
    pub preemptions: u64,
    /// Prompt tokens and those of them found in the cache, if the engine reports any such counters.
    pub prompt_cache: Option<PromptCache>,
    /// What it does not report although every version from 0.8.5 on does.
    pub missing: Missing,
}

/// Two counters whose increases give the prefix hit rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptCache {
    /// Which of vLLM's counters they are; counters of different sources cannot be compared.
    pub source: PromptCacheSource,
    /// All tokens that were looked up.
    pub tokens: u64,
    /// Those of them that were found.
    pub hits: u64,
}

/// The counters a prefix hit rate comes from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptCacheSource {
    /// `prompt_tokens_by_source_total` with `local_cache_hit` and `external_kv_transfer`, since vLLM 0.16.
    BySource,
    /// `prompt_tokens_cached_total`, since vLLM 0.16.
    Cached,
    /// `prefix_cache_queries_total` and `_hits_total`. Under KV pressure these count a waiting request again at every attempt to
    /// schedule it, so they only serve where nothing else is reported.
    PrefixCache,
}

/// The engines of one endpoint by their `engine` label.
pub type Engines = BTreeMap<u32, EngineMetrics>;

impl EngineMetrics {
    /// Whether the engine must have restarted since `before`: a counter fell. One that is not reported now did not fall.
    pub fn restarted_since(&self, before: &Self) -> bool {
        let fell = |counter: Missing, now: u64, before: u64| now < before && !self.missing.contains(counter);
        fell(Missing::PROMPT_TOKENS, self.prompt_tokens, before.prompt_tokens)
            || fell(Missing::GENERATION_TOKENS, self.generation_tokens, before.generation_tokens)
            || fell(Missing::PREEMPTIONS, self.preemptions, before.preemptions)
    }
}

/// Reads the engines out of the text of `/metrics`; empty when it is not vLLM's.
///
/// An engine without an `engine` label is engine 0.
pub fn read_engines(text: &[u8]) -> Engines {
    let mut engines = BTreeMap::<u32, Reading>::new();
    for sample in samples(text) {
        let Some(field) = sample.name.strip_prefix(b"vllm:").and_then(Field::of) else { continue };
        let Some(parts) = sample.parts() else { continue };
        let Some(engine) = engine_label(&parts) else { continue };
        if engines.len() < MAX_ENGINES || engines.contains_key(&engine) {
            engines.entry(engine).or_default().add(field, &parts);
        }
    }
    engines.into_iter().map(|(engine, reading)| (engine, reading.finish())).collect()
}

/// `None` for a label that is no number.
fn engine_label(parts: &Parts<'_>) -> Option<u32> {
    let Some(label) = parts.label(b"engine") else { return Some(0) };
    std::str::from_utf8(label).ok()?.parse().ok()
}

/// The metrics that are read.
#[derive(Clone, Copy)]
enum Field {
    Running,
    Waiting,
    KvUsage,
    PrefixQueries,
    PrefixHits,
    PromptTokens,
    PromptTokensBySource,
    PromptTokensCached,
    GenerationTokens,
    Preemptions,
    SleepState,
    CacheConfig,
}

impl Field {
    fn of(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"num_requests_running" => Self::Running,
            b"num_requests_waiting" => Self::Waiting,
            b"kv_cache_usage_perc" | b"gpu_cache_usage_perc" => Self::KvUsage,
            b"prefix_cache_queries_total" | b"gpu_prefix_cache_queries_total" => Self::PrefixQueries,
            b"prefix_cache_hits_total" | b"gpu_prefix_cache_hits_total" => Self::PrefixHits,
            b"prompt_tokens_total" => Self::PromptTokens,
            b"prompt_tokens_by_source_total" => Self::PromptTokensBySource,
            b"prompt_tokens_cached_total" => Self::PromptTokensCached,
            b"generation_tokens_total" => Self::GenerationTokens,
            b"num_preemptions_total" => Self::Preemptions,
            b"engine_sleep_state" => Self::SleepState,
            b"cache_config_info" => Self::CacheConfig,
            _ => return None,
        })
    }
}

impl Field {
    /// What its being there says is not missing. The others count only by their values, or need not be there.
    fn missing(self) -> Missing {
        match self {
            Self::Running => Missing::RUNNING,
            Self::Waiting => Missing::WAITING,
            Self::KvUsage => Missing::KV_USAGE,
            Self::PromptTokens => Missing::PROMPT_TOKENS,
            Self::GenerationTokens => Missing::GENERATION_TOKENS,
            Self::Preemptions => Missing::PREEMPTIONS,
            Self::PrefixQueries | Self::PrefixHits | Self::PromptTokensBySource | Self::PromptTokensCached => Missing::NONE,
            Self::SleepState | Self::CacheConfig => Missing::NONE,
        }
    }
}

/// What was read of one engine so far.
#[derive(Default)]
struct Reading {
    metrics: EngineMetrics,
    reported: Missing,
    prompt_tokens: Option<u64>,
    local_hits: Option<u64>,
    external_hits: Option<u64>,
    cached: Option<u64>,
    prefix_queries: Option<u64>,
    prefix_hits: Option<u64>,
    awake: Option<bool>,
    sleeping: bool,
}

impl Reading {
    fn add(&mut self, field: Field, parts: &Parts<'_>) {
        let value = parts.value;
        let on = value > 0.5;
        self.reported |= field.missing();
        match field {
            Field::Running => self.metrics.running = whole(value).try_into().unwrap_or(u32::MAX),
            Field::Waiting => self.metrics.waiting = whole(value).try_into().unwrap_or(u32::MAX),
            // A NaN is turned into 0: `clamp` would keep it.
            Field::KvUsage => self.metrics.kv_usage = if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) as f32 },
            Field::PrefixQueries => self.prefix_queries = counter(value),
            Field::PrefixHits => self.prefix_hits = counter(value),
            Field::PromptTokens => self.prompt_tokens = counter(value),
            Field::PromptTokensBySource => match parts.label(b"source") {
                Some(b"local_cache_hit") => self.local_hits = counter(value),
                Some(b"external_kv_transfer") => self.external_hits = counter(value),
                _ => {}
            },
            Field::PromptTokensCached => self.cached = counter(value),
            Field::GenerationTokens => self.metrics.generation_tokens = whole(value),
            Field::Preemptions => self.metrics.preemptions = whole(value),
            Field::SleepState => match parts.label(b"sleep_state") {
                Some(b"awake") => self.awake = Some(on),
                Some(_) => self.sleeping |= on,
                None => {}
            },
            Field::CacheConfig => {
                let number = |name: &[u8]| std::str::from_utf8(parts.label(name)?).ok()?.parse::<u64>().ok();
                let blocks = || number(b"num_gpu_blocks")?.checked_mul(number(b"block_size")?);
                self.metrics.cache_tokens = number(b"kv_cache_size_tokens").or_else(blocks).unwrap_or(0).min(MAX_COUNT);
            }
        }
    }

    fn finish(self) -> EngineMetrics {
        let pair = |source, tokens: Option<u64>, hits: Option<u64>| Some(PromptCache { source, tokens: tokens?, hits: hits? });
        let by_source = match (self.local_hits, self.external_hits) {
            (None, None) => None,
            (local, external) => Some(local.unwrap_or(0).saturating_add(external.unwrap_or(0)).min(MAX_COUNT)),
        };
        let prompt_cache = pair(PromptCacheSource::BySource, self.prompt_tokens, by_source)
            .or_else(|| pair(PromptCacheSource::Cached, self.prompt_tokens, self.cached))
            .or_else(|| pair(PromptCacheSource::PrefixCache, self.prefix_queries, self.prefix_hits));
        let has_worked = self.prompt_tokens.is_some_and(|tokens| tokens > 0) || self.metrics.generation_tokens > 0;
        let mut reported = self.reported;
        if prompt_cache.is_some() {
            reported |= Missing::PREFIX_CACHE;
        }
        if self.metrics.cache_tokens > 0 {
            reported |= Missing::CACHE_SIZE;
        }
        EngineMetrics {
            missing: Missing::expected(has_worked).without(reported),
            asleep: self.awake.map_or(self.sleeping, |awake| !awake),
            prompt_tokens: self.prompt_tokens.unwrap_or(0),
            prompt_cache,
            ..self.metrics
        }
    }
}

/// A count; a negative one and NaN are 0, a huge one [`MAX_COUNT`].
fn whole(value: f64) -> u64 {
    (value as u64).min(MAX_COUNT)
}

/// A counter's value; one that is not finite or negative is no reading.
fn counter(value: f64) -> Option<u64> {
    (value.is_finite() && value >= 0.0).then(|| whole(value))
}

#[cfg(test)]
mod tests;
