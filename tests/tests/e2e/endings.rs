//! However a stream ends, its in-flight is given back and it is counted once.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use homing_tests::{
    LISTENER, MANAGER, ROUTE, all_given_back, chat_body, chat_url, eventually, fast_stack, stack_at_speed, sum, turn,
};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use xtask::stack::{MODEL, Stack, StackOptions};

/// Sends the start of a request over a connection of its own.
async fn begin(stack: &Stack, start: &str) -> Result<TcpStream> {
    let mut connection = TcpStream::connect(stack.proxy).await?;
    connection.write_all(start.as_bytes()).await?;
    Ok(connection)
}

/// A request that streams many tokens.
fn streaming(conversation: Option<&str>) -> String {
    let body = json!({ "model": MODEL, "stream": true, "max_tokens": 5000, "messages": [{ "role": "user", "content": "hi" }] })
        .to_string();
    let header = conversation.map(|id| format!("x-session-id: {id}\r\n")).unwrap_or_default();
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{header}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Makes every replica misbehave.
async fn fault(stack: &Stack, mode: &str) -> Result<()> {
    for (_, replica) in &stack.replicas {
        let fault = Client::new().post(format!("http://{replica}/debug/fault")).json(&json!({ "mode": mode }));
        fault.send().await?.error_for_status()?;
    }
    Ok(())
}

async fn in_flight(stack: &Stack) -> Result<u64> {
    sum(stack, "homing_in_flight", &[]).await
}

async fn counted(stack: &Stack) -> Result<u64> {
    sum(stack, "homing_requests_total", &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_at_any_phase_leaves_nothing_behind() -> Result<()> {
    let stack = stack_at_speed(StackOptions::default(), 1.0).await?;

    // In the middle of a body that names the conversation: held back, nothing is decided.
    let whole = streaming(None);
    let connection = begin(&stack, &whole[..whole.len() - 20]).await?;
    eventually("the request", async || Ok(proxied(&stack).await? == 1)).await?;
    drop(connection);
    eventually("its end", async || Ok(counted(&stack).await? == 1)).await?;

    // In the middle of a body while the id is in a header: it is already on its way.
    let whole = streaming(Some("a"));
    let connection = begin(&stack, &whole[..whole.len() - 20]).await?;
    eventually("one in flight", async || Ok(in_flight(&stack).await? == 1)).await?;
    drop(connection);
    eventually("its end", async || Ok(counted(&stack).await? == 2)).await?;
    all_given_back(&stack).await?;

    // Before the answer.
    fault(&stack, "hang").await?;
    let connection = begin(&stack, &streaming(Some("b"))).await?;
    eventually("one in flight", async || Ok(in_flight(&stack).await? == 1)).await?;
    drop(connection);
    eventually("its end", async || Ok(counted(&stack).await? == 3)).await?;
    all_given_back(&stack).await?;

    fault(&stack, "none").await?;

    // In the middle of the answer.
    let mut connection = begin(&stack, &streaming(Some("c"))).await?;
    let mut some = [0; 400];
    connection.read_exact(&mut some).await?;
    assert_eq!(in_flight(&stack).await?, 1);
    drop(connection);
    eventually("its end", async || Ok(counted(&stack).await? == 4)).await?;
    all_given_back(&stack).await?;
    assert_eq!(sum(&stack, "homing_requests_total", &["outcome=\"placed\""]).await?, 1, "only the last was served");
    Ok(())
}

/// Requests the proxy has seen.
async fn proxied(stack: &Stack) -> Result<u64> {
    let url = format!("http://{}/stats?format=json&filter=http.proxy.downstream_rq_total", stack.envoy.admin);
    let stats: Value = reqwest::get(url).await?.json().await?;
    stats["stats"][0]["value"].as_u64().context("a count")
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_end_a_body_and_nothing_else() -> Result<()> {
    let trailers = (format!("{MANAGER}/http_protocol_options"), json!({ "enable_trailers": true }));
    let stack = fast_stack(StackOptions { edits: vec![trailers], ..StackOptions::default() }).await?;
    fault(&stack, "hang").await?;
    for (number, header, body) in [
        (1, "x-session-id: a\r\n", json!({ "model": MODEL, "messages": [] })),
        (2, "", json!({ "model": MODEL, "messages": [], "session_id": "b" })),
    ] {
        let body = body.to_string();
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{header}transfer-encoding: chunked\r\n\r\n");
        let chunk = format!("{:x}\r\n{body}\r\n0\r\nx-checksum: 1\r\n\r\n", body.len());
        let connection = begin(&stack, &format!("{head}{chunk}")).await?;
        let arrived = async || -> Result<bool> {
            let mut seen = 0;
            for (_, replica) in &stack.replicas {
                seen += homing_tests::received(*replica).await?.iter().filter(|request| request["path"] != "/health").count();
            }
            Ok(seen == number)
        };
        eventually("the request at a replica", arrived).await?;
        assert_eq!(in_flight(&stack).await?, 1, "request {number}");
        drop(connection);
        all_given_back(&stack).await?;
        eventually("its count", async || Ok(counted(&stack).await? == number as u64)).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_above_envoys_limit_is_counted_and_leaves_nothing_behind() -> Result<()> {
    // The route's, which Envoy 1.36 does not heed, and the listener's.
    let limits = [format!("{ROUTE}/request_body_buffer_limit"), format!("{LISTENER}/per_connection_buffer_limit_bytes")];
    let edits = limits.map(|limit| (limit, json!(100_000))).to_vec();
    let stack = fast_stack(StackOptions { edits, ..StackOptions::default() }).await?;
    let body = chat_body(&"x".repeat(3_000_000), 1).to_string();
    let status = Client::new().post(chat_url(&stack)).header("content-type", "application/json").body(body).send().await?.status();
    assert_eq!(status, 413);
    all_given_back(&stack).await?;
    assert_eq!(sum(&stack, "homing_requests_total", &["outcome=\"unserved\""]).await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_above_the_filters_own_limit_is_routed_unread() -> Result<()> {
    let config = json!({ "role": "route", "max_body_bytes": 10_000, "pools": [{ "cluster": MODEL }] });
    let stack = fast_stack(StackOptions { filter_config: Some(config), ..StackOptions::default() }).await?;
    let body = chat_body(&"x".repeat(20_000), 1).to_string();
    let response = Client::new().post(chat_url(&stack)).header("content-type", "application/json").body(body).send().await?;
    let turn = homing_tests::Turn::of(&response);
    assert_eq!((turn.status, turn.outcome.as_str()), (200, "unkeyed"));
    assert_eq!(sum(&stack, "homing_errors_total", &["kind=\"body_too_large\""]).await?, 1);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_resets_every_request_loses_them_to_the_next_address() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let home = turn(&stack, "reset", 1).await?.replica;
    let fault = json!({ "mode": "reset" });
    Client::new().post(format!("http://{home}/debug/fault")).json(&fault).send().await?.error_for_status()?;
    let moved = turn(&stack, "reset", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    all_given_back(&stack).await?;
    assert_eq!(counted(&stack).await?, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_fails_fast_does_not_attract_new_conversations() -> Result<()> {
    let stack = fast_stack(StackOptions { concurrency: 1, ..StackOptions::default() }).await?;
    let broken = stack.replicas[0].1;
    let fault = json!({ "mode": "error500" });
    Client::new().post(format!("http://{broken}/debug/fault")).json(&fault).send().await?.error_for_status()?;
    let mut failed = 0;
    for conversation in 0..60 {
        failed += u32::from(turn(&stack, &format!("new-{conversation}"), 1).await?.status == 500);
    }
    assert!((1..=6).contains(&failed), "{failed} of 60 failed");
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clients_pin_and_provoke_sends_nobody_away() -> Result<()> {
    let stack = fast_stack(StackOptions { concurrency: 1, ..StackOptions::default() }).await?;
    let home = turn(&stack, "stays", 1).await?.replica;
    let fault = async |mode| -> Result<()> {
        let fault = json!({ "mode": mode });
        Client::new().post(format!("http://{home}/debug/fault")).json(&fault).send().await?.error_for_status()?;
        Ok(())
    };
    fault("error500").await?;
    for _ in 0..8 {
        let request = Client::new().post(chat_url(&stack)).header("x-homing-replica", &home).json(&chat_body("x", 1));
        assert_eq!(request.send().await?.status(), 500);
    }
    fault("none").await?;
    let next = turn(&stack, "stays", 1).await?;
    assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &home));
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgraded_connection_is_in_flight_until_it_ends() -> Result<()> {
    // A replica that upgrades and echoes.
    let upstream = TcpListener::bind("127.0.0.1:0").await?;
    let address = upstream.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = upstream.accept().await {
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while !seen.ends_with(b"\r\n\r\n") {
                    seen.push(connection.read_u8().await?);
                }
                connection
                    .write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
                    .await?;
                let (mut reader, mut writer) = connection.split();
                tokio::io::copy(&mut reader, &mut writer).await
            });
        }
    });
    let endpoint =
        json!({ "endpoint": { "address": { "socket_address": { "address": "127.0.0.1", "port_value": address.port() } } } });
    let edits = vec![
        (format!("{MANAGER}/upgrade_configs"), json!([{ "upgrade_type": "websocket" }])),
        ("/static_resources/clusters/0/load_assignment/endpoints/0/lb_endpoints".to_owned(), json!([endpoint])),
        ("/static_resources/clusters/0/health_checks".to_owned(), json!([])),
    ];
    let pool = json!({ "replicas": [address.to_string()] });
    let stack = fast_stack(StackOptions { replicas: 1, collector: false, edits, pool, ..StackOptions::default() }).await?;

    let upgrade = "GET /v1/realtime HTTP/1.1\r\nhost: a\r\nx-session-id: ws\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let mut connection = begin(&stack, upgrade).await?;
    let mut answer = [0; 12];
    connection.read_exact(&mut answer).await?;
    assert_eq!(&answer, b"HTTP/1.1 101");
    connection.write_all(b"ping").await?;
    assert_eq!(in_flight(&stack).await?, 1);
    drop(connection);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_trapped_vm_held_is_given_back_within_twenty_seconds() -> Result<()> {
    let filter = xtask::tools::build_trapping_filter()?;
    let stack = Arc::new(stack_at_speed(StackOptions { filter: Some(filter), ..StackOptions::default() }, 1.0).await?);
    // Streams on both workers.
    let mut streams = Vec::new();
    for conversation in 0..16 {
        let mut stream = begin(&stack, &streaming(Some(&format!("trap-{conversation}")))).await?;
        stream.read_u8().await?;
        streams.push(stream);
    }
    assert_eq!(in_flight(&stack).await?, 16);

    // Traps until both workers have lost their VMs; a worker that has lost its own answers 503 until it has a new one.
    let started = Instant::now();
    eventually("leaked counts to be found", async || {
        let request = Client::new().get(format!("http://{}/v1/models", stack.proxy)).header("x-homing-test-trap", "1");
        // The worker that traps may cut the connection.
        let _ = request.send().await;
        Ok(sum(&stack, "homing_errors_total", &["kind=\"leak\""]).await? > 0)
    })
    .await?;
    drop(streams);
    eventually("counts to be zero", async || Ok(in_flight(&stack).await? == 0)).await?;
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());

    // And the filter routes again.
    eventually("a turn", async || {
        let turn = turn(&stack, "after", 1).await?;
        Ok(turn.status == 200 && ["placed", "sticky"].contains(&turn.outcome.as_str()))
    })
    .await?;
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_conversations_survive_aborts_and_a_replica_that_is_killed_and_restarted() -> Result<()> {
    let mut stack = stack_at_speed(StackOptions::default(), 100.0).await?;
    let url = chat_url(&stack);
    let conversations = (0..200_u64).map(|number| {
        let url = url.clone();
        tokio::spawn(async move {
            let client = Client::builder().pool_max_idle_per_host(0).build()?;
            let mut statuses = Vec::new();
            for turn in 0..5_u64 {
                let body = json!({ "model": MODEL, "stream": true, "max_tokens": 40,
                                   "messages": [{ "role": "user", "content": format!("conversation {number} turn {turn}") }] });
                let request = client.post(&url).header("x-session-id", format!("chaos-{number}")).json(&body).send();
                // Every seventh turn is given up after a moment.
                let patience = if (number + turn) % 7 == 0 { 5 + number % 40 } else { 60_000 };
                let answer = tokio::time::timeout(std::time::Duration::from_millis(patience), async {
                    let response = request.await?;
                    let status = response.status().as_u16();
                    // A stream that had begun may break when its replica is killed.
                    let _ = response.bytes().await;
                    Ok::<_, reqwest::Error>(status)
                });
                if let Ok(status) = answer.await {
                    statuses.push(status?);
                }
            }
            Ok::<_, anyhow::Error>(statuses)
        })
    });
    let conversations: Vec<_> = conversations.collect();
    let stirred = async {
        eventually("some load", async || Ok(counted(&stack).await? > 100)).await?;
        stack.replicas[1].0.kill().await?;
        eventually("more load", async || Ok(counted(&stack).await? > 300)).await?;
        stack.restart_replica(1).await
    };
    stirred.await?;
    let mut answered = 0;
    for conversation in conversations {
        for status in conversation.await?? {
            assert_eq!(status, 200);
            answered += 1;
        }
    }
    assert!(answered > 800, "{answered} answers");
    all_given_back(&stack).await?;
    let sent = proxied(&stack).await?;
    eventually("every request to be counted", async || Ok(counted(&stack).await? == sent)).await?;
    assert_eq!(sum(&stack, "homing_errors_total", &["kind=\"host\""]).await?, 0);
    Ok(())
}
