//! The `/metrics` text: the series of vLLM that a router or an autoscaler reads, in vLLM's order and with its names, labels and help.
//!
//! Prometheus text format 0.0.4/1.0.0. With one rank, each counter and histogram is followed by its `_created` gauge, as
//! prometheus_client writes them. With several, vLLM collects from several processes: then these and `process_` series are missing, and
//! an engine's gauges are until its first step.

use super::driver::Observed;
use super::histogram::Histogram;
use super::version::Version;
use crate::engine::{Counters, EngineConfig, Gauges};
use std::fmt::Write;

/// The content type of the answer.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

/// What the text needs beside the engine's state.
pub(super) struct Exposition<'a> {
    pub(super) version: Version,
    pub(super) model: &'a str,
    pub(super) config: &'a EngineConfig,
    pub(super) max_model_len: usize,
    /// The first engine's label.
    pub(super) first_engine: usize,
    /// The process's start, in seconds since 1970.
    pub(super) started_at: f64,
}

impl Exposition<'_> {
    /// The whole text, of these engines.
    pub(super) fn render(&self, engines: &[Observed]) -> String {
        let single = engines.len() == 1;
        let mut text = Text {
            out: String::with_capacity(16 << 10),
            model: escape(self.model),
            engines,
            first_engine: self.first_engine,
            created: single.then_some(self.started_at),
        };
        if single {
            text.header("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge");
            let _ = writeln!(text.out, "process_start_time_seconds {:?}", self.started_at);
        }

        let gauge = |value: fn(Gauges) -> f64| move |engine: &Observed| engine.gauges.or(single.then(Gauges::default)).map(value);
        text.gauge("num_requests_running", "Number of requests in model execution batches.", gauge(|now| now.running as f64));
        text.gauge("num_requests_waiting", "Number of requests waiting to be processed.", gauge(|now| now.waiting as f64));
        let waiting = gauge(|now| now.waiting as f64);
        let deferred = gauge(|_| 0.0);
        text.gauges(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
            "reason",
            &[("capacity", &waiting), ("deferred", &deferred)],
        );
        text.gauges(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            "sleep_state",
            &[
                ("awake", &|engine| Some(f64::from(!engine.asleep))),
                ("weights_offloaded", &|engine| Some(f64::from(engine.asleep))),
                ("discard_all", &|_| Some(0.0)),
            ],
        );
        text.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauge(|now| now.kv_cache_usage));

        let queried = "in terms of number of queried tokens.";
        let hit = "in terms of number of cached tokens.";
        text.counter("prefix_cache_queries", &format!("Prefix cache queries, {queried}"), |of| of.prefix_cache_queries);
        text.counter("prefix_cache_hits", &format!("Prefix cache hits, {hit}"), |of| of.prefix_cache_hits);
        let external = "from KV connector cross-instance cache sharing";
        text.counter("external_prefix_cache_queries", &format!("External prefix cache queries {external}, {queried}"), |_| 0);
        text.counter("external_prefix_cache_hits", &format!("External prefix cache hits {external}, {hit}"), |_| 0);

        text.counter("num_preemptions", "Cumulative number of preemption from the engine.", |of| of.preemptions);
        text.counter("prompt_tokens", "Number of prefill tokens processed.", |of| {
            of.prompt_tokens_computed + of.prompt_tokens_cached
        });
        text.counters(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            &[
                ("local_compute", |of| of.prompt_tokens_computed),
                ("local_cache_hit", |of| of.prompt_tokens_cached),
                ("external_kv_transfer", |_| 0),
            ],
        );
        text.counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", |of| of.prompt_tokens_cached);
        if self.version == Version::V0_32 {
            text.counters(
                "prompt_tokens_cached_by_source",
                "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
                "source",
                &[
                    ("device", |of| of.prefix_cache_hits),
                    ("host", |_| 0),
                    ("p2p", |_| 0),
                    ("disk", |_| 0),
                    ("external_unspecified", |_| 0),
                ],
            );
        }
        text.counter("generation_tokens", "Number of generation tokens processed.", |of| of.generation_tokens);
        // vLLM leaves requests that their client aborted out of every reason, `abort` too.
        text.counters(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            &[
                ("stop", |of| of.finished_stop),
                ("length", |of| of.finished_length),
                ("abort", |_| 0),
                ("error", |_| 0),
                ("repetition", |_| 0),
            ],
        );
        text.histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", |of| &of.time_to_first_token);
        text.histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", |of| &of.e2e_latency);
        self.cache_config_info(&mut text);
        text.out
    }

    /// Each engine's cache configuration as labels. It has no `model_name`.
    fn cache_config_info(&self, text: &mut Text<'_>) {
        text.header("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge");
        let tokens = self.config.max_request_tokens();
        let concurrency = format!("{:?}", tokens as f64 / self.max_model_len as f64);
        let (block_size, tokens) = (self.config.block_size.to_string(), tokens.to_string());
        // vLLM adds up the blocks of all ranks, but not their tokens.
        let blocks = (self.config.blocks() * text.engines.len()).to_string();
        let of_version: &[(&str, &str)] = match self.version {
            Version::V0_26 => &[("calculate_kv_scales", "False"), ("user_specified_mamba_block_size", "False")],
            Version::V0_32 => &[
                ("cache_hit_alignment_tokens", "None"),
                ("effective_attention_block_size", &block_size),
                ("enable_mamba_shared_prefix_checkpoint", "False"),
                ("hash_block_size", "None"),
                ("kv_cache_layout", "None"),
                ("prefix_cache_retention_interval", "0"),
                ("replayssm_buffer_len", "16"),
                ("swa_bounded_replay", "True"),
                ("use_kda_recoverssm", "False"),
                ("use_replayssm", "False"),
            ],
        };
        for index in 0..text.engines.len() {
            let engine = (self.first_engine + index).to_string();
            let mut labels = vec![
                ("_block_size_resolved", "True"),
                ("block_size", &block_size),
                ("cache_dtype", "auto"),
                ("enable_prefix_caching", "True"),
                ("engine", &engine),
                ("gpu_memory_utilization", "0.92"),
                ("is_attention_free", "False"),
                ("kv_cache_dtype_skip_layers", "[]"),
                ("kv_cache_max_concurrency", &concurrency),
                ("kv_cache_memory_bytes", "None"),
                ("kv_cache_size_tokens", &tokens),
                ("kv_offloading_backend", "native"),
                ("kv_offloading_size", "None"),
                ("kv_sharing_fast_prefill", "False"),
                ("mamba_block_size", "None"),
                ("mamba_cache_dtype", "auto"),
                ("mamba_cache_mode", "none"),
                ("mamba_page_size_padded", "None"),
                ("mamba_ssm_cache_dtype", "auto"),
                ("num_cpu_blocks", "None"),
                ("num_gpu_blocks", &blocks),
                ("num_gpu_blocks_override", "None"),
                ("prefix_caching_hash_algo", "sha256"),
                ("prefix_match_unit", "None"),
                ("skip_page_size_padded", "None"),
                ("sliding_window", "None"),
                ("user_specified_block_size", "False"),
            ];
            labels.extend(of_version);
            labels.sort_unstable();
            let labels: Vec<_> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
            let _ = writeln!(text.out, "vllm:cache_config_info{{{}}} 1.0", labels.join(","));
        }
    }
}

