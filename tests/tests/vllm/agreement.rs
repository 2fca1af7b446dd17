//! The stand-in replica finds as much of its prompts in its prefix cache as a real engine does, configured alike and asked the same.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use homing_tests::{together, tools};
use reqwest::Client;
use serde_json::{Value, json};
use xtask::stack::{MODEL, Stack, StackOptions};

use super::{cache_hits, prompt_tokens, start};

/// Tokens in both KV caches: 512 blocks.
const KV_TOKENS: usize = 16_384;

/// Agents' conversations: a system prompt that all share, a first message, then turns that each add a little.
///
/// Prompts are token ids, so that both engines count the same; the history is what each has answered itself.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Clients at once, each with conversations of its own.
    clients: usize,
    conversations_per_client: usize,
    /// Percentage points that hit rates may differ.
    tolerance: f64,
}

/// Of each conversation.
const TURNS: usize = 6;

const SYSTEM_TOKENS: usize = 300;
const FIRST_TOKENS: usize = 700;
const TURN_TOKENS: usize = 90;
const ANSWER_TOKENS: usize = 20;

/// The longest prompts of all conversations fit together.
const FITS: Load = Load { clients: 4, conversations_per_client: 2, tolerance: 0.1 };
/// They need more than twice the cache. What is evicted also depends on who comes first, which no two runs have in common.
const EVICTS: Load = Load { clients: 4, conversations_per_client: 7, tolerance: 3.0 };
/// The same by one client, so that every request meets the cache that the one before has left.
const EVICTS_IN_ORDER: Load = Load { clients: 1, conversations_per_client: 28, tolerance: 0.1 };

const _: () = assert!(FITS.tokens() < KV_TOKENS && EVICTS.tokens() > 2 * KV_TOKENS);

impl Load {
    /// Tokens of all conversations at their ends.
    const fn tokens(self) -> usize {
        let conversation = FIRST_TOKENS + TURNS * ANSWER_TOKENS + (TURNS - 1) * TURN_TOKENS;
        SYSTEM_TOKENS + self.clients * self.conversations_per_client * conversation
    }
}

/// Made-up tokens of the model's vocabulary that depend on the name alone.
fn tokens(name: impl Hash, count: usize) -> Vec<u32> {
    let token = |index: usize| {
        let mut hasher = DefaultHasher::new();
        (&name, index).hash(&mut hasher);
        (100 + hasher.finish() % 1900) as u32
    };
    (0..count).map(token).collect()
}

/// Sends a prompt; the tokens of the answer.
async fn complete(client: &Client, replica: SocketAddr, prompt: &[u32]) -> Result<Vec<u32>> {
    let body =
        json!({ "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": true, "return_token_ids": true });
    let response = client.post(format!("http://{replica}/v1/completions")).json(&body).send().await?;
    let status = response.status();
    let mut answer: Value = response.json().await?;
    ensure!(status.is_success(), "{status}: {answer}");
    serde_json::from_value(answer["choices"][0]["token_ids"].take()).context("the answer's tokens")
}

/// One client: takes turns of its conversations in an order of its own, always the same, one after the other.
async fn play(replica: SocketAddr, seed: u64, number: usize, load: Load) -> Result<()> {
    let client = Client::new();
    let mut conversations: Vec<_> = (0..load.conversations_per_client)
        .map(|conversation| (0, [tokens(seed, SYSTEM_TOKENS), tokens((seed, number, conversation), FIRST_TOKENS)].concat()))
        .collect();
    for pick in tokens((seed, number, "order"), load.conversations_per_client * TURNS) {
        conversations.retain(|(turns, _)| *turns < TURNS);
        let index = pick as usize % conversations.len();
        let (turns, history) = &mut conversations[index];
        if *turns > 0 {
            history.extend(tokens((seed, number, history.len(), "turn"), TURN_TOKENS));
        }
        *turns += 1;
        let answer = complete(&client, replica, history).await?;
        history.extend(answer);
    }
    Ok(())
}

/// What the engine's metrics say of a load: prompt tokens, and the share of them that came from the cache, in per cent.
async fn measure(replica: SocketAddr, seed: u64, load: Load) -> Result<(f64, f64)> {
    let (all, hits) = (prompt_tokens(replica, &[]).await?, cache_hits(replica, "").await?);
    let clients = (0..load.clients).map(|number| play(replica, seed, number, load));
    together(clients).await.into_iter().collect::<Result<()>>()?;
    let (all, hits) = (prompt_tokens(replica, &[]).await? - all, cache_hits(replica, "").await? - hits);
    Ok((all, 100.0 * hits / all))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: cargo xtask test --vllm"]
async fn the_stand_in_has_the_prefix_hits_of_a_real_engine() -> Result<()> {
    let real = start(1, &["--num-gpu-blocks-override", "512"]).await?;
    let alike = ["--kv-tokens", "16384", "--block-size", "32", "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"];
    let replica_args = alike.iter().chain(&["--max-model-len", "16384", "--speed", "50"]).map(|arg| (*arg).to_owned()).collect();
    let stand_in = Stack::start(tools(), StackOptions { replicas: 1, replica_args, ..StackOptions::default() }).await?;
    let (real, stand_in) = (real.replicas[0].1, stand_in.replicas[0].1);
    for (seed, (name, load)) in (1..).zip([("fits", FITS), ("evicts", EVICTS), ("evicts in order", EVICTS_IN_ORDER)]) {
        let ((all, hits), (all_here, hits_here)) = (measure(real, seed, load).await?, measure(stand_in, seed, load).await?);
        println!("{name}: {all} prompt tokens; prefix hits {hits:.2} % on vLLM, {hits_here:.2} % on the stand-in");
        assert_eq!(all, all_here, "{name}: prompt tokens");
        assert!((hits - hits_here).abs() <= load.tolerance, "{name}: {hits:.2} % on vLLM, {hits_here:.2} % on the stand-in");
    }
    Ok(())
}
