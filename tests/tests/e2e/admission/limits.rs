//! What is never held, and what cannot be held any longer.

use std::time::Duration;

use anyhow::Result;
use homing_tests::scripted::{NAME, Scripted, ask, events, held};
use homing_tests::{all_given_back, chat_url, sum};
use reqwest::Client;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::{ONE_FITS, PROMPT, admitting, send};

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_has_waited_for_long_enough_is_sent_all_the_same() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({ "max_wait": "1s" }))).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let began = Instant::now();
    let late = send(&scripted, "late");
    let second = scripted.arrival().await?;
    assert_eq!(second.name, "late");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    drop((there, second));
    assert_eq!(first.await??.status, 200);
    assert!(late.await??.held_ms >= Some(1_000));
    all_given_back(&scripted.stack).await?;
    assert_eq!((events(&scripted.stack, "overdue").await?, events(&scripted.stack, "admitted").await?), (1, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn or_it_is_answered_with_a_429_in_the_clients_own_shape() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({ "max_wait": "1s", "overflow": "reject" }))).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let openai = send(&scripted, "openai");
    let url = format!("http://{}/v1/messages", scripted.stack.proxy);
    let anthropic = tokio::spawn(ask(url, "anthropic".to_owned(), None, PROMPT));

    let (openai, anthropic) = (openai.await??, anthropic.await??);
    for answer in [&openai, &anthropic] {
        assert_eq!((answer.status, answer.retry_after), (429, Some(1)), "{answer:?}");
        assert!(answer.body["error"]["message"].as_str().is_some_and(|message| message.contains("try again in 1 s")), "{answer:?}");
    }
    assert_eq!(
        (&openai.body["error"]["type"], &openai.body["error"]["code"]),
        (&json!("rate_limit_error"), &json!("rate_limit_exceeded"))
    );
    assert_eq!((&anthropic.body["type"], &anthropic.body["error"]["type"]), (&json!("error"), &json!("rate_limit_error")));
    assert!(!scripted.has_arrival());
    drop(there);
    assert_eq!(first.await??.status, 200);

    // The workers go on.
    for number in 0..8 {
        let next = send(&scripted, &format!("next-{number}"));
        drop(scripted.arrival().await?);
        assert_eq!(next.await??.status, 200);
    }
    all_given_back(&scripted.stack).await?;
    assert_eq!(
        (
            events(&scripted.stack, "rejected").await?,
            sum(&scripted.stack, "homing_requests_total", &["outcome=\"unserved\""]).await?
        ),
        (2, 2)
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_line_has_an_end() -> Result<()> {
    for overflow in ["send", "reject"] {
        let keys = json!({ "max_held": 1, "overflow": overflow });
        let mut scripted = Scripted::start(1, ONE_FITS, admitting(&keys)).await?;
        let first = send(&scripted, "first");
        let there = scripted.arrival().await?;
        let waits = send(&scripted, "waits");
        held(&scripted.stack, 1).await?;
        let beyond = send(&scripted, "beyond");
        if overflow == "send" {
            assert_eq!(scripted.arrival().await?.name, "beyond");
        }
        let answer = beyond.await??;
        assert_eq!((answer.status, answer.held_ms), (if overflow == "send" { 200 } else { 429 }, None));
        assert!(!waits.is_finished());
        drop(there);
        assert_eq!(scripted.arrival().await?.name, "waits");
        assert_eq!((first.await??.status, waits.await??.status), (200, 200));
        all_given_back(&scripted.stack).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn short_prompts_silent_calls_and_pinned_requests_are_never_held() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let proxy = scripted.stack.proxy;
    let url = |path: &str| format!("http://{proxy}{path}");
    let long = "x".repeat(PROMPT * 4);
    let client = Client::new();
    let requests = [
        ("short", client.post(url("/v1/chat/completions")).body("x".repeat(2_000))),
        ("silent", client.post(url("/v1/messages/count_tokens")).body(long.clone())),
        (
            "pinned",
            client.post(url("/v1/chat/completions")).header("x-homing-replica", scripted.replicas[0].to_string()).body(long),
        ),
        ("without a body", client.post(url("/v1/chat/completions"))),
        ("GET", client.get(url("/v1/models"))),
    ];
    for (name, request) in requests {
        let answer = tokio::spawn(request.header(NAME, name).send());
        assert_eq!(scripted.arrival().await?.name, name);
        assert_eq!(answer.await??.status(), 200, "{name}");
    }
    drop(there);
    assert_eq!(first.await??.status, 200);
    all_given_back(&scripted.stack).await?;
    assert_eq!(events(&scripted.stack, "held").await?, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_joins_the_line_with_the_end_of_its_body() -> Result<()> {
    let mut scripted = Scripted::start(1, ONE_FITS, admitting(&json!({}))).await?;
    let first = send(&scripted, "slow-but-first");
    let there = scripted.arrival().await?;
    let body = "x".repeat(PROMPT * 4);
    let (begins, ends) = body.split_at(PROMPT * 2);
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{NAME}: slow\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut slow = TcpStream::connect(scripted.stack.proxy).await?;
    slow.write_all(format!("{head}{begins}").as_bytes()).await?;
    let fast = send(&scripted, "fast");
    held(&scripted.stack, 1).await?;
    slow.write_all(ends.as_bytes()).await?;
    held(&scripted.stack, 2).await?;
    drop(there);
    assert_eq!(scripted.arrival().await?.name, "fast");
    assert_eq!(scripted.arrival().await?.name, "slow");
    assert_eq!((first.await??.status, fast.await??.status), (200, 200));
    all_given_back(&scripted.stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_cannot_be_kept_does_not_wait() -> Result<()> {
    let options = admitting(&json!({}));
    let mut pool = options.pool.clone();
    pool["cluster"] = json!(xtask::stack::MODEL);
    let config = json!({ "role": "route", "max_body_bytes": 8_000, "pools": [pool] });
    let mut scripted = Scripted::start(1, ONE_FITS, xtask::stack::StackOptions { filter_config: Some(config), ..options }).await?;
    let url = chat_url(&scripted.stack);
    let first = send(&scripted, "first");
    let there = scripted.arrival().await?;
    let large = tokio::spawn(ask(url, "large".to_owned(), None, PROMPT));
    assert_eq!(scripted.arrival().await?.name, "large");
    drop(there);
    assert_eq!((first.await??.status, large.await??.status), (200, 200));
    all_given_back(&scripted.stack).await?;
    assert_eq!(events(&scripted.stack, "overdue").await?, 1);
    Ok(())
}
