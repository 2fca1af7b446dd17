//! Routing headers are Homing's own: a client's copies reach nobody.

use anyhow::{Context, Result};
use homing_routing::sync::SYNC_VERSION;
use homing_tests::{Turn, all_given_back, chat_body, chat_url, fast_stack, received};
use reqwest::Client;
use serde_json::json;
use xtask::stack::{MODEL, StackOptions};

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_copies_of_the_routing_headers_reach_no_replica() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    let victim = stack.replicas[2].1.to_string();
    for conversation in [Some("a"), None] {
        let mut request = client.post(chat_url(&stack)).json(&chat_body("hello", 1));
        request = request.header("x-homing-targets", &victim).header("x-data-parallel-rank", "7");
        if let Some(conversation) = conversation {
            request = request.header("x-session-id", conversation);
        }
        let turn = Turn::of(&request.send().await?);
        assert_eq!(turn.status, 200);
        assert!(["placed", "unkeyed"].contains(&turn.outcome.as_str()), "{turn:?}");
        let request = received(turn.replica.parse()?).await?.pop().context("a request")?;
        let names: Vec<_> = request["headers"].as_array().context("headers")?.iter().filter_map(|pair| pair[0].as_str()).collect();
        let leaked: Vec<_> = names.iter().filter(|name| name.starts_with("x-homing") || **name == "x-data-parallel-rank").collect();
        assert_eq!(leaked, Vec::<&&str>::new());
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spoofed_choice_is_not_followed() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    let first = Turn::of(&client.post(chat_url(&stack)).header("x-session-id", "mine").json(&chat_body("x", 1)).send().await?);
    for (_, other) in &stack.replicas {
        let request = client.post(chat_url(&stack)).header("x-session-id", "mine").header("x-homing-targets", other.to_string());
        let turn = Turn::of(&request.json(&chat_body("x", 1)).send().await?);
        assert_eq!((turn.outcome.as_str(), &turn.replica), ("sticky", &first.replica));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_may_name_a_replica_and_is_told_which_ones_there_are() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    for (_, replica) in &stack.replicas {
        let request = client.post(chat_url(&stack)).header("x-homing-replica", replica.to_string()).json(&chat_body("x", 1));
        let turn = Turn::of(&request.send().await?);
        assert_eq!((turn.status, turn.outcome, turn.replica), (200, "pinned".to_owned(), replica.to_string()));
        let request = received(*replica).await?.pop().context("a request")?;
        assert!(!request["headers"].to_string().contains("x-homing"), "{request}");
    }
    for unknown in ["127.0.0.1:1", "somewhere", "\u{e9}"] {
        let response = client.post(chat_url(&stack)).header("x-homing-replica", unknown).json(&chat_body("x", 1)).send().await?;
        assert_eq!(response.status(), 400, "{unknown}");
        let body = response.text().await?;
        assert!(body.contains(&stack.replicas[0].1.to_string()), "{body}");
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_one_endpoint_get_the_rank_header_and_calls_that_ignore_it_get_none() -> Result<()> {
    let replica_args = vec!["--ranks".to_owned(), "2".to_owned()];
    let stack = fast_stack(StackOptions { replicas: 1, replica_args, collector: false, ..StackOptions::default() }).await?;
    let address = stack.replicas[0].1;
    let report = |rank: u16, state: &str| {
        json!({ "replica": format!("{address}#{rank}"), "state": state, "running": 0, "waiting": 0, "kv_usage": 0.0,
                "cache_tokens": 0, "max_num_seqs": 32, "prefix_hit_rate": null, "age_ms": 0 })
    };
    let client = Client::new();
    let sync = async |sequence: u64, state: &str| -> Result<()> {
        let pool = json!({ "cluster": MODEL, "replicas": [report(0, "ready"), report(1, state)] });
        let snapshot = json!({ "version": SYNC_VERSION, "generation": 1, "sequence": sequence, "now_ms": 0, "pause_ms": 250, "pools": [pool] });
        let url = format!("http://{}/homing/v1/sync", stack.control);
        client.post(url).json(&snapshot).send().await?.error_for_status()?;
        Ok(())
    };
    let rank_received = async || -> Result<Option<String>> {
        let request = received(address).await?.pop().context("a request")?;
        let headers = request["headers"].as_array().context("headers")?;
        let rank = headers.iter().find(|pair| pair[0] == "x-data-parallel-rank");
        Ok(rank.and_then(|pair| pair[1].as_str()).map(str::to_owned))
    };
    let send = async |path: &str, headers: &[(&str, &str)]| -> Result<Turn> {
        let mut request = client.post(format!("http://{}{path}", stack.proxy)).json(&chat_body("x", 1));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(Turn::of(&request.send().await?))
    };
    let chat = "/v1/chat/completions";

    sync(1, "ready").await?;
    let mut placed = Vec::new();
    for conversation in ["a", "b"] {
        let turn = send(chat, &[("x-session-id", conversation)]).await?;
        assert_eq!(turn.outcome, "placed");
        assert_eq!(turn.replica, format!("{address}#{}", rank_received().await?.context("a rank")?));
        placed.push(turn.replica);
    }
    placed.sort();
    assert_eq!(placed, [format!("{address}#0"), format!("{address}#1")]);

    let pinned = send(chat, &[("x-data-parallel-rank", "1")]).await?;
    assert_eq!((pinned.status, pinned.outcome.as_str(), pinned.replica), (200, "pinned", format!("{address}#1")));
    assert_eq!(rank_received().await?.as_deref(), Some("1"));
    // vLLM itself refuses a rank that it has not; what the filter refuses reaches nobody.
    let refused = async |rank: &str| -> Result<bool> {
        let before = received(address).await?.len();
        let turn = send(chat, &[("x-data-parallel-rank", rank)]).await?;
        Ok(turn.status == 400 && turn.outcome.is_empty() && received(address).await?.len() == before)
    };
    assert!(refused("7").await?);

    let responses = send("/v1/responses", &[("x-session-id", "c"), ("x-data-parallel-rank", "1")]).await?;
    assert_eq!((responses.outcome.as_str(), responses.replica), ("placed", address.to_string()));
    assert_eq!(rank_received().await?, None);

    // A rank that sleeps takes no turn.
    sync(2, "asleep").await?;
    for conversation in ["a", "b", "new"] {
        assert_eq!(send(chat, &[("x-session-id", conversation)]).await?.replica, format!("{address}#0"), "{conversation}");
    }
    assert!(refused("1").await?);
    all_given_back(&stack).await
}
