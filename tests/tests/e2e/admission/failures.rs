//! Workers, replicas and collectors that go away while requests wait.

use anyhow::Result;
use homing_tests::scripted::{NAME, Scripted, ask, events, held};
use homing_tests::{MANAGER, all_given_back, eventually, sum};
use reqwest::Client;
use serde_json::json;
use xtask::stack::StackOptions;

use super::{ONE_FITS, admitting, send};

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_at_a_worker_that_traps_is_forgotten_and_the_others_go_on() -> Result<()> {
    let filter = Some(xtask::tools::build_trapping_filter()?);
    // Envoy tells a VM that has failed nothing of a stream that is paused, and nobody else can go on with it: this timer ends it.
    let edits = vec![(format!("{MANAGER}/stream_idle_timeout"), json!("12s"))];
    let mut scripted = Scripted::start(1, ONE_FITS, StackOptions { filter, edits, ..admitting(&json!({})) }).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let mut clients = Vec::new();
    for number in 1..=12 {
        clients.push(send(&scripted, &format!("request-{number}")));
        held(&scripted.stack, number).await?;
    }
    let trap = Client::new().get(format!("http://{}/v1/models", scripted.stack.proxy)).header("x-homing-test-trap", "1");
    // The worker that traps may cut the connection.
    let _ = trap.send().await;
    drop(there);
    let url = homing_tests::chat_url(&scripted.stack);
    let ends = async {
        // The first one may have been at the worker that trapped.
        let _ = first.await?;
        let (mut served, mut cut) = (0, 0);
        for client in clients {
            let served_it = client.await?.is_ok_and(|answer| answer.status == 200);
            *(if served_it { &mut served } else { &mut cut }) += 1;
        }
        assert!(served > 0 && cut > 0, "{served} served and {cut} cut: both workers had some");
        // And new work is admitted, on the worker that has a new VM too.
        for number in 0..8 {
            eventually("an answer", async || {
                let ask = ask(url.clone(), format!("after-{number}"), None, super::PROMPT);
                Ok(ask.await.is_ok_and(|answer| answer.status == 200))
            })
            .await?;
        }
        Ok::<(), anyhow::Error>(())
    };
    tokio::pin!(ends);
    loop {
        tokio::select! {
            ended = &mut ends => break ended?,
            // Answered at once.
            arrival = scripted.arrival() => drop(arrival?),
        }
    }
    all_given_back(&scripted.stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_at_a_replica_that_drains_is_no_place() -> Result<()> {
    let mut scripted = Scripted::start(2, ONE_FITS, admitting(&json!({}))).await?;
    let clients = ["first", "second"].map(|name| send(&scripted, name));
    let mut there = [scripted.arrival().await?, scripted.arrival().await?];
    there.sort_by_key(|arrival| arrival.replica);
    let [drains, stays] = there;
    assert_eq!((drains.replica, stays.replica), (0, 1));
    let waits = send(&scripted, "waits");
    held(&scripted.stack, 1).await?;
    scripted.report(|replica| if replica == 0 { "draining" } else { "ready" }).await?;
    drop(drains);
    eventually("the end of what drained", async || Ok(sum(&scripted.stack, "homing_in_flight", &[]).await? == 1)).await?;
    assert!(!scripted.has_arrival());
    drop(stays);
    let next = scripted.arrival().await?;
    assert_eq!((next.name.as_str(), next.replica), ("waits", 1));
    drop(next);
    assert_eq!(waits.await??.status, 200);
    for client in clients {
        assert_eq!(client.await??.status, 200);
    }
    all_given_back(&scripted.stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_when_no_replica_is_ready_goes_on_when_one_is_again() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let waits = send(&scripted, "waits");
    held(&scripted.stack, 1).await?;
    scripted.report(|_| "down").await?;
    drop(there);
    assert_eq!(first.await??.status, 200);
    eventually("nothing in flight", async || Ok(sum(&scripted.stack, "homing_in_flight", &[]).await? == 0)).await?;
    held(&scripted.stack, 1).await?;
    scripted.report(|_| "ready").await?;
    assert_eq!(scripted.arrival().await?.name, "waits");
    assert_eq!(waits.await??.status, 200);
    all_given_back(&scripted.stack).await?;
    assert_eq!(events(&scripted.stack, "admitted").await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_request_on_a_connection_is_held_like_the_first() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let client = Client::builder().http2_prior_knowledge().build()?;
    let url = homing_tests::chat_url(&scripted.stack);
    let body = homing_tests::chat_body(&"x".repeat(super::PROMPT * 4), 8);
    let send = |name: &str| tokio::spawn(client.post(&url).header(NAME, name).json(&body).send());
    let mut answers = vec![send("request-0")];
    let mut there = scripted.arrival().await?;
    for number in 1..=4 {
        answers.push(send(&format!("request-{number}")));
        held(&scripted.stack, number).await?;
    }
    for number in 1..=4 {
        drop(there);
        there = scripted.arrival().await?;
        assert_eq!(there.name, format!("request-{number}"));
    }
    drop(there);
    for answer in answers {
        assert_eq!(answer.await??.status(), 200);
    }
    all_given_back(&scripted.stack).await
}
