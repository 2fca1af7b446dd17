//! Working sets on stand-in replicas with small caches, and the real collector.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use homing_tests::scripted::{ask, events, held, occupy};
use homing_tests::{all_given_back, chat_body, chat_url, eventually, received, stack_at_speed, together};
use reqwest::{Body, Client};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xtask::stack::{Stack, StackOptions};

use super::admitting;
use crate::bodies::{chunked, hex, large_body};

/// A stack whose replicas have small caches.
pub(super) async fn small(replicas: usize, kv_tokens: usize, speed: f64, options: StackOptions) -> Result<Stack> {
    let replica_args = vec!["--kv-tokens".to_owned(), kv_tokens.to_string()];
    stack_at_speed(StackOptions { replicas, replica_args, ..options }, speed).await
}

/// The turns of one conversation, each with all that was said before.
async fn converse(stack: Arc<Stack>, name: String, turns: usize) -> Result<bool> {
    let client = Client::new();
    let mut messages = Vec::new();
    let mut was_held = false;
    for turn in 0..turns {
        let text = format!("{name} {turn} ").repeat(if turn == 0 { 800 } else { 40 });
        messages.push(json!({ "role": "user", "content": text }));
        let mut body = chat_body("", 32);
        body["messages"] = json!(messages);
        let request = client.post(chat_url(&stack)).header("x-session-id", &name).json(&body);
        let response = request.send().await?.error_for_status()?;
        was_held |= response.headers().contains_key("x-homing-held-ms");
        let answer: Value = response.json().await?;
        messages.push(answer["choices"][0]["message"].clone());
    }
    Ok(was_held)
}

/// The share of prompt tokens that the replicas found in their caches.
async fn hits(stack: &Stack) -> Result<f64> {
    let (mut hits, mut queries) = (0.0, 0.0);
    for (_, replica) in &stack.replicas {
        let text = reqwest::get(format!("http://{replica}/metrics")).await?.text().await?;
        let total = |name: &str| -> Result<f64> {
            let line = text.lines().find(|line| line.starts_with(name)).with_context(|| format!("no {name}"))?;
            Ok(line.rsplit(' ').next().context("a value")?.parse()?)
        };
        hits += total("vllm:prefix_cache_hits_total")?;
        queries += total("vllm:prefix_cache_queries_total")?;
    }
    Ok(hits / queries)
}

/// Twelve conversations of eight turns, of which two replicas hold about five at once: hits, and how many were held.
async fn twelve_conversations(options: StackOptions) -> Result<(f64, usize)> {
    let stack = Arc::new(small(2, 9_000, 20.0, options).await?);
    let all = together((0..12).map(|number| converse(stack.clone(), format!("conversation-{number:02}"), 8))).await;
    let mut were_held = 0;
    for one in all {
        were_held += usize::from(one?);
    }
    all_given_back(&stack).await?;
    Ok((hits(&stack).await?, were_held))
}

