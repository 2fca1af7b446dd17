//! Clients that mean harm: they get an answer, cost no more than others, and take nothing from them.

use std::io::Write as _;

use anyhow::{Context, Result};
use flate2::{Compression, write::GzEncoder};
use homing_tests::{Turn, all_given_back, chat_body, chat_url, eventually, fast_stack, received, sum, together, turn};
use reqwest::Client;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use xtask::stack::{MODEL, Stack, StackOptions};

use crate::bodies::hex;

async fn envoys_memory(stack: &Stack) -> Result<u64> {
    let memory: serde_json::Value = reqwest::get(format!("http://{}/memory", stack.envoy.admin)).await?.json().await?;
    memory["allocated"].as_str().and_then(|bytes| bytes.parse().ok()).context("a number of bytes")
}

/// `count` requests that generate nothing long, each of a conversation of its own.
async fn flood(stack: &Stack, prefix: &str, count: usize) -> Result<()> {
    let client = Client::builder().pool_max_idle_per_host(8).build()?;
    for batch in (0..count).collect::<Vec<_>>().chunks(16) {
        let turns = batch.iter().map(|number| {
            let (client, url, id) = (client.clone(), chat_url(stack), format!("{prefix}-{number}"));
            async move { client.post(url).header("x-session-id", id).json(&chat_body("hi", 1)).send().await?.bytes().await }
        });
        for answer in together(turns).await {
            answer?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_new_conversations_takes_no_memory() -> Result<()> {
    let filter = json!({ "role": "route", "max_conversations": 256, "pools": [{ "cluster": MODEL, "max_num_seqs": 32 }] });
    let stack = fast_stack(StackOptions { filter_config: Some(filter), ..StackOptions::default() }).await?;
    // As many as the table holds, so that everything that grows with use has grown.
    flood(&stack, "first", 600).await?;
    let before = envoys_memory(&stack).await?;
    flood(&stack, "then", 2_000).await?;
    let after = envoys_memory(&stack).await?;
    assert!(after < before + (2 << 20), "{before} bytes before, {after} after");
    assert_eq!(sum(&stack, "homing_requests_total", &[]).await?, 2_600);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_that_goes_on_survives_a_flood_of_as_many_as_the_table_holds() -> Result<()> {
    let filter = json!({ "role": "route", "max_conversations": 1024, "pools": [{ "cluster": MODEL, "max_num_seqs": 32 }] });
    let stack = fast_stack(StackOptions { filter_config: Some(filter), ..StackOptions::default() }).await?;
    let home = turn(&stack, "mine", 1).await?.replica;
    for round in 0..4 {
        // An entry's last turn is written in whole seconds, and one that is as old as others may go.
        flood(&stack, &format!("round-{round}"), 250).await?;
        let mine = turn(&stack, "mine", 1).await?;
        assert_eq!((mine.outcome.as_str(), &mine.replica), ("sticky", &home), "round {round}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_body_is_passed_on_as_it_is() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    // 64 MiB that fit into 64 KiB: nobody between the client and the replica unpacks it.
    let mut bomb = GzEncoder::new(Vec::new(), Compression::best());
    for _ in 0..64 {
        bomb.write_all(&[b' '; 1 << 20])?;
    }
    let bomb = bomb.finish()?;
    let before = envoys_memory(&stack).await?;
    let request =
        Client::new().post(chat_url(&stack)).header("content-encoding", "gzip").header("content-type", "application/json");
    let turn = Turn::of(&request.body(bomb.clone()).send().await?);
    assert_eq!((turn.outcome.as_str(), turn.source.as_str()), ("unkeyed", "none"));
    let sent = received(turn.replica.parse()?).await?.pop().context("a request")?;
    assert_eq!(sent["body_sha256"], json!(hex(&Sha256::digest(&bomb))));
    assert!(envoys_memory(&stack).await? < before + (8 << 20));
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn more_headers_than_envoy_takes_are_refused_and_as_many_as_it_takes_are_routed() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    let with = |count: usize, size: usize| {
        let request = client.post(chat_url(&stack)).json(&chat_body("hi", 1));
        (0..count).fold(request, |request, number| request.header(format!("x-session-id-{number}"), "v".repeat(size)))
    };
    assert_eq!(Turn::of(&with(80, 600).send().await?).status, 200);
    assert_eq!(with(300, 10).send().await?.status(), 431);
    assert_eq!(with(10, 20_000).send().await?.status(), 431);
    // An id of 50,000 bytes is text, not an id; and what is not UTF-8 is an id like any other.
    let long = client.post(chat_url(&stack)).header("x-session-id", "i".repeat(50_000)).json(&chat_body("hi", 1));
    assert_eq!(Turn::of(&long.send().await?).source, "fingerprint");
    let mut raw = TcpStream::connect(stack.proxy).await?;
    let body = chat_body("hi", 1).to_string();
    raw.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-session-id: \xff\xfe\x80\r\n").await?;
    raw.write_all(format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    let mut answer = Vec::new();
    raw.read_to_end(&mut answer).await?;
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(sum(&stack, "homing_errors_total", &[]).await?, 0);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_log_and_no_statistic_has_an_id_a_prompt_or_a_token_in_it() -> Result<()> {
    let token = "the-control-token";
    let stack = fast_stack(StackOptions { token: token.into(), ..StackOptions::default() }).await?;
    let secrets = ["the-session-id", "the-prompt-text", "the-api-key", token];
    let request = |body: String| {
        let request = Client::new().post(chat_url(&stack)).header("x-session-id", "the-session-id");
        request.header("authorization", "Bearer the-api-key").header("content-type", "application/json").body(body)
    };
    request(chat_body("the-prompt-text", 1).to_string()).send().await?.bytes().await?;
    request("{\"metadata\": the-prompt-text".to_owned()).send().await?.bytes().await?;
    request(chat_body("the-prompt-text", 1).to_string()).header("x-homing-replica", "the-session-id").send().await?.bytes().await?;
    // What the control listener refuses is told by the collector and by Envoy.
    let control = format!("http://{}/homing/v1/sync", stack.control);
    Client::new().post(&control).header("authorization", "Bearer the-api-key").body("the-prompt-text").send().await?;
    Client::new().post(&control).bearer_auth(token).body("{\"version\": \"the-prompt-text\"}").send().await?;
    let console = stack.collector.as_ref().context("a collector")?.1;
    let asked = [
        format!("http://{}/stats/prometheus", stack.envoy.admin),
        format!("http://{console}/api/v1/pools"),
        format!("http://{console}/metrics"),
    ];
    eventually("the requests to be counted", async || Ok(sum(&stack, "homing_requests_total", &[]).await? >= 2)).await?;
    for url in asked {
        let text = reqwest::get(&url).await?.text().await?;
        for secret in secrets {
            assert!(!text.contains(secret), "{secret} stands in {url}");
        }
    }
    let mut logs = 0;
    for entry in std::fs::read_dir(stack.dir.path())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            logs += 1;
            let text = std::fs::read_to_string(&path)?;
            for secret in secrets {
                assert!(!text.contains(secret), "{secret} stands in {}", path.display());
            }
        }
    }
    assert!(logs >= 2, "{logs} logs");
    Ok(())
}
