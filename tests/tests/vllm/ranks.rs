//! One server with two data-parallel ranks behind its port: each is a replica.

use anyhow::{Context, Result};
use homing_tests::{Turn, all_given_back, chat_body, chat_url, eventually, sum};
use reqwest::Client;
use serde_json::{Value, json};
use xtask::stack::{MODEL, Stack};

use super::{cache_hits, prompt_tokens, replicas_of_console, start};

/// A turn of Anthropic's API, which names the conversation in the body: its routing, and tokens found in the cache.
async fn messages_turn(stack: &Stack, id: &str) -> Result<(Turn, u64)> {
    let text = format!("{id} is the name of this conversation. ").repeat(40);
    let body = json!({
        "model": MODEL, "max_tokens": 8, "metadata": { "user_id": format!("user_x_account__session_{id}") },
        "messages": [{ "role": "user", "content": text }],
    });
    let response = Client::new().post(format!("http://{}/v1/messages", stack.proxy)).json(&body).send().await?;
    let turn = Turn::of(&response);
    let answer: Value = response.json().await.unwrap_or_default();
    Ok((turn, answer["usage"]["cache_read_input_tokens"].as_u64().unwrap_or(0)))
}

/// A chat request that names a rank.
async fn pinned(stack: &Stack, rank: usize, body: &Value) -> Result<(Turn, String)> {
    let request = Client::new().post(chat_url(stack)).header("x-data-parallel-rank", rank.to_string());
    let response = request.json(body).send().await?;
    Ok((Turn::of(&response), response.text().await?))
}

async fn conversations_have_ranks_as_homes(stack: &Stack) -> Result<()> {
    let server = stack.replicas[0].1;
    let mut homes = Vec::new();
    for id in ["first", "second"] {
        for outcome in ["placed", "sticky", "sticky", "sticky"] {
            let (turn, cached) = messages_turn(stack, id).await?;
            assert_eq!((turn.status, turn.outcome.as_str()), (200, outcome));
            assert_eq!(cached > 0, outcome == "sticky");
            if outcome == "placed" {
                homes.push(turn.replica);
            } else {
                assert_eq!(Some(&turn.replica), homes.last());
            }
        }
    }
    homes.sort();
    assert_eq!(homes, [format!("{server}#0"), format!("{server}#1")]);
    for engine in ["engine=\"0\"", "engine=\"1\""] {
        assert!(cache_hits(server, engine).await? > 0.0, "{engine} served no turn from its cache");
    }
    Ok(())
}

async fn a_named_rank_streams_its_answer(stack: &Stack) -> Result<()> {
    let server = stack.replicas[0].1;
    let mut body = chat_body("who serves this?", 20);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    for rank in [1, 0, 1] {
        let engine = format!("engine=\"{rank}\"");
        let before = prompt_tokens(server, &[&engine]).await?;
        let (turn, text) = pinned(stack, rank, &body).await?;
        assert_eq!((turn.outcome.as_str(), turn.replica), ("pinned", format!("{server}#{rank}")));
        assert!(text.ends_with("data: [DONE]\n\n") && text.matches("\"finish_reason\":null").count() > 10, "{text}");
        // Engines publish after the step, the server some time later.
        eventually("the engine to have counted it", async || Ok(prompt_tokens(server, &[&engine]).await? > before)).await?;
    }
    Ok(())
}

async fn errors_are_the_servers_own(stack: &Stack) -> Result<()> {
    let mut unknown = chat_body("hello", 4);
    unknown["model"] = "nope".into();
    for (body, status, kind) in [(unknown, 404, "NotFoundError"), (chat_body("hello", 1_000_000), 400, "BadRequestError")] {
        let (turn, text) = pinned(stack, 1, &body).await?;
        assert_eq!((turn.status, turn.outcome.as_str()), (status, "pinned"), "{text}");
        assert!(text.contains(kind), "{text}");
    }
    // The filter knows that there is no such rank, and says which there are.
    let (turn, text) = pinned(stack, 2, &chat_body("hello", 4)).await?;
    assert_eq!((turn.status, turn.outcome.as_str()), (400, ""));
    assert!(text.contains(&format!("{}#1", stack.replicas[0].1)), "{text}");
    Ok(())
}

async fn conversations_return_after_a_restart(stack: &mut Stack) -> Result<()> {
    let (before, _) = messages_turn(stack, "first").await?;
    stack.replicas[0].0.kill().await?;
    let unserved = async |stack: &Stack| sum(stack, "homing_requests_total", &["outcome=\"unserved\""]).await;
    let count = unserved(stack).await?;
    let (turn, _) = messages_turn(stack, "first").await?;
    assert_eq!((turn.status, unserved(stack).await?), (503, count + 1), "{turn:?}");

    stack.restart_replica(0).await?;
    let ranks = async || -> Result<Vec<Value>> { replicas_of_console(stack).await };
    let ready = json!("ready");
    let both_ready = async || {
        let ranks = ranks().await?;
        Ok(ranks.len() == 2 && ranks.iter().all(|rank| rank["state"] == ready))
    };
    eventually("both ranks to be ready again", both_ready).await?;
    // Its own rank has forgotten it, so any may have it now; what matters is that it is at home there.
    let (turn, cached) = messages_turn(stack, "first").await?;
    assert_eq!((turn.status, cached), (200, 0), "{turn:?} after {before:?}");
    let (next, cached) = messages_turn(stack, "first").await?;
    assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &turn.replica));
    assert!(cached > 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: cargo xtask test --vllm"]
async fn every_rank_of_a_data_parallel_server_is_a_replica() -> Result<()> {
    let mut stack = start(1, &["--data-parallel-size", "2"]).await?;
    let replicas = replicas_of_console(&stack).await?;
    assert_eq!(replicas.len(), 2, "known before the first request: {replicas:?}");
    conversations_have_ranks_as_homes(&stack).await.context("homes")?;
    a_named_rank_streams_its_answer(&stack).await.context("streaming")?;
    errors_are_the_servers_own(&stack).await.context("errors")?;
    conversations_return_after_a_restart(&mut stack).await.context("a restart")?;
    all_given_back(&stack).await
}
