//! Admission by working set on real engines whose caches hold fewer conversations than are active.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, ensure};
use homing_tests::scripted::events;
use homing_tests::{all_given_back, tools};
use serde::Deserialize;
use serde_json::json;
use xtask::load::{Pace, load};
use xtask::stack::Stack;

use super::start;

/// KV cache of each server: 40,960 tokens in blocks of 32. With 2.6 of the model's tokens to one of the load's, a conversation ends at
/// 12,000 tokens, 11,200 of them its own, so three fit.
const BLOCKS: &str = "1280";

/// More than twice as many as fit both.
const SESSIONS: u32 = 16;

/// Long prompts and short answers, so that reading what the cache does not hold is what costs: this model is as slow to write an answer of
/// 64 tokens as to read a prompt of some thousands.
const SHAPE: &str = "--system-tokens 300 --first-tokens 3500 --turns 8 --turn-tokens 100 --max-tokens 8";

/// Short sessions of the same kind of text.
const SHORT: &str = "--system-tokens 300 --first-tokens 100 --turns 2 --turn-tokens 20 --max-tokens 1";

/// So many of them teach Homing how long a token is and what all conversations share: it learns from windows of 32 first turns.
const LESSON: u64 = 40;

/// Of a measurement.
const SECONDS: u64 = 60;

/// What a load showed, as `homing-bench load --json` prints it.
#[derive(Debug, Deserialize)]
struct Figures {
    prefix_hits: f64,
    output_tokens_per_minute: f64,
    ttfb_p50_s: f64,
    ttfb_p95_s: f64,
    ttfb_s: Latency,
    turns: u64,
    turns_unfinished: u64,
    sessions_completed: u64,
    errors: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
struct Latency {
    mean: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefix_hits, output_tokens_per_minute, ttfb_p50_s, ttfb_p95_s, turns, sessions_completed, .. } = self;
        let mean = self.ttfb_s.mean;
        write!(
            f,
            "output {output_tokens_per_minute:.0} tok/min, TTFB p50 {ttfb_p50_s:.2} s, p95 {ttfb_p95_s:.2} s, mean {mean:.2} s, prefix hits \
             {prefix_hits:.1} %, {turns} turns, {sessions_completed} sessions done"
        )
    }
}

/// Sends sessions of this shape, numbered from `first`.
async fn send(stack: &Stack, shape: &str, sessions: u32, first: u64, seconds: u64) -> Result<Figures> {
    let args = format!("{shape} --ignore-eos --sessions {sessions} --first-session {first}");
    let args: Vec<_> = args.split(' ').map(str::to_owned).collect();
    let replicas: Vec<_> = stack.replicas.iter().map(|(_, address)| *address).collect();
    let figures: Figures =
        load(tools(), &format!("http://{}", stack.proxy), &replicas, Pace { seconds, speed: 1.0 }, &args).await?;
    ensure!(figures.errors.is_empty() && figures.turns_unfinished == 0, "{figures:?}");
    Ok(figures)
}

/// Sends short sessions, numbered from `first`, until Homing knows the texts.
async fn teach(stack: &Stack, first: u64) -> Result<()> {
    let mut sessions = 0;
    while sessions < LESSON {
        let more = send(stack, SHORT, 4, first + sessions, 5).await?.sessions_completed;
        ensure!(more > 0, "not one short session ended within 5 s");
        sessions += more;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: cargo xtask test --vllm"]
async fn more_conversations_than_fit_keep_their_prefix_with_admission() -> Result<()> {
    let mut stack = start(2, &["--num-gpu-blocks-override", BLOCKS]).await?;
    // The next turn of these sessions comes within milliseconds of an answer.
    let admission = json!({ "mode": "working_set", "min_grace": "500ms", "max_grace": "4s" });
    let mut measured = Vec::new();
    for (index, (name, admission)) in (0..).zip([("affinity alone", json!({ "mode": "off" })), ("with admission", admission)]) {
        stack.restart_envoy(json!({ "admission": admission })).await?;
        // The servers remember what they were sent: each measurement has sessions of its own.
        let first = index * 2_000_000;
        teach(&stack, first).await?;
        let figures = send(&stack, SHAPE, SESSIONS, first + 1_000_000, SECONDS).await?;
        let held = events(&stack, "held").await?;
        println!("{SESSIONS} sessions, {name}: {figures}, {held} held");
        all_given_back(&stack).await?;
        measured.push((figures, held));
    }
    let [(without, none), (with, held)] = &measured[..] else { unreachable!("two were measured") };
    assert!(*none == 0 && *held > 0, "{none} were held without admission, {held} with it");
    assert!(with.prefix_hits > without.prefix_hits + 20.0, "prefix hits: {measured:?}");
    assert!(with.output_tokens_per_minute > 1.2 * without.output_tokens_per_minute, "output: {measured:?}");
    Ok(())
}
