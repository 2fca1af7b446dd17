//! How long an engine takes to compute, measured from outside: vllm-router's program scheduling wants to be told.
//!
//! Its documentation fits two models to the deployment: cold prefill of `x` thousand tokens takes `a + b x + c x^2` seconds, and a
//! decode step of `n` requests with `t` tokens of context in all takes `f + s n + k t` seconds. Three measurements give each.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::load::metric;
use super::variant::replica_options;
use crate::load::Pace;
use crate::stack::{MODEL, start_replicas};
use crate::tools::Tools;

/// Output tokens over which a decode step's time is averaged.
const STEPS: u32 = 256;
/// Requests in the larger of the two batches.
const BATCH: u32 = 8;

/// What an engine was measured to be; times are real, so those of a faster clock are shorter.
#[derive(Clone, Debug)]
pub(super) struct Calibration {
    /// Tokens that its KV cache holds.
    pub(super) kv_tokens: f64,
    /// The prefill model, as the router's configuration has it.
    pub(super) prefill: Value,
    /// The decode model, as the router's configuration has it.
    pub(super) decode: Value,
}

/// Measures a replica of its own.
pub(super) async fn calibrate(tools: &Tools, pace: Pace, dir: &Path) -> Result<Calibration> {
    let replicas = start_replicas(tools, &replica_options(pace, 1), dir).await?;
    let replica = replicas[0].1;
    let kv_tokens = metric(replica, "vllm:cache_config_info", "kv_cache_size_tokens").await?;

    let mut cold = Vec::new();
    for share in [0.0625, 0.25, 0.75] {
        let prompt = Prompt { name: format!("cold {share}"), tokens: kv_tokens * share };
        let (seconds, tokens) = prompt.ask(replica, 1).await?;
        cold.push((tokens / 1000.0, seconds));
    }
    let [intercept, linear, quadratic] = parabola([cold[0], cold[1], cold[2]]);

    let short = |number| Prompt { name: format!("short {number}"), tokens: 64.0 };
    let long = Prompt { name: "long".into(), tokens: kv_tokens * 0.5 };
    let (alone, context) = step(replica, vec![short(0)]).await?;
    let (full, full_context) = step(replica, (0..BATCH).map(short).collect()).await?;
    let (deep, deep_context) = step(replica, vec![long]).await?;
    let per_token = (deep - alone) / (deep_context - context);
    let per_request = ((full - alone) - per_token * (full_context - context)) / f64::from(BATCH - 1);
    let fixed = alone - per_request - per_token * context;

    Ok(Calibration {
        kv_tokens,
        prefill: json!({
            "intercept_seconds": intercept.max(0.0),
            "linear_seconds_per_1k_tokens": linear.max(0.0),
            "quadratic_seconds_per_1k_tokens_squared": quadratic.max(0.0),
        }),
        decode: json!({
            "fixed_step_seconds": fixed.max(f64::EPSILON),
            "batch_step_seconds_per_request": per_request.max(0.0),
            "context_step_seconds_per_token": per_token.max(0.0),
        }),
    })
}

/// A prompt of about as many tokens, whose text its name decides.
#[derive(Clone, Debug)]
struct Prompt {
    name: String,
    tokens: f64,
}

impl Prompt {
    /// Asks for so many output tokens; returns the seconds until the answer and the prompt's tokens as the engine counts them.
    async fn ask(&self, replica: SocketAddr, max_tokens: u32) -> Result<(f64, f64)> {
        let mut text = self.name.clone();
        // A token is about four bytes.
        while (text.len() as f64) < 4.0 * self.tokens {
            text.push_str(&format!(" {}", text.len()));
        }
        let body = json!({ "model": MODEL, "max_tokens": max_tokens, "messages": [{ "role": "user", "content": text }] });
        let started = Instant::now();
        let request = reqwest::Client::new().post(format!("http://{replica}/v1/chat/completions")).json(&body);
        let answer: Value = request.send().await?.error_for_status().context("calibrating")?.json().await?;
        let tokens = answer["usage"]["prompt_tokens"].as_f64().context("the engine counted no prompt tokens")?;
        Ok((started.elapsed().as_secs_f64(), tokens))
    }
}

/// Seconds of a decode step of all these prompts together, and the mean tokens of context in it.
async fn step(replica: SocketAddr, prompts: Vec<Prompt>) -> Result<(f64, f64)> {
    for prompt in &prompts {
        prompt.ask(replica, 1).await?;
    }
    let requests = prompts.len() as f64;
    // Now they are cached: what an answer of many tokens takes longer than one of a single token is decoding.
    let (few, _) = together(replica, prompts.clone(), 1).await?;
    let (many, tokens) = together(replica, prompts, 1 + STEPS).await?;
    Ok(((many - few) / f64::from(STEPS), tokens + f64::from(STEPS) / 2.0 * requests))
}

/// Seconds until the last answer, and the prompts' tokens in all.
async fn together(replica: SocketAddr, prompts: Vec<Prompt>, max_tokens: u32) -> Result<(f64, f64)> {
    let mut asked = JoinSet::new();
    for prompt in prompts {
        asked.spawn(async move { prompt.ask(replica, max_tokens).await });
    }
    let answers = asked.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(answers.into_iter().fold((0.0, 0.0), |(longest, sum), (seconds, tokens)| (seconds.max(longest), sum + tokens)))
}

/// The coefficients, constant first, of the parabola through three points.
fn parabola([(x0, y0), (x1, y1), (x2, y2)]: [(f64, f64); 3]) -> [f64; 3] {
    let (first, second) = ((y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1));
    let quadratic = (second - first) / (x2 - x0);
    let linear = first - quadratic * (x0 + x1);
    [y0 - x0 * (linear + quadratic * x0), linear, quadratic]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parabola_goes_through_its_points() {
        let value = |x: f64| 3.0 + 2.0 * x + 0.5 * x * x;
        let found = parabola([1.0, 4.0, 10.0].map(|x| (x, value(x))));
        assert!(found.iter().zip([3.0, 2.0, 0.5]).all(|(found, expected)| (found - expected).abs() < 1e-9), "{found:?}");
    }
}