/// The text as it grows. Labels are in alphabetical order, as vLLM's are.
struct Text<'a> {
    out: String,
    model: String,
    engines: &'a [Observed],
    first_engine: usize,
    /// When the series began, where that is shown.
    created: Option<f64>,
}

/// A gauge's value of an engine; None if it has none.
type Value<'a> = &'a dyn Fn(&Observed) -> Option<f64>;

/// A counter's value of an engine.
type Count = fn(&Counters) -> u64;

impl Text<'_> {
    fn header(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A sample of each engine that has one.
    fn samples(&mut self, name: &str, label: Option<(&str, &str)>, value: impl Fn(&Observed) -> Option<f64>) {
        let engines = self.engines;
        for (engine, observed) in (self.first_engine..).zip(engines) {
            let Some(value) = value(observed) else { continue };
            self.sample(engine, name, label, value);
        }
    }

    fn sample(&mut self, engine: usize, name: &str, label: Option<(&str, &str)>, value: f64) {
        let _ = write!(self.out, "vllm:{name}{{engine=\"{engine}\",");
        // `engine` comes before every other label; `model_name` before or after.
        match label {
            Some((key, text)) if key < "model_name" => {
                let _ = write!(self.out, "{key}=\"{text}\",model_name=\"{}\"", self.model);
            }
            Some((key, text)) => {
                let _ = write!(self.out, "model_name=\"{}\",{key}=\"{text}\"", self.model);
            }
            None => {
                let _ = write!(self.out, "model_name=\"{}\"", self.model);
            }
        }
        let _ = writeln!(self.out, "}} {value:?}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Fn(&Observed) -> Option<f64>) {
        self.header(&format!("vllm:{name}"), help, "gauge");
        self.samples(name, None, value);
    }

    fn gauges(&mut self, name: &str, help: &str, label: &str, values: &[(&str, Value<'_>)]) {
        self.header(&format!("vllm:{name}"), help, "gauge");
        for (text, value) in values {
            self.samples(name, Some((label, text)), value);
        }
    }

    fn counter(&mut self, name: &str, help: &str, value: Count) {
        self.header(&format!("vllm:{name}_total"), help, "counter");
        self.samples(&format!("{name}_total"), None, |engine| Some(value(&engine.counters) as f64));
        self.created(name, help);
    }

    fn counters(&mut self, name: &str, help: &str, label: &str, values: &[(&str, Count)]) {
        self.header(&format!("vllm:{name}_total"), help, "counter");
        for (text, value) in values {
            self.samples(&format!("{name}_total"), Some((label, text)), |engine| Some(value(&engine.counters) as f64));
        }
        if let Some(created) = self.created {
            let created: Value<'_> = &|_| Some(created);
            let values: Vec<_> = values.iter().map(|(text, _)| (*text, created)).collect();
            self.gauges(&format!("{name}_created"), help, label, &values);
        }
    }

    fn histogram(&mut self, name: &str, help: &str, of: fn(&Observed) -> &Histogram) {
        self.header(&format!("vllm:{name}"), help, "histogram");
        let engines = self.engines;
        for (engine, histogram) in (self.first_engine..).zip(engines.iter().map(of)) {
            for (bound, count) in histogram.cumulative() {
                let bound = if bound.is_infinite() { "+Inf".to_owned() } else { format!("{bound:?}") };
                self.sample(engine, &format!("{name}_bucket"), Some(("le", &bound)), count as f64);
            }
            self.sample(engine, &format!("{name}_count"), None, histogram.count() as f64);
            self.sample(engine, &format!("{name}_sum"), None, histogram.sum());
        }
        self.created(name, help);
    }

    fn created(&mut self, name: &str, help: &str) {
        if let Some(created) = self.created {
            self.gauge(&format!("{name}_created"), help, |_| Some(created));
        }
    }
}

/// A label's value as the text format wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
