//! What is read of real engines' metrics, and of anything else.

use super::*;
use homing_corpus::{mutated, seeds};
use proptest::prelude::*;

macro_rules! capture {
    ($name:literal) => {
        read_engines(include_bytes!(concat!("../../testdata/vllm-", $name, ".txt")))
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
    fn any_metrics_have_figures_within_bounds_and_hide_no_series_behind_them(text in mutated(seeds("metrics"))) {
        let engines = read_engines(&text);
        prop_assert!(engines.len() <= MAX_ENGINES);
        prop_assert!(engines.values().all(|engine| (0.0..=1.0).contains(&engine.kv_usage)));
        let label = engines.keys().next().copied().unwrap_or(0);
        let behind = format!("\nvllm:num_requests_running{{engine=\"{label}\"}} 7\n");
        prop_assert_eq!(read_engines(&[&text[..], behind.as_bytes()].concat())[&label].running, 7);
    }

    #[test]
    fn a_capture_that_is_cut_never_shows_a_wrong_count(cut in 0_usize..16_105) {
        let text = include_bytes!("../../testdata/vllm-0.26.0-dp2-load.txt");
        for engine in read_engines(&text[..cut]).values() {
            prop_assert!([0, 4].contains(&engine.running) && [0, 6].contains(&engine.waiting));
            prop_assert!([0, 1305].contains(&engine.prompt_tokens));
        }
    }
}
