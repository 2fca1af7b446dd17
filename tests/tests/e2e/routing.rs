//! Where conversations go.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use homing_tests::{all_given_back, eventually, fast_stack, stack_at_speed, sum, together, turn};
use serde_json::json;
use xtask::stack::StackOptions;

#[tokio::test(flavor = "multi_thread")]
async fn twenty_conversations_stay_at_home_for_five_turns_over_two_workers() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let mut homes = BTreeMap::new();
    for number in 0..5 {
        for conversation in 0..20 {
            let turn = turn(&stack, &format!("conversation-{conversation}"), 4).await?;
            assert_eq!(turn.status, 200);
            assert_eq!(turn.outcome, if number == 0 { "placed" } else { "sticky" });
            assert_eq!(homes.entry(conversation).or_insert(turn.replica.clone()), &turn.replica);
        }
    }
    assert_eq!(homes.values().collect::<BTreeSet<_>>().len(), 4, "every replica has conversations: {homes:?}");
    all_given_back(&stack).await?;
    assert_eq!(sum(&stack, "homing_requests_total", &["outcome=\"placed\""]).await?, 20);
    assert_eq!(sum(&stack, "homing_requests_total", &["outcome=\"sticky\""]).await?, 80);
    assert_eq!(sum(&stack, "homing_requests_total", &[]).await?, 100);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_new_conversations_one_after_another_are_two_a_replica() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let mut placed: BTreeMap<String, u32> = BTreeMap::new();
    for conversation in 0..8 {
        *placed.entry(turn(&stack, &format!("new-{conversation}"), 4).await?.replica).or_default() += 1;
    }
    assert_eq!(placed.values().collect::<Vec<_>>(), [&2; 4], "{placed:?}");
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_eight_new_conversations_puts_no_more_than_three_on_a_replica() -> Result<()> {
    let stack = std::sync::Arc::new(stack_at_speed(StackOptions::default(), 10.0).await?);
    for burst in 0..5 {
        let turns = (0..8).map(|conversation| {
            let stack = stack.clone();
            async move { turn(&stack, &format!("burst-{burst}-{conversation}"), 64).await }
        });
        let mut placed: BTreeMap<String, u32> = BTreeMap::new();
        for turn in together(turns).await {
            *placed.entry(turn?.replica).or_default() += 1;
        }
        assert!(placed.values().all(|count| *count <= 3), "burst {burst}: {placed:?}");
        all_given_back(&stack).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_home_spills_a_turn_and_gets_the_next_one_back() -> Result<()> {
    let pool = json!({ "spill_threshold": 1, "spill_margin": 1 });
    let stack = std::sync::Arc::new(stack_at_speed(StackOptions { pool, ..StackOptions::default() }, 10.0).await?);
    let mut homes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for number in 0..12 {
        let conversation = format!("spill-{number}");
        homes.entry(turn(&stack, &conversation, 1).await?.replica).or_default().push(conversation);
    }
    let (home, [first, second, third]) =
        homes.iter().find_map(|(home, all)| Some((home, all.first_chunk::<3>()?))).context("a replica with three")?;

    // Two long turns fill the home.
    let long = [first, second].map(|conversation| {
        let (stack, conversation) = (stack.clone(), conversation.clone());
        tokio::spawn(async move { turn(&stack, &conversation, 1000).await })
    });
    let replica = format!("replica=\"{home}\"");
    eventually("two in flight", async || Ok(sum(&stack, "homing_in_flight", &[&replica]).await? == 2)).await?;
    let spilled = turn(&stack, third, 1).await?;
    assert_eq!((spilled.status, spilled.outcome.as_str()), (200, "spilled"));
    assert_ne!(&spilled.replica, home);

    for task in long {
        let turn = task.await??;
        assert_eq!((turn.outcome.as_str(), &turn.replica), ("sticky", home));
    }
    let back = turn(&stack, third, 1).await?;
    assert_eq!((back.outcome.as_str(), &back.replica), ("sticky", home));
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn when_every_replica_is_full_nothing_moves() -> Result<()> {
    let pool = json!({ "spill_threshold": 0, "spill_margin": 1 });
    let options = StackOptions { pool, replicas: 2, ..StackOptions::default() };
    let stack = std::sync::Arc::new(stack_at_speed(options, 10.0).await?);
    let mut homes = BTreeMap::new();
    for number in 0..8 {
        let conversation = format!("full-{number}");
        homes.insert(conversation.clone(), turn(&stack, &conversation, 1).await?.replica);
    }
    let turns = homes.clone().into_iter().map(|(conversation, home)| {
        let stack = stack.clone();
        async move { Ok::<_, anyhow::Error>((home, turn(&stack, &conversation, 500).await?)) }
    });
    let mut stayed = 0;
    for turn in together(turns).await {
        let (home, turn) = turn?;
        stayed += u32::from(turn.replica == home);
    }
    // The first turns to arrive may find the other replica still empty; from then on both are full.
    assert!(stayed >= 6, "{stayed} of 8 stayed");
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_affinity_off_envoy_chooses_and_requests_are_counted_all_the_same() -> Result<()> {
    let stack = fast_stack(StackOptions { pool: json!({ "affinity": false }), ..StackOptions::default() }).await?;
    let mut replicas = BTreeSet::new();
    for _ in 0..40 {
        let turn = turn(&stack, "same", 1).await?;
        assert_eq!((turn.status, turn.outcome.as_str()), (200, "passed"));
        replicas.insert(turn.replica);
    }
    assert!(replicas.len() > 1, "{replicas:?}");
    all_given_back(&stack).await?;
    assert_eq!(sum(&stack, "homing_requests_total", &["outcome=\"passed\""]).await?, 40);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn held_conversations_are_counted() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    for conversation in 0..6 {
        turn(&stack, &format!("held-{conversation}"), 1).await?;
    }
    eventually("six held", async || Ok(sum(&stack, "homing_held_conversations", &[]).await? == 6)).await
}
