//! Clients of several Envoys.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use reqwest::Client;
use tokio::time::Instant;
use xtask::agents::Ended;

use crate::{Turn, chat_body};

/// One turn at one Envoy, read to its end.
///
/// # Errors
/// If there is no answer.
pub async fn turn(client: &Client, proxy: SocketAddr, conversation: &str, text: &str) -> Result<Turn> {
    let request = client.post(format!("http://{proxy}/v1/chat/completions")).header("x-session-id", conversation);
    let response = request.json(&chat_body(text, 4)).send().await?;
    let turn = Turn::of(&response);
    response.bytes().await?;
    Ok(turn)
}

/// The share of turns that stayed where the turn before them was, of those of conversations older than `age` that were sent from `from` on.
pub fn stayed(turns: &[Ended], age: Duration, from: Instant) -> f64 {
    let counted: Vec<_> =
        turns.iter().filter(|turn| turn.age > age && turn.exchange.sent >= from).filter_map(Ended::stayed).collect();
    counted.iter().filter(|stayed| **stayed).count() as f64 / counted.len().max(1) as f64
}
