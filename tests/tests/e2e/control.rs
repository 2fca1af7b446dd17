//! The control listener takes good snapshots and nothing else.

use anyhow::Result;
use homing_tests::{eventually, fast_stack, metrics, sum, turn};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use xtask::stack::{MODEL, Stack, StackOptions};

fn snapshot(stack: &Stack, sequence: u64) -> Value {
    let replica = |address: &std::net::SocketAddr| {
        json!({ "replica": address.to_string(), "state": "ready", "running": 0, "waiting": 0, "kv_usage": 0.0,
                "cache_tokens": 36000, "max_num_seqs": 32, "prefix_hit_rate": null, "age_ms": 5 })
    };
    let replicas: Vec<_> = stack.replicas.iter().map(|(_, address)| replica(address)).collect();
    json!({ "version": 2, "generation": 10, "sequence": sequence, "now_ms": 0, "pause_ms": 250, "pools": [{ "cluster": MODEL, "replicas": replicas }] })
}

async fn post(stack: &Stack, body: impl Into<reqwest::Body>) -> Result<Response> {
    Ok(Client::new().post(format!("http://{}/homing/v1/sync", stack.control)).body(body).send().await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_takes_effect_at_once_and_is_answered_with_counts() -> Result<()> {
    let stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    let answer: Value = post(&stack, snapshot(&stack, 1).to_string()).await?.error_for_status()?.json().await?;
    assert_eq!(answer["pools"][0]["replicas"].as_array().map(Vec::len), Some(4));
    let home = turn(&stack, "a", 1).await?.replica;
    assert_eq!(turn(&stack, "a", 1).await?.outcome, "sticky");

    // The home drains: the next turn goes elsewhere.
    let mut draining = snapshot(&stack, 2);
    for replica in draining["pools"][0]["replicas"].as_array_mut().into_iter().flatten() {
        if replica["replica"] == json!(home) {
            replica["state"] = json!("draining");
        }
    }
    let answer: Value = post(&stack, draining.to_string()).await?.error_for_status()?.json().await?;
    let served: u64 = answer["pools"][0]["replicas"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|replica| replica["requests"]["sticky"].as_u64().unwrap_or(0) + replica["requests"]["placed"].as_u64().unwrap_or(0))
        .sum();
    assert_eq!(served, 2);
    // One conversation got a home: 40 bytes in base64.
    assert_eq!(answer["bindings"].as_str().map(str::len), Some(54));
    let moved = turn(&stack, "a", 1).await?;
    assert_eq!(moved.outcome, "rehomed");
    assert_ne!(moved.replica, home);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_nobody_routes_by_is_told_from_one_whose_pools_have_other_names() -> Result<()> {
    let stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    let mut renamed = snapshot(&stack, 1);
    renamed["pools"][0]["cluster"] = json!("another");
    let answer: Value = post(&stack, renamed.to_string()).await?.error_for_status()?.json().await?;
    assert_eq!((&answer["pools"], answer["key_check"].is_string()), (&json!([]), true));

    let vm_id =
        "/static_resources/listeners/1/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config/config/vm_config/vm_id";
    let edits = vec![(vm_id.to_owned(), json!("another"))];
    let stack = fast_stack(StackOptions { collector: false, edits, ..StackOptions::default() }).await?;
    let answer: Value = post(&stack, snapshot(&stack, 1).to_string()).await?.error_for_status()?.json().await?;
    assert_eq!((&answer["pools"], &answer["key_check"]), (&json!([]), &Value::Null));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_snapshot_is_refused_with_a_reason_and_changes_nothing() -> Result<()> {
    let stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    post(&stack, snapshot(&stack, 5).to_string()).await?.error_for_status()?;
    let home = turn(&stack, "a", 1).await?.replica;
    let version = metrics(&stack).await?["homing_snapshot_version"].clone();

    let changed = |change: fn(&mut Value)| {
        let mut body = snapshot(&stack, 6);
        change(&mut body);
        body.to_string()
    };
    let cases = [
        ("no JSON", "hello".to_owned(), "cannot be read"),
        ("an empty body", String::new(), "cannot be read"),
        ("cut short", snapshot(&stack, 6).to_string()[..200].to_owned(), "cannot be read"),
        ("an older sequence", snapshot(&stack, 4).to_string(), "older than the last"),
        ("another version", changed(|body| body["version"] = json!(99)), "version 99"),
        ("an unknown key", changed(|body| body["pols"] = json!([])), "unknown field `pols`"),
        ("a wrong type", changed(|body| body["pools"][0]["replicas"][0]["running"] = json!("many")), "expected u32"),
        ("a negative count", changed(|body| body["pools"][0]["replicas"][0]["running"] = json!(-1)), "cannot be read"),
        ("a host name", changed(|body| body["pools"][0]["replicas"][0]["replica"] = json!("host:80")), "is not a replica"),
        ("KV usage above 1", changed(|body| body["pools"][0]["replicas"][0]["kv_usage"] = json!(1.5)), "not between 0 and 1"),
        (
            "a replica twice",
            changed(|body| body["pools"][0]["replicas"][1] = body["pools"][0]["replicas"][0].clone()),
            "stands twice",
        ),
        ("more than 4 MiB", format!("{}{}", snapshot(&stack, 6), " ".repeat(4 << 20)), "larger than 4194304 bytes"),
    ];
    let refused = cases.len() as u64;
    for (name, body, reason) in cases {
        let response = post(&stack, body).await?;
        assert_eq!(response.status(), 400, "{name}");
        let body: Value = response.json().await?;
        let message = body["error"].as_str().unwrap_or_default();
        assert!(message.contains(reason), "{name}: {message}");
    }
    assert_eq!(metrics(&stack).await?["homing_snapshot_version"], version);
    assert_eq!(sum(&stack, "homing_errors_total", &["kind=\"refused\""]).await?, refused);
    let next = turn(&stack, "a", 1).await?;
    assert_eq!((next.outcome.as_str(), next.replica), ("sticky", home));
    // An earlier collector is answered, and nothing of it is taken.
    let earlier: Value = post(&stack, changed(|body| body["generation"] = json!(9))).await?.error_for_status()?.json().await?;
    assert_eq!((&earlier["standby"], &earlier["generation"]), (&json!(true), &json!(10)));
    assert_eq!(metrics(&stack).await?["homing_snapshot_version"], version);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_says_whether_it_is_ready_to_whoever_asks() -> Result<()> {
    let stack = fast_stack(StackOptions { collector: false, token: "let-me-in".into(), ..StackOptions::default() }).await?;
    let ready = async || -> Result<(u16, Value)> {
        let answer = reqwest::get(format!("http://{}/homing/v1/ready", stack.control)).await?;
        Ok((answer.status().as_u16(), answer.json().await?))
    };
    assert_eq!(ready().await?, (503, json!({ "ready": false, "reason": "no collector has come yet" })));
    eventually("nobody to be locked out", async || Ok(ready().await? == (200, json!({ "ready": true })))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_listener_asks_for_its_token() -> Result<()> {
    let stack = fast_stack(StackOptions { token: "let-me-in".into(), ..StackOptions::default() }).await?;
    // The collector has it, or there would be no snapshot.
    let url = format!("http://{}/homing/v1/sync", stack.control);
    for token in
        [None, Some("Bearer wrong"), Some("Bearer let-me-i"), Some("Bearer let-me-in-please"), Some("let-me-in"), Some("Bearer ")]
    {
        let mut request = Client::new().post(&url).body(snapshot(&stack, u64::MAX).to_string());
        if let Some(token) = token {
            request = request.header("authorization", token);
        }
        assert_eq!(request.send().await?.status(), 401, "{token:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_listener_has_one_path_and_one_method() -> Result<()> {
    let stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    let url = |path: &str| format!("http://{}{path}", stack.control);
    assert_eq!(Client::new().post(url("/")).send().await?.status(), 404);
    assert_eq!(Client::new().get(url("/homing/v1/sync")).send().await?.status(), 405);
    Ok(())
}
