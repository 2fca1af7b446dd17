//! `homing-bench replica`.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use clap::Args;
use homing_bench::balancer::BalancerKind;
use homing_bench::engine::EngineConfig;
use homing_bench::replica::{Replica, ReplicaConfig, Version};
use tokio::signal::unix::{SignalKind, signal};

use crate::say;

/// A stand-in for a vLLM replica: a model of the engine behind vLLM's HTTP endpoints and metrics.
///
/// For tests of a proxy in front of it there are two endpoints that vLLM does not have.
///
/// GET /debug/requests answers the last 256 requests (but those to /metrics and /debug/) as JSON: a list of
/// {"method","path","headers":[[name,value],..],"body_length","body_sha256"}, oldest first.
///
/// POST /debug/fault with {"mode":MODE} makes it misbehave from now on. MODE is "none"; of generation endpoints "hang" (accept and never
/// answer), "error500" (a 500 at once), "reset" (close the connection without an answer), "reset-mid-stream" (close it behind a stream's
/// first token) or "slow" (work on a request "delay_ms" milliseconds later); "sleep" (engines sleep, and the metrics say so); "stall" (as
/// vLLM after SIGTERM: nobody can connect, what is in flight stalls with its connection open; for good).
#[derive(Args)]
pub(crate) struct ReplicaArgs {
    /// Loopback address and port to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Let it listen where others can reach it, as in a container: they can read what clients sent, and make it misbehave.
    #[arg(long)]
    allow_remote: bool,
    /// Name of the model.
    #[arg(long, default_value = "qwen3-4b")]
    model: String,
    /// Run the engine's clock this many times faster.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Tokens that the KV cache holds.
    #[arg(long, default_value_t = EngineConfig::default().kv_cache_tokens)]
    kv_tokens: usize,
    /// Requests that run at once.
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = EngineConfig::default().max_num_batched_tokens)]
    max_num_batched_tokens: usize,
    /// Tokens a request may have, prompt and output. Lowered to what the KV cache holds.
    #[arg(long, default_value_t = ReplicaConfig::default().max_model_len)]
    max_model_len: usize,
    /// Tokens in a block of the KV cache.
    #[arg(long, default_value_t = EngineConfig::default().block_size)]
    block_size: usize,
    /// Engines behind the one port, as vLLM's --data-parallel-size; each has the settings above. x-data-parallel-rank names one.
    #[arg(long, default_value_t = ReplicaConfig::default().ranks)]
    ranks: usize,
    /// The first engine's label in the metrics; the header has the local index all the same. As on a second node of vLLM's hybrid
    /// load balancing.
    #[arg(long, default_value_t = ReplicaConfig::default().first_engine_label)]
    first_engine_label: usize,
    /// Which vLLM's rule chooses a rank for requests that name none, vllm-0.26 or vllm-0.27; that of --version if not given.
    #[arg(long, value_parser = balancer)]
    balancer: Option<BalancerKind>,
    /// Which vLLM's answers it gives.
    #[arg(long, value_enum, default_value_t)]
    version: Version,
    /// Once listening, print one line of JSON, {"address":"127.0.0.1:PORT"}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

fn balancer(name: &str) -> Result<BalancerKind> {
    match name {
        "vllm-0.26" => Ok(BalancerKind::Vllm026),
        "vllm-0.27" => Ok(BalancerKind::Vllm027),
        _ => anyhow::bail!("give vllm-0.26 or vllm-0.27"),
    }
}

pub(crate) async fn replica(args: ReplicaArgs) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let engine = EngineConfig {
        kv_cache_tokens: args.kv_tokens,
        block_size: args.block_size,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        ..EngineConfig::default()
    };
    let config = ReplicaConfig {
        listen: args.listen,
        allow_remote: args.allow_remote,
        model: args.model,
        speed: args.speed,
        max_model_len: args.max_model_len,
        engine,
        version: args.version,
        ranks: args.ranks,
        first_engine_label: args.first_engine_label,
        balancer: args.balancer,
    };
    let replica = Replica::start(config).await?;
    if args.ready_json {
        say(&format!("{{\"address\":\"{}\"}}", replica.address()))?;
    } else {
        say(&format!("listening on {}; Ctrl-C ends it", replica.url()))?;
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