#[tokio::test(flavor = "multi_thread")]
async fn more_conversations_than_fit_are_all_answered_and_stay_cached() -> Result<()> {
    let (without, none) = twelve_conversations(StackOptions::default()).await?;
    let (with, were_held) = twelve_conversations(admitting(&json!({}))).await?;
    println!("prefix hits: {:.1} % without admission, {:.1} % with it; {were_held} of 12 were held", 100.0 * without, 100.0 * with);
    assert_eq!(none, 0);
    assert!((3..=11).contains(&were_held), "{were_held} were held");
    assert!(with > 0.75 && with > without + 0.1, "{with} with, {without} without");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn below_the_caches_size_nothing_is_held_and_choices_are_those_without_admission() -> Result<()> {
    let mut stack = small(3, 37_000, 100.0, StackOptions::default()).await?;
    let mut choices = Vec::new();
    for pool in [json!({ "admission": { "mode": "off" } }), json!({ "admission": { "mode": "working_set" } })] {
        stack.restart_envoy(pool).await?;
        let mut chosen = Vec::new();
        for turn in 0..3 {
            for conversation in 0..9 {
                let text = format!("{conversation} {turn} ").repeat(2_500);
                let request = Client::new().post(chat_url(&stack)).header("x-session-id", format!("calm-{conversation}"));
                let response = request.json(&chat_body(&text, 2)).send().await?;
                let turn = homing_tests::Turn::of(&response);
                response.bytes().await?;
                all_given_back(&stack).await?;
                chosen.push((turn.status, turn.outcome, turn.replica));
            }
        }
        assert_eq!(events(&stack, "held").await?, 0);
        choices.push(chosen);
    }
    let placed = choices[0].iter().filter(|(_, outcome, _)| outcome == "placed").count();
    let replicas: BTreeMap<_, usize> = choices[0].iter().fold(BTreeMap::new(), |mut replicas, (_, _, replica)| {
        *replicas.entry(replica).or_default() += 1;
        replicas
    });
    assert_eq!((placed, replicas.len()), (9, 3), "{replicas:?}");
    assert_eq!(choices[0], choices[1]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_megabytes_that_were_held_arrive_byte_for_byte() -> Result<()> {
    let stack = small(1, 37_000, 1.0, admitting(&json!({}))).await?;
    let body = large_body();
    let sha256 = hex(&Sha256::digest(&body));
    let http1 = Client::builder().http1_only().build()?;
    let http2 = Client::builder().http2_prior_knowledge().build()?;
    type Make = fn(&bytes::Bytes) -> Body;
    let (whole, pieces): (Make, Make) = (|body| Body::from(body.clone()), chunked);
    let ways = [
        ("HTTP/1.1 with length", &http1, whole),
        ("HTTP/1.1 chunked", &http1, pieces),
        ("HTTP/2 with length", &http2, whole),
        ("HTTP/2 without length", &http2, pieces),
    ];
    for (name, client, make) in ways {
        let first = occupy(&stack).await?;
        let request = client.post(chat_url(&stack)).header("content-type", "application/json").header("x-session-id", name);
        let answer = tokio::spawn(request.body(make(&body)).send());
        held(&stack, 1).await.context(name)?;
        first.abort();
        let answer = answer.await??;
        assert!(answer.headers().contains_key("x-homing-held-ms"), "{name}: {answer:?}");
        let request = received(stack.replicas[0].1).await?.pop().context("a request")?;
        assert_eq!((&request["body_length"], &request["body_sha256"]), (&json!(body.len()), &json!(sha256)), "{name}");
        all_given_back(&stack).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_collector_what_waits_goes_on() -> Result<()> {
    let mut stack = small(1, 5_000, 1.0, admitting(&json!({}))).await?;
    let first = occupy(&stack).await?;
    let waits = tokio::spawn(ask(chat_url(&stack), "waits".to_owned(), None, 3_000));
    held(&stack, 1).await?;
    let (mut collector, _) = stack.collector.take().context("the collector")?;
    collector.kill().await?;
    first.abort();
    assert_eq!(waits.await??.status, 200);
    // What the caches hold is still known.
    let first = occupy(&stack).await?;
    let waits = tokio::spawn(ask(chat_url(&stack), "waits".to_owned(), None, 3_000));
    held(&stack, 1).await?;
    first.abort();
    assert_eq!(waits.await??.status, 200);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_replica_that_is_restarted_goes_on() -> Result<()> {
    let mut stack = small(1, 5_000, 1.0, admitting(&json!({}))).await?;
    let first = occupy(&stack).await?;
    let waits: Vec<_> = (0..3).map(|number| tokio::spawn(ask(chat_url(&stack), format!("waits-{number}"), None, 3_000))).collect();
    held(&stack, 3).await?;
    first.abort();
    stack.restart_replica(0).await?;
    for waits in waits {
        // One that was sent to the replica before it was killed, or while it was away, may have failed.
        assert!([200, 503].contains(&waits.await??.status));
    }
    eventually("an answer", async || Ok(ask(chat_url(&stack), "after".to_owned(), None, 3_000).await?.status == 200)).await?;
    all_given_back(&stack).await
}
