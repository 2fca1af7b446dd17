//! Replicas and collectors that go away.

use anyhow::{Context, Result};
use homing_tests::{ROUTE, all_given_back, eventually, fast_stack, metrics, together, turn};
use serde_json::json;
use xtask::stack::{Stack, StackOptions};

/// The replica of this name.
fn index_of(stack: &Stack, name: &str) -> Result<usize> {
    stack.replicas.iter().position(|(_, address)| address.to_string() == name).context("the replica")
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_killed_replica_succeed_elsewhere_and_the_conversation_moves() -> Result<()> {
    let mut stack = fast_stack(StackOptions::default()).await?;
    // Nobody tells the filter: only the list of addresses helps.
    let (mut collector, _) = stack.collector.take().context("the collector")?;
    collector.kill().await?;
    let home = turn(&stack, "moves", 1).await?.replica;
    let index = index_of(&stack, &home)?;
    stack.replicas[index].0.kill().await?;

    let moved = turn(&stack, "moves", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    assert_ne!(moved.replica, home);
    for _ in 0..3 {
        let next = turn(&stack, "moves", 1).await?;
        assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &moved.replica));
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn where_envoy_chooses_a_killed_replica_costs_no_request_either() -> Result<()> {
    // Without a snapshot the filter knows no replica.
    let mut stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    stack.replicas[0].0.kill().await?;
    let stack = std::sync::Arc::new(stack);
    for _ in 0..3 {
        let turns = (0..40).map(|number| {
            let stack = stack.clone();
            async move { turn(&stack, &format!("passes-{number}"), 4).await }
        });
        for turn in together(turns).await {
            let turn = turn?;
            assert_eq!((turn.status, turn.outcome.as_str()), (200, "passed"));
        }
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_hangs_is_left_once_the_collector_notices() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let home = turn(&stack, "leaves", 1).await?.replica;
    let replica = &stack.replicas[index_of(&stack, &home)?].0;
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let state = async || -> Result<String> {
        let pools: serde_json::Value = reqwest::get(format!("http://{console}/api/v1/pools")).await?.json().await?;
        Ok(pools.to_string())
    };
    replica.freeze(true).await?;
    eventually("the collector to call it down", async || Ok(state().await?.contains("\"down\""))).await?;
    // One more exchange, and Envoy knows.
    let version = metrics(&stack).await?["homing_snapshot_version"].clone();
    eventually("two exchanges", async || Ok(metrics(&stack).await?["homing_snapshot_version"][0].1 > version[0].1 + 1)).await?;

    let moved = turn(&stack, "leaves", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    assert_ne!(moved.replica, home);
    let next = turn(&stack, "leaves", 1).await?;
    assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &moved.replica));
    replica.freeze(false).await?;
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_for_a_hung_replica_is_taken_over_by_the_next_address() -> Result<()> {
    let timeout = (format!("{ROUTE}/route/retry_policy/per_try_idle_timeout"), json!("1s"));
    let options = StackOptions { edits: vec![timeout], ..StackOptions::default() };
    let mut stack = fast_stack(options).await?;
    let (mut collector, _) = stack.collector.take().context("the collector")?;
    collector.kill().await?;
    let home = turn(&stack, "waits", 1).await?.replica;
    stack.replicas[index_of(&stack, &home)?].0.freeze(true).await?;

    let moved = turn(&stack, "waits", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    assert_ne!(moved.replica, home);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_collector_no_request_fails_and_conversations_stay() -> Result<()> {
    let mut stack = fast_stack(StackOptions::default()).await?;
    let mut homes = Vec::new();
    for conversation in 0..8 {
        homes.push(turn(&stack, &format!("before-{conversation}"), 1).await?.replica);
    }
    let (mut collector, _) = stack.collector.take().context("the collector")?;
    collector.kill().await?;
    for _ in 0..5 {
        for (conversation, home) in homes.iter().enumerate() {
            let turn = turn(&stack, &format!("before-{conversation}"), 1).await?;
            assert_eq!((turn.status, turn.outcome.as_str(), &turn.replica), (200, "sticky", home));
        }
    }
    for conversation in 0..8 {
        let turn = turn(&stack, &format!("after-{conversation}"), 1).await?;
        assert_eq!((turn.status, turn.outcome.as_str()), (200, "placed"));
    }
    all_given_back(&stack).await
}
