//! End-to-end tests on real vLLM servers. They take minutes, so only `cargo xtask test --vllm` runs them.

mod admission;
mod agreement;
mod conversation;
mod ranks;

use std::net::SocketAddr;

use anyhow::{Context, Result};
use homing_tests::{Turn, all_given_back, eventually, tools};
use serde_json::{Value, json};
use xtask::stack::{ReplicaKind, Stack, StackOptions};
use xtask::vllm::Vllm;

use self::conversation::Conversation;

async fn start(replicas: usize, args: &[&str]) -> Result<Stack> {
    let tools = tools();
    let kind = ReplicaKind::Vllm(Vllm::ensure().await?);
    let replica_args = args.iter().map(|arg| (*arg).to_owned()).collect();
    Stack::start(tools, StackOptions { kind, replicas, replica_args, ..StackOptions::default() }).await
}

/// Prompt tokens that this engine counted, over all series that have these labels.
async fn prompt_tokens(replica: SocketAddr, labels: &[&str]) -> Result<f64> {
    let text = reqwest::get(format!("http://{replica}/metrics")).await?.text().await?;
    let series = text.lines().filter(|line| line.starts_with("vllm:prompt_tokens_by_source_total{"));
    let series = series.filter(|line| labels.iter().all(|label| line.contains(label)));
    series.map(|line| line.rsplit_once(' ').context("a value")?.1.parse::<f64>().context("a number")).sum()
}

/// Prompt tokens that this engine took from its prefix cache, over all its ranks or those whose series have this label.
async fn cache_hits(replica: SocketAddr, label: &str) -> Result<f64> {
    prompt_tokens(replica, &["source=\"local_cache_hit\"", label]).await
}

/// The collector's view of the replicas.
async fn replicas_of_console(stack: &Stack) -> Result<Vec<Value>> {
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let mut status: Value = reqwest::get(format!("http://{console}/api/v1/pools")).await?.json().await?;
    serde_json::from_value(status["pools"][0]["replicas"].take()).context("the pool's replicas")
}

fn index_of(stack: &Stack, turn: &Turn) -> Result<usize> {
    stack.replicas.iter().position(|(_, address)| address.to_string() == turn.replica).with_context(|| format!("{turn:?}"))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: cargo xtask test --vllm"]
async fn conversations_stay_and_find_their_prefix_in_the_cache() -> Result<()> {
    let stack = start(2, &[]).await?;
    let mut homes = Vec::new();
    for id in ["first", "second"] {
        let mut conversation = Conversation::new(id);
        let placed = conversation.turn(&stack).await?;
        assert_eq!((placed.turn.outcome.as_str(), placed.cached_tokens), ("placed", 0));
        let (home, other) = match index_of(&stack, &placed.turn)? {
            0 => (stack.replicas[0].1, stack.replicas[1].1),
            _ => (stack.replicas[1].1, stack.replicas[0].1),
        };
        let (hits, hits_elsewhere) = (cache_hits(home, "").await?, cache_hits(other, "").await?);
        let (mut last_prompt, mut cached) = (placed.prompt_tokens, 0);
        for number in 0..6 {
            let streamed = number % 2 == 1;
            let answer = if streamed { conversation.streamed_turn(&stack).await? } else { conversation.turn(&stack).await? };
            assert_eq!((answer.turn.outcome.as_str(), &answer.turn.replica), ("sticky", &placed.turn.replica));
            assert_eq!(answer.chunks > 2, streamed, "{answer:?}");
            // All of the last prompt but its last, partial block of 32 tokens.
            assert!(answer.cached_tokens + 32 > last_prompt, "of {last_prompt} tokens of the last turn: {answer:?}");
            (last_prompt, cached) = (answer.prompt_tokens, cached + answer.cached_tokens);
        }
        assert_eq!(cache_hits(home, "").await? - hits, cached as f64);
        assert_eq!(cache_hits(other, "").await?, hits_elsewhere);
        homes.push(placed.turn.replica);
    }
    assert_ne!(homes[0], homes[1], "the second conversation goes where the first is not");
    eventually("the collector to see what was served", async || {
        let replicas = replicas_of_console(&stack).await?;
        let seen =
            |replica: &Value| replica["prompt_tokens"].as_u64() > Some(1000) && replica["prefix_hit_rate"].as_f64() > Some(0.5);
        Ok(replicas.len() == 2 && replicas.iter().all(seen))
    })
    .await?;
    for replica in replicas_of_console(&stack).await? {
        assert_eq!((&replica["state"], &replica["cache_tokens"]), (&json!("ready"), &json!(131_072)), "{replica}");
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: cargo xtask test --vllm"]
async fn turns_of_a_killed_server_succeed_elsewhere_and_the_conversation_moves() -> Result<()> {
    let mut stack = start(2, &[]).await?;
    let mut conversation = Conversation::new("moves");
    let home = conversation.turn(&stack).await?.turn;
    let index = index_of(&stack, &home)?;
    stack.replicas[index].0.kill().await?;

    let moved = conversation.streamed_turn(&stack).await?;
    assert_eq!((moved.turn.outcome.as_str(), moved.cached_tokens), ("rehomed", 0));
    assert_ne!(moved.turn.replica, home.replica);
    stack.restart_replica(index).await?;
    let ready = json!("ready");
    let all_ready = async || Ok(replicas_of_console(&stack).await?.iter().all(|replica| replica["state"] == ready));
    eventually("the collector to see it again", all_ready).await?;

    // The conversation stays where its cache is now; a new one takes the empty server.
    let stayed = conversation.turn(&stack).await?;
    assert_eq!((stayed.turn.outcome.as_str(), &stayed.turn.replica), ("sticky", &moved.turn.replica));
    assert!(stayed.cached_tokens > 0, "{stayed:?}");
    let new = Conversation::new("new").turn(&stack).await?;
    assert_eq!((new.turn.outcome.as_str(), &new.turn.replica), ("placed", &home.replica));
    all_given_back(&stack).await
}
