//! Every client's way of naming a conversation, through a real Envoy: the cases of the routing crate.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use homing_tests::{all_given_back, fast_stack};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Client, Method, Response};
use serde_json::Value;
use xtask::stack::{Stack, StackOptions};
use xtask::tools::root;

/// What Envoy said of one case: what named it, and the digest it has.
struct Named {
    case: Value,
    source: String,
    digest: Option<String>,
}

fn cases() -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(root().join("routing/testdata/identity-cases.json"))?;
    let file: Value = serde_json::from_str(&text)?;
    file["cases"].as_array().cloned().context("the cases")
}

fn header_value(value: &Value) -> Result<HeaderValue> {
    match value.as_str() {
        Some(text) => Ok(HeaderValue::from_str(text)?),
        None => Ok(HeaderValue::from_bytes(&decode_base64(value["base64"].as_str().context("base64")?))?),
    }
}

fn decode_base64(text: &str) -> Vec<u8> {
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> = text.chars().filter_map(|digit| alphabet.find(digit)).map(|at| at as u32).collect();
    let bytes = digits.chunks(4).flat_map(|chunk| {
        let bits = chunk.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - chunk.len()));
        bits.to_be_bytes()[1..chunk.len()].to_vec()
    });
    bytes.collect()
}

async fn send(client: &Client, stack: &Stack, case: &Value) -> Result<Response> {
    let method = Method::from_bytes(case["method"].as_str().unwrap_or("POST").as_bytes())?;
    let url = format!("http://{}{}", stack.proxy, case["path"].as_str().context("a path")?);
    let mut request = client.request(method, url);
    for pair in case["headers"].as_array().into_iter().flatten() {
        request = request.header(pair[0].as_str().context("a name")?.parse::<HeaderName>()?, header_value(&pair[1])?);
    }
    if let Some(body) = case["body"].as_str() {
        request = request.body(body.to_owned());
    }
    Ok(request.send().await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_is_named_through_envoy_as_it_is_natively() -> Result<()> {
    // One stack for each configuration that cases ask for.
    let mut by_config: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for case in cases()? {
        by_config.entry(case["config"].to_string()).or_default().push(case);
    }
    let client = Client::new();
    let mut named = Vec::new();
    for (config, cases) in by_config {
        let config: Value = serde_json::from_str(&config)?;
        let pool = if config.is_null() { Value::Object(serde_json::Map::new()) } else { config };
        let stack = fast_stack(StackOptions { pool, ..StackOptions::default() }).await?;
        for case in cases {
            let response = send(&client, &stack, &case).await?;
            let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
            named.push(Named {
                source: header("x-homing-source").unwrap_or_default(),
                digest: header("x-homing-conversation"),
                case,
            });
        }
        all_given_back(&stack).await?;
    }
    for one in &named {
        assert_eq!(one.source, one.case["source"], "{}", one.case["name"]);
        assert_eq!(one.digest.is_none(), one.case["conversation"].is_null(), "{}", one.case["name"]);
        for other in named.iter().filter(|_| one.digest.is_some()) {
            let same = one.case["conversation"] == other.case["conversation"];
            assert_eq!(one.digest == other.digest, same, "{} and {}", one.case["name"], other.case["name"]);
        }
    }
    Ok(())
}
