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
                self.metrics.cache_tokens = number(b"kv_cache_size_tokens").or_else(blocks).unwrap_or(0);
            }
        }
    }

    fn finish(self) -> EngineMetrics {
        let pair = |source, tokens: Option<u64>, hits: Option<u64>| Some(PromptCache { source, tokens: tokens?, hits: hits? });
        let by_source = match (self.local_hits, self.external_hits) {
            (None, None) => None,
            (local, external) => Some(local.unwrap_or(0).saturating_add(external.unwrap_or(0))),
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

/// A count; a negative one and NaN are 0, a huge one the greatest.
fn whole(value: f64) -> u64 {
    value as u64
}

/// A counter's value; one that is not finite or negative is no reading.
fn counter(value: f64) -> Option<u64> {
    (value.is_finite() && value >= 0.0).then(|| whole(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    macro_rules! capture {
        ($name:literal) => {
            read_engines(include_bytes!(concat!("../testdata/vllm-", $name, ".txt")))
        };
    }

    fn one(text: &str) -> EngineMetrics {
        let engines = read_engines(text.as_bytes());
        assert_eq!(engines.len(), 1, "{engines:?}");
        *engines.values().next().expect("one engine")
    }

    fn by_source(tokens: u64, hits: u64) -> Option<PromptCache> {
        Some(PromptCache { source: PromptCacheSource::BySource, tokens, hits })
    }

    #[test]
    fn one_engine_of_vllm_0_26() {
        let expected = EngineMetrics {
            cache_tokens: 4_194_304,
            prompt_tokens: 6080,
            generation_tokens: 75,
            prompt_cache: by_source(6080, 4096),
            ..EngineMetrics::default()
        };
        assert_eq!(capture!("0.26.0"), BTreeMap::from([(0, expected)]));
    }

    #[test]
    fn one_engine_of_vllm_0_32() {
        let expected = EngineMetrics { cache_tokens: 262_144, prompt_cache: by_source(0, 0), ..EngineMetrics::default() };
        assert_eq!(capture!("0.32.0"), BTreeMap::from([(0, expected)]));
    }

    #[test]
    fn two_ranks_under_load() {
        let rank = |generation_tokens, hits| EngineMetrics {
            running: 4,
            waiting: 6,
            kv_usage: 0.251_968_5,
            cache_tokens: 4096,
            prompt_tokens: 1305,
            generation_tokens,
            prompt_cache: by_source(1305, hits),
            ..EngineMetrics::default()
        };
        assert_eq!(capture!("0.26.0-dp2-load"), BTreeMap::from([(0, rank(109, 192)), (1, rank(94, 0))]));
    }

    #[test]
    fn two_idle_ranks_count_separately() {
        let engines = capture!("0.26.0-dp2");
        assert_eq!(engines.values().map(|engine| engine.prompt_tokens).collect::<Vec<_>>(), [4413, 4565]);
        assert_eq!(engines.values().map(|engine| engine.generation_tokens).collect::<Vec<_>>(), [4008, 4040]);
    }

    #[test]
    fn before_the_first_step_there_are_no_gauges_and_the_engines_are_idle() {
        let idle = EngineMetrics { cache_tokens: 4_194_304, prompt_cache: by_source(0, 0), ..EngineMetrics::default() };
        assert_eq!(capture!("0.26.0-dp2-start"), BTreeMap::from([(0, idle), (1, idle)]));
    }

    #[test]
    fn hybrid_nodes_label_their_engines_globally() {
        assert_eq!(capture!("0.26.0-hybrid-node0").into_keys().collect::<Vec<_>>(), [0, 1]);
        assert_eq!(capture!("0.26.0-hybrid-node1").into_keys().collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn preemptions_inflate_prefix_queries_so_prompt_tokens_are_what_counts() {
        let engine = capture!("0.26.0-preempt")[&0];
        assert_eq!((engine.preemptions, engine.cache_tokens), (23, 3072));
        assert_eq!(engine.prompt_cache, by_source(3485, 0));
    }

    #[test]
    fn the_names_before_vllm_0_9_2_are_read() {
        let engine = one("vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\n\
             vllm:gpu_prefix_cache_queries_total{model_name=\"m\"} 10\nvllm:gpu_prefix_cache_hits_total{model_name=\"m\"} 4\n");
        assert_eq!(engine.kv_usage, 0.5);
        assert_eq!(engine.prompt_cache, Some(PromptCache { source: PromptCacheSource::PrefixCache, tokens: 10, hits: 4 }));
    }

    #[test]
    fn the_best_counters_there_are_give_the_hit_rate() {
        let prefix = "vllm:prefix_cache_queries_total 90\nvllm:prefix_cache_hits_total 9\nvllm:prompt_tokens_total 50\n";
        let cached = format!("{prefix}vllm:prompt_tokens_cached_total 20\n");
        let sources = format!(
            "{cached}vllm:prompt_tokens_by_source_total{{source=\"local_compute\"}} 25\n\
             vllm:prompt_tokens_by_source_total{{source=\"local_cache_hit\"}} 20\n\
             vllm:prompt_tokens_by_source_total{{source=\"external_kv_transfer\"}} 5\n"
        );
        let read = |text: &str| one(text).prompt_cache.map(|cache| (cache.source, cache.tokens, cache.hits));
        assert_eq!(read(prefix), Some((PromptCacheSource::PrefixCache, 90, 9)));
        assert_eq!(read(&cached), Some((PromptCacheSource::Cached, 50, 20)));
        assert_eq!(read(&sources), Some((PromptCacheSource::BySource, 50, 25)));
        assert_eq!(read("vllm:num_requests_running 1\n"), None);
    }

    #[test]
    fn an_engine_sleeps_when_it_is_not_awake() {
        let state = |awake, offloaded| {
            format!(
                "vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\nvllm:engine_sleep_state{{sleep_state=\"weights_offloaded\"}} {offloaded}\n"
            )
        };
        assert!(!one(&state(1, 0)).asleep);
        assert!(one(&state(0, 1)).asleep);
        assert!(one("vllm:engine_sleep_state{sleep_state=\"discard_all\"} 1\n").asleep);
        assert!(!one("vllm:num_requests_running 0\n").asleep);
    }

    #[test]
    fn the_cache_size_is_reported_or_computed_or_unknown() {
        let info = |labels: &str| one(&format!("vllm:cache_config_info{{{labels}}} 1\n")).cache_tokens;
        assert_eq!(info("block_size=\"16\",num_gpu_blocks=\"100\",kv_cache_size_tokens=\"1500\""), 1500);
        assert_eq!(info("block_size=\"16\",num_gpu_blocks=\"100\",kv_cache_size_tokens=\"None\""), 1600);
        assert_eq!(info("num_gpu_blocks=\"100\",hash_block_size=\"8\",block_size=\"16\""), 1600);
        assert_eq!(info("block_size=\"16\",num_gpu_blocks=\"None\""), 0);
        assert_eq!(info("block_size=\"16\",num_gpu_blocks=\"18446744073709551615\""), 0);
    }

    #[test]
    fn strange_values_are_bounded() {
        let gauge = |value: &str| one(&format!("vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"));
        assert_eq!((gauge("NaN").running, gauge("NaN").kv_usage), (0, 0.0));
        assert_eq!((gauge("-3").running, gauge("-3").kv_usage), (0, 0.0));
        assert_eq!((gauge("+Inf").running, gauge("+Inf").kv_usage), (u32::MAX, 1.0));
        assert_eq!((gauge("1e300").running, gauge("1e300").kv_usage), (u32::MAX, 1.0));
        assert_eq!(one("vllm:prompt_tokens_total NaN\nvllm:prompt_tokens_cached_total 1\n").prompt_cache, None);
    }

    #[test]
    fn a_strange_series_hides_no_other() {
        let text = b"vllm:num_requests_running{engine=\"x\"} 9\nvllm:num_requests_running{engine=\"0\",m=\"\xff\xfe\"} 3\n\
            vllm:num_requests_waiting{engine=\"0\",} oops\nvllm:num_requests_waiting{model_name=\"a,b\",engine=\"0\"} 2\nvllm:num_req";
        let engines = read_engines(text);
        assert_eq!(engines.len(), 1);
        assert_eq!((engines[&0].running, engines[&0].waiting), (3, 2));
    }

    #[test]
    fn other_text_has_no_engines() {
        assert!(read_engines(b"").is_empty());
        assert!(read_engines(b"<html>404</html>\n").is_empty());
        assert!(read_engines(b"go_goroutines 5\nsglang:num_running_reqs 1\n").is_empty());
    }

    #[test]
    fn the_number_of_engines_is_bounded() {
        let text: String = (0..1000).map(|engine| format!("vllm:num_requests_running{{engine=\"{engine}\"}} 1\n")).collect();
        assert_eq!(read_engines(text.as_bytes()).len(), MAX_ENGINES);
    }

    proptest! {
        #[test]
        fn a_capture_that_is_cut_or_damaged_is_read_without_a_panic(
            cut in 0_usize..16_000,
            damage in prop::collection::vec((0_usize..16_000, any::<u8>()), 0..20),
        ) {
            let mut text = include_bytes!("../testdata/vllm-0.26.0-dp2-load.txt").to_vec();
            for (at, byte) in damage {
                if let Some(place) = text.get_mut(at) {
                    *place = byte;
                }
            }
            text.truncate(cut);
            for engine in read_engines(&text).values() {
                prop_assert!((0.0..=1.0).contains(&engine.kv_usage));
            }
        }

        #[test]
        fn a_capture_that_is_cut_never_shows_a_wrong_count(cut in 0_usize..16_105) {
            let text = include_bytes!("../testdata/vllm-0.26.0-dp2-load.txt");
            for engine in read_engines(&text[..cut]).values() {
                prop_assert!([0, 4].contains(&engine.running) && [0, 6].contains(&engine.waiting));
                prop_assert!([0, 1305].contains(&engine.prompt_tokens));
            }
        }
    }
}
