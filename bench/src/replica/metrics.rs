//! The `/metrics` text: the series of vLLM 0.26 that a router or an autoscaler reads, in vLLM's order and with its names, labels and help.
//!
//! Prometheus text format 0.0.4/1.0.0; each counter and histogram is followed by its `_created` gauge, as prometheus_client writes them.

use super::driver::Observed;
use super::histogram::Histogram;
use crate::engine::EngineConfig;
use std::fmt::Write;

/// The content type of the answer.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

/// What the text needs beside the engine's state.
pub(super) struct Exposition<'a> {
    pub(super) model: &'a str,
    pub(super) config: &'a EngineConfig,
    pub(super) max_model_len: usize,
    /// The process's start, in seconds since 1970.
    pub(super) started_at: f64,
}

impl Exposition<'_> {
    /// The whole text.
    pub(super) fn render(&self, observed: &Observed) -> String {
        let Observed { counters, gauges, time_to_first_token, e2e_latency } = observed;
        let mut text = Text { out: String::with_capacity(16 << 10), model: escape(self.model), created: self.started_at };
        text.header("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge");
        let _ = writeln!(text.out, "process_start_time_seconds {:?}", self.started_at);

        text.gauge("num_requests_running", "Number of requests in model execution batches.", gauges.running as f64);
        text.gauge("num_requests_waiting", "Number of requests waiting to be processed.", gauges.waiting as f64);
        text.gauges(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
            "reason",
            &[("capacity", gauges.waiting as f64), ("deferred", 0.0)],
        );
        text.gauges(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            "sleep_state",
            &[("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)],
        );
        text.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.kv_cache_usage);

        let queried = "in terms of number of queried tokens.";
        let hit = "in terms of number of cached tokens.";
        text.counter("prefix_cache_queries", &format!("Prefix cache queries, {queried}"), counters.prefix_cache_queries);
        text.counter("prefix_cache_hits", &format!("Prefix cache hits, {hit}"), counters.prefix_cache_hits);
        let external = "from KV connector cross-instance cache sharing";
        text.counter("external_prefix_cache_queries", &format!("External prefix cache queries {external}, {queried}"), 0);
        text.counter("external_prefix_cache_hits", &format!("External prefix cache hits {external}, {hit}"), 0);

        text.counter("num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions);
        let prompt_tokens = counters.prompt_tokens_computed + counters.prompt_tokens_cached;
        text.counter("prompt_tokens", "Number of prefill tokens processed.", prompt_tokens);
        text.counters(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            &[
                ("local_compute", counters.prompt_tokens_computed),
                ("local_cache_hit", counters.prompt_tokens_cached),
                ("external_kv_transfer", 0),
            ],
        );
        text.counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", counters.prompt_tokens_cached);
        text.counter("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens);
        // vLLM leaves requests that their client aborted out of every reason, `abort` too.
        text.counters(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            &[
                ("stop", counters.finished_stop),
                ("length", counters.finished_length),
                ("abort", 0),
                ("error", 0),
                ("repetition", 0),
            ],
        );
        text.histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", time_to_first_token);
        text.histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", e2e_latency);
        self.cache_config_info(&mut text);
        text.out
    }

    /// The engine's cache configuration as labels. It has no `model_name`.
    fn cache_config_info(&self, text: &mut Text) {
        text.header("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge");
        let blocks = self.config.blocks();
        let tokens = self.config.max_request_tokens();
        let concurrency = tokens as f64 / self.max_model_len as f64;
        let _ = writeln!(
            text.out,
            "vllm:cache_config_info{{_block_size_resolved=\"True\",block_size=\"{block_size}\",cache_dtype=\"auto\",\
             calculate_kv_scales=\"False\",enable_prefix_caching=\"True\",engine=\"0\",gpu_memory_utilization=\"0.92\",\
             is_attention_free=\"False\",kv_cache_dtype_skip_layers=\"[]\",kv_cache_max_concurrency=\"{concurrency:?}\",\
             kv_cache_memory_bytes=\"None\",kv_cache_size_tokens=\"{tokens}\",kv_offloading_backend=\"native\",\
             kv_offloading_size=\"None\",kv_sharing_fast_prefill=\"False\",mamba_block_size=\"None\",mamba_cache_dtype=\"auto\",\
             mamba_cache_mode=\"none\",mamba_page_size_padded=\"None\",mamba_ssm_cache_dtype=\"auto\",num_cpu_blocks=\"None\",\
             num_gpu_blocks=\"{blocks}\",num_gpu_blocks_override=\"None\",prefix_caching_hash_algo=\"sha256\",\
             prefix_match_unit=\"None\",skip_page_size_padded=\"None\",sliding_window=\"None\",\
             user_specified_block_size=\"False\",user_specified_mamba_block_size=\"False\"}} 1.0",
            block_size = self.config.block_size,
        );
    }
}

/// The text as it grows. Labels are in alphabetical order, as vLLM's are.
struct Text {
    out: String,
    model: String,
    created: f64,
}

impl Text {
    fn header(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, label: Option<(&str, &str)>, value: f64) {
        let _ = write!(self.out, "vllm:{name}{{engine=\"0\",");
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

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.header(&format!("vllm:{name}"), help, "gauge");
        self.sample(name, None, value);
    }

    fn gauges(&mut self, name: &str, help: &str, label: &str, values: &[(&str, f64)]) {
        self.header(&format!("vllm:{name}"), help, "gauge");
        for (text, value) in values {
            self.sample(name, Some((label, text)), *value);
        }
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.header(&format!("vllm:{name}_total"), help, "counter");
        self.sample(&format!("{name}_total"), None, value as f64);
        let created = self.created;
        self.gauge(&format!("{name}_created"), help, created);
    }

    fn counters(&mut self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) {
        self.header(&format!("vllm:{name}_total"), help, "counter");
        for (text, value) in values {
            self.sample(&format!("{name}_total"), Some((label, text)), *value as f64);
        }
        let created: Vec<_> = values.iter().map(|(text, _)| (*text, self.created)).collect();
        self.gauges(&format!("{name}_created"), help, label, &created);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.header(&format!("vllm:{name}"), help, "histogram");
        for (bound, count) in histogram.cumulative() {
            let bound = if bound.is_infinite() { "+Inf".to_owned() } else { format!("{bound:?}") };
            self.sample(&format!("{name}_bucket"), Some(("le", &bound)), count as f64);
        }
        self.sample(&format!("{name}_count"), None, histogram.count() as f64);
        self.sample(&format!("{name}_sum"), None, histogram.sum());
        let created = self.created;
        self.gauge(&format!("{name}_created"), help, created);
    }
}

/// A label's value as the text format wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
