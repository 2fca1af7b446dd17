//! What is held, and why, is seen from outside.

use anyhow::{Context, Result};
use homing_tests::scripted::{ask, events, held, occupy};
use homing_tests::{all_given_back, chat_url, eventually};
use serde_json::{Value, json};
use xtask::stack::{MODEL, Stack};

use super::stand_ins::small;
use super::{PROMPT, admitting};

async fn from_collector(stack: &Stack, path: &str) -> Result<String> {
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    Ok(reqwest::get(format!("http://{console}{path}")).await?.text().await?)
}

async fn pool(stack: &Stack) -> Result<Value> {
    Ok(serde_json::from_str(&from_collector(stack, &format!("/api/v1/pools/{MODEL}")).await?)?)
}

/// Waits until the API's pool is as described, and returns it.
async fn until(stack: &Stack, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
    let mut now = Value::Null;
    eventually(what, async || {
        now = pool(stack).await?;
        Ok(holds(&now))
    })
    .await?;
    Ok(now)
}

fn oldest_ms(pool: &Value) -> u64 {
    pool["admission"]["oldest_held_ms"].as_u64().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_and_the_metrics_show_who_is_held_for_how_long_and_why_and_what_is_active() -> Result<()> {
    let mut stack = small(1, 5_000, 1.0, admitting(&json!({}))).await?;
    let idle = until(&stack, "a pool that admits", |pool| pool["admission"]["active_context_tokens"] == 0).await?;
    assert_eq!((&idle["admission"]["held"], &idle["admission"]["oldest_held_ms"]), (&json!(0), &Value::Null));

    let first = occupy(&stack).await?;
    let active = until(&stack, "an active conversation", |pool| pool["admission"]["active_conversations"] == 1).await?;
    let replica = &active["replicas"][0];
    let tokens = replica["active_context_tokens"].as_u64().context("active context")?;
    assert!((2_500..=5_000).contains(&tokens), "{active:#}");
    let usage = tokens as f64 / replica["cache_tokens"].as_f64().context("a cache")?;
    assert_eq!((&replica["active_conversations"], active["admission"]["usage"].as_f64()), (&json!(1), Some(usage)));

    let second = tokio::spawn(ask(chat_url(&stack), "second".to_owned(), Some("second".to_owned()), PROMPT));
    held(&stack, 1).await?;
    let waits = until(&stack, "one held", |pool| pool["admission"]["held"] == 1).await?;
    assert_eq!(waits["admission"]["by_reason"], json!({ "no_room": 1, "behind_others": 0, "turns_used": 0, "outgrown": 0 }));
    until(&stack, "its age to rise", |pool| oldest_ms(pool) > oldest_ms(&waits) + 500).await?;
    assert_eq!((events(&stack, "held_no_room").await?, events(&stack, "held").await?), (1, 1));
    let metrics = from_collector(&stack, "/metrics").await?;
    let series = format!("homing_collector_pool_held_requests{{pool=\"{MODEL}\",reason=\"no_room\"}} 1");
    assert!(metrics.lines().any(|line| line.starts_with(&series)), "{metrics}");

    first.abort();
    assert_eq!(second.await??.status, 200);
    let after = until(&stack, "nobody to be held", |pool| pool["admission"]["held"] == 0).await?;
    assert_eq!(after["admission"]["oldest_held_ms"], Value::Null);
    // The second one's place ends when its next turn has not come.
    until(&stack, "nothing to be active", |pool| pool["admission"]["active_context_tokens"] == 0).await?;
    all_given_back(&stack).await?;

    stack.restart_envoy(json!({})).await?;
    let off = until(&stack, "a pool that admits everything", |pool| {
        pool["admission"].is_null() && pool["routing"]["envoys_connected"] == 1
    })
    .await?;
    assert!(off["replicas"][0]["active_context_tokens"].is_null());
    Ok(())
}
