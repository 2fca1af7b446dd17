//! Request bodies pass unchanged, whatever names the conversation and however they are sent.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use bytes::Bytes;
use homing_tests::{Turn, all_given_back, chat_url, fast_stack, received};
use reqwest::{Body, Client};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xtask::stack::{MODEL, StackOptions};

const SIZE: usize = 8 << 20;

/// A body of 8 MB whose conversation stands at its end, as in Claude Code.
pub(crate) fn large_body() -> Bytes {
    let text: String = (0..).map(|n: u32| char::from(b' ' + (n.wrapping_mul(2_654_435_761) >> 25) as u8 % 64)).take(SIZE).collect();
    let text = text.replace(['"', '\\'], "x");
    let tail = json!({ "user_id": json!({ "session_id": "00000000-1111-2222-3333-444444444444" }).to_string() });
    format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{text}"}}],"metadata":{tail}}}"#).into()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn chunked(body: &Bytes) -> Body {
    let pieces: Vec<_> = body.chunks(100_000).map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece))).collect();
    Body::wrap_stream(futures_util::stream::iter(pieces))
}

async fn last_received(replica: &str) -> Result<Value> {
    let replica: SocketAddr = replica.parse().context("the replica's address")?;
    received(replica).await?.pop().context("a request")
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_megabytes_arrive_byte_for_byte() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let body = large_body();
    let sha256 = hex(&Sha256::digest(&body));
    let http1 = Client::builder().http1_only().build()?;
    let http2 = Client::builder().http2_prior_knowledge().build()?;
    let ways = [
        ("HTTP/1.1 with length", &http1, Body::from(body.clone())),
        ("HTTP/1.1 chunked", &http1, chunked(&body)),
        ("HTTP/2", &http2, Body::from(body.clone())),
        ("HTTP/2 without length", &http2, chunked(&body)),
    ];
    for (name, client, sent) in ways {
        let response =
            client.post(chat_url(&stack)).header("content-type", "application/json").body(sent).send().await.context(name)?;
        let turn = Turn::of(&response);
        assert_eq!(turn.source, "body:metadata.user_id", "{name}");
        let request = last_received(&turn.replica).await?;
        assert_eq!((&request["body_length"], &request["body_sha256"]), (&json!(body.len()), &json!(sha256)), "{name}");
    }
    // With the id in a header nothing is held back.
    for (name, client) in [("HTTP/1.1", &http1), ("HTTP/2", &http2)] {
        let request = client.post(chat_url(&stack)).header("content-type", "application/json").header("x-session-id", name);
        let response = request.body(chunked(&body)).send().await.context(name)?;
        let turn = Turn::of(&response);
        assert_eq!(turn.source, "x-session-id", "{name}");
        assert_eq!(last_received(&turn.replica).await?["body_sha256"], json!(sha256), "{name}");
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_json_is_routed_and_not_refused() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    for body in ["hello", "[1,2,3]", "{\"model\":", "", "{\"messages\":1}", "\u{0}\u{1}\u{2}"] {
        let response = client.post(chat_url(&stack)).body(body).send().await?;
        let turn = Turn::of(&response);
        assert_eq!((turn.outcome.as_str(), turn.source.as_str()), ("unkeyed", "none"), "{body:?}");
        let request = last_received(&turn.replica).await?;
        assert_eq!(request["body_sha256"], json!(hex(&Sha256::digest(body))), "{body:?}");
    }
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_names_the_conversation_when_no_header_does() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let client = Client::new();
    let mut homes = Vec::new();
    for user_id in [
        json!({ "device_id": "d", "account_uuid": "", "session_id": "0000aaaa-0000-4000-8000-000000000001" }).to_string(),
        json!({ "session_id": "0000aaaa-0000-4000-8000-000000000001", "device_id": "other" }).to_string(),
        "user_0123_account__session_0000aaaa-0000-4000-8000-000000000001".to_owned(),
    ] {
        let body = json!({ "model": MODEL, "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }], "metadata": { "user_id": user_id } });
        let url = format!("http://{}/v1/messages?beta=true", stack.proxy);
        let turn = Turn::of(&client.post(url).json(&body).send().await?);
        assert_eq!((turn.status, turn.source.as_str()), (200, "body:metadata.user_id"));
        homes.push(turn);
    }
    assert_eq!(homes.iter().map(|turn| turn.outcome.as_str()).collect::<Vec<_>>(), ["placed", "sticky", "sticky"]);
    all_given_back(&stack).await
}
