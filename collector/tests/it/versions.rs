//! Every vLLM from 0.8.5 to 0.32 is read: metrics were renamed and added in between, and one that is not there is shown.
//!
//! The texts are the capture of 0.26 with the names of each version, by when each name came and went in
//! `vllm/v1/metrics/loggers.py`.

use std::process::Stdio;

use homing_collector::vllm::{EngineMetrics, Missing, PromptCacheSource, read_engines};
use serde_json::json;

use crate::fakes::{FakeReplica, IDLE, Metrics, config, run};

const VERSIONS: [(u32, u32, u32); 23] = [
    (0, 8, 5),
    (0, 9, 2),
    (0, 11, 0),
    (0, 11, 1),
    (0, 12, 0),
    (0, 13, 0),
    (0, 14, 0),
    (0, 15, 1),
    (0, 16, 0),
    (0, 17, 1),
    (0, 18, 0),
    (0, 19, 1),
    (0, 20, 2),
    (0, 21, 0),
    (0, 22, 0),
    (0, 23, 0),
    (0, 24, 0),
    (0, 25, 1),
    (0, 26, 0),
    (0, 27, 1),
    (0, 28, 0),
    (0, 29, 0),
    (0, 32, 0),
];

/// The text of an engine that runs 3 and holds 2 back, as `version` writes it.
fn text_of(version: (u32, u32, u32)) -> String {
    let mut text = String::new();
    for line in IDLE.lines() {
        let Some((series, _)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else { continue };
        let name = series.split('{').next().expect("a name").strip_prefix("vllm:").unwrap_or_default();
        let is = |names: &[&str]| names.contains(&name);
        let since = if is(&["prompt_tokens_by_source_total", "prompt_tokens_cached_total"]) {
            (0, 16, 0)
        } else if is(&["engine_sleep_state"]) {
            (0, 11, 1)
        } else {
            (0, 0, 0)
        };
        if version < since {
            continue;
        }
        let line = match name {
            "num_requests_running" => format!("{series} 3.0"),
            "num_requests_waiting" => format!("{series} 2.0"),
            "kv_cache_usage_perc" => format!("{series} 0.5"),
            "cache_config_info" if version < (0, 24, 0) => {
                let without = line.replace("kv_cache_size_tokens=\"4194304\",", "");
                assert_ne!(without, line);
                without
            }
            _ => line.to_owned(),
        };
        let renamed = is(&["kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"]);
        let old = line.replace("vllm:kv_", "vllm:gpu_").replace("vllm:prefix", "vllm:gpu_prefix");
        for (line, holds) in [(&line, !renamed || version >= (0, 9, 2)), (&old, renamed && version <= (0, 11, 1))] {
            if holds {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

fn engine(text: &str) -> EngineMetrics {
    let engines = read_engines(text.as_bytes());
    assert_eq!(engines.len(), 1);
    engines[&0]
}

#[test]
fn the_same_load_is_read_from_every_version_and_nothing_is_missing() {
    for version in VERSIONS {
        let engine = engine(&text_of(version));
        assert_eq!((engine.running, engine.waiting, engine.kv_usage), (3, 2, 0.5), "{version:?}");
        assert_eq!(engine.cache_tokens, 4_194_304, "{version:?}: told, or blocks times their size");
        assert_eq!((engine.prompt_tokens, engine.generation_tokens, engine.asleep), (6080, 75, false), "{version:?}");
        let source = if version < (0, 16, 0) { PromptCacheSource::PrefixCache } else { PromptCacheSource::BySource };
        let cache = engine.prompt_cache.expect("counters of the prefix cache");
        assert_eq!((cache.source, cache.tokens, cache.hits), (source, 6080, 4096), "{version:?}");
        assert!(engine.missing.is_empty(), "{version:?}: {}", engine.missing);
    }
}

#[test]
fn a_metric_that_is_not_there_is_named_and_gauges_are_expected_of_an_engine_that_has_worked() {
    let without = |names: &[&str]| {
        let keep = |line: &&str| !names.iter().any(|name| line.starts_with(&format!("vllm:{name}")));
        let text: String = IDLE.lines().filter(keep).map(|line| format!("{line}\n")).collect();
        engine(&text)
    };
    assert_eq!(without(&["num_requests_waiting"]).missing, Missing::WAITING);
    assert_eq!(without(&["kv_cache_usage_perc"]).missing.to_string(), "vllm:kv_cache_usage_perc");
    assert_eq!(without(&["cache_config_info"]).missing, Missing::CACHE_SIZE);
    assert_eq!(without(&["prompt_tokens_by_source", "prompt_tokens_cached"]).missing, Missing::NONE, "older counters are there");
    assert_eq!(without(&["prompt_tokens_by_source", "prompt_tokens_cached", "prefix_cache"]).missing, Missing::PREFIX_CACHE);
    let at_work = engine("vllm:prompt_tokens_total 1\n").missing;
    let idle = engine("vllm:prompt_tokens_total 0\n").missing;
    for gauge in [Missing::RUNNING, Missing::WAITING, Missing::KV_USAGE] {
        assert!(at_work.contains(gauge) && !idle.contains(gauge));
    }
    assert!(idle.contains(Missing::GENERATION_TOKENS) && !idle.contains(Missing::PROMPT_TOKENS));
}

fn without_waiting() -> Metrics {
    let text = IDLE.replace("vllm:num_requests_waiting", "vllm:num_requests_in_line");
    assert_ne!(text, IDLE);
    Metrics::Text(text)
}

#[tokio::test]
async fn what_is_missing_is_shown_and_the_replica_is_used_all_the_same() {
    let replica = FakeReplica::start(without_waiting()).await;
    let collector = run(&config(&[replica.address()], "")).await;
    let seen = collector.until_replica(0, "ready").await;
    assert_eq!(seen["missing"], json!(["num_requests_waiting"]));
    replica.set(Metrics::Text(IDLE.to_owned()));
    collector.until("nothing missing", |status| status["pools"][0]["replicas"][0]["missing"] == json!([])).await;
}

#[tokio::test]
async fn what_is_missing_is_logged_once() {
    let replica = FakeReplica::start(without_waiting()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("homing.yaml");
    std::fs::write(&path, config(&[replica.address()], "")).expect("a file");
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_homing-collector"));
    command.arg("run").arg(&path).env_remove("RUST_LOG").stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("a command");
    while replica.asked() < 10 {
        assert!(child.try_wait().expect("a state").is_none(), "it ended");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    child.start_kill().expect("an end");
    let log = String::from_utf8(child.wait_with_output().await.expect("an end").stderr).expect("text");
    assert_eq!(log.matches("reports no vllm:num_requests_waiting").count(), 1, "{log}");
}

#[tokio::test]
async fn a_restart_is_counted_once_however_many_ranks_and_counters_show_it() {
    use crate::fakes::TWO_RANKS;
    let replica = FakeReplica::start(Metrics::Text(TWO_RANKS.to_owned())).await;
    let collector = run(&config(&[replica.address()], "")).await;
    assert_eq!(collector.until_replica(1, "ready").await["restarts"], 0);
    let fresh = include_str!("../../testdata/vllm-0.26.0-dp2-start.txt");
    replica.set(Metrics::Text(fresh.to_owned()));
    let status = collector.until("a restart", |status| status["pools"][0]["replicas"][0]["restarts"] != 0).await;
    assert_eq!(status["pools"][0]["replicas"][1]["restarts"], 1, "{status}");
}
