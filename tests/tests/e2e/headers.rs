//! Routing headers are Homing's own: a client's copies reach nobody.

use anyhow::{Context, Result};
use homing_tests::{Turn, all_given_back, chat_body, chat_url, fast_stack, received};
use reqwest::Client;
use xtask::stack::StackOptions;

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
