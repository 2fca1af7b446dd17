//! The order of the line, and how soon it moves.

use std::time::Duration;

use anyhow::{Context, Result};
use homing_tests::scripted::{Scripted, events, held};
use homing_tests::{all_given_back, sum};
use serde_json::json;
use tokio::time::Instant;

use super::{ONE_FITS, admitting, send};

#[tokio::test(flavor = "multi_thread")]
async fn new_work_goes_in_the_order_it_came_from_both_workers() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let first = send(&scripted, "first");
    let mut there = scripted.arrival().await?;
    let mut others = Vec::new();
    for number in 1..=8 {
        others.push(send(&scripted, &format!("request-{number}")));
        held(&scripted.stack, number).await?;
    }
    assert_eq!(sum(&scripted.stack, "homing_in_flight", &[]).await?, 1, "what waits is in flight nowhere");
    for number in 1..=8 {
        assert!(!scripted.has_arrival(), "nothing goes before there is a place");
        drop(there);
        there = scripted.arrival().await?;
        assert_eq!(there.name, format!("request-{number}"));
    }
    drop(there);
    let answer = first.await??;
    assert_eq!((answer.status, answer.held_ms), (200, None));
    for other in others {
        let answer = other.await??;
        assert_eq!((answer.status, answer.held_ms.is_some()), (200, true));
    }
    all_given_back(&scripted.stack).await?;
    for (event, count) in [("held", 8), ("admitted", 8), ("overdue", 0), ("rejected", 0)] {
        assert_eq!(events(&scripted.stack, event).await?, count, "{event}");
    }
    assert_eq!(sum(&scripted.stack, "homing_errors_total", &[]).await?, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_forgotten_and_the_next_gets_its_place() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let leaves = send(&scripted, "leaves");
    held(&scripted.stack, 1).await?;
    let stays = send(&scripted, "stays");
    held(&scripted.stack, 2).await?;
    leaves.abort();
    held(&scripted.stack, 1).await?;
    assert_eq!(sum(&scripted.stack, "homing_requests_total", &["outcome=\"unserved\""]).await?, 1);
    drop(there);
    assert_eq!(first.await??.status, 200);
    assert_eq!(scripted.arrival().await?.name, "stays");
    assert_eq!(stays.await??.status, 200);
    all_given_back(&scripted.stack).await?;
    assert_eq!(events(&scripted.stack, "admitted").await?, 1);
    assert!(!scripted.has_arrival(), "who left is never sent");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_is_free_is_taken_within_sixty_milliseconds() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let mut clients = vec![send(&scripted, "first")];
    let mut there = scripted.arrival().await?;
    let mut waits = Vec::new();
    for number in 0..40 {
        clients.push(send(&scripted, &format!("request-{number}")));
        held(&scripted.stack, 1).await?;
        let freed = Instant::now();
        drop(there);
        there = scripted.arrival().await?;
        waits.push(there.at.saturating_duration_since(freed));
    }
    drop(there);
    for client in clients {
        assert_eq!(client.await??.status, 200);
    }
    waits.sort_unstable();
    let (median, most) = (waits[waits.len() / 2], waits[waits.len() * 9 / 10]);
    println!("from a place that is free to the next request at the replica: median {median:?}, 90 % within {most:?}");
    assert!(most <= Duration::from_millis(60), "{waits:?}");
    all_given_back(&scripted.stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_keeps_its_place_between_its_turns_while_others_wait() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let url = homing_tests::chat_url(&scripted.stack);
    let turn =
        |name: &str| tokio::spawn(homing_tests::scripted::ask(url.clone(), name.to_owned(), Some("one".to_owned()), super::PROMPT));
    let first = turn("turn-1");
    drop(scripted.arrival().await?);
    assert_eq!(first.await??.status, 200);
    let other = send(&scripted, "other");
    held(&scripted.stack, 1).await?;
    // The next turn comes while the place is kept, and goes before who came earlier.
    let second = turn("turn-2");
    let there = scripted.arrival().await?;
    assert_eq!(there.name, "turn-2");
    drop(there);
    let second = second.await??;
    assert_eq!((second.status, second.held_ms), (200, None));
    // It has ended without notice: after a while its place is another's.
    let there = scripted.arrival().await?;
    assert_eq!(there.name, "other");
    drop(there);
    let other = other.await??;
    assert!(other.held_ms.context("held")? >= 2_000, "{other:?}");
    all_given_back(&scripted.stack).await
}
