//! A hand-written collector: it pushes what it is told to push.

use std::net::SocketAddr;

use anyhow::Result;
use homing_routing::sync::{SYNC_PATH, SYNC_VERSION};
use reqwest::Client;
use serde_json::{Value, json};

use crate::stack::MODEL;

/// Pushes snapshots to one control listener.
#[derive(Clone, Debug)]
pub struct Pusher {
    client: Client,
    url: String,
    generation: u64,
    sequence: u64,
}

impl Pusher {
    /// One that started at this time, in milliseconds since 1970: the one that started last is heard.
    pub fn new(control: SocketAddr, generation: u64) -> Self {
        Self { client: Client::new(), url: format!("http://{control}{SYNC_PATH}"), generation, sequence: 0 }
    }

    /// Pushes these replicas of the pool, each as [`report`] makes it; `now_ms` is the time it claims to be, 0 for none.
    ///
    /// # Errors
    /// If it is refused.
    pub async fn push(&mut self, replicas: &[Value], now_ms: u64) -> Result<()> {
        self.sequence += 1;
        let pools = json!([{ "cluster": MODEL, "replicas": replicas }]);
        let snapshot = json!({
            "version": SYNC_VERSION, "generation": self.generation, "sequence": self.sequence, "now_ms": now_ms, "pause_ms": 250,
            "pools": pools,
        });
        self.client.post(&self.url).json(&snapshot).send().await?.error_for_status()?;
        Ok(())
    }
}

/// What a snapshot says of an idle replica.
pub fn report(replica: SocketAddr, state: &str, cache_tokens: u64) -> Value {
    json!({
        "replica": replica.to_string(), "state": state, "running": 0, "waiting": 0, "kv_usage": 0.0, "cache_tokens": cache_tokens,
        "max_num_seqs": 32, "prefix_hit_rate": null, "age_ms": 5,
    })
}
