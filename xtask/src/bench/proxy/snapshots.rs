//! The filters' snapshots, as a collector would push them.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_PATH, SYNC_VERSION, SyncAnswer, SyncRequest};
use tokio::time::sleep;

use crate::stack::MODEL;

/// As often as a collector pushes.
const PUSH_INTERVAL: Duration = Duration::from_millis(250);

/// What a collector would push: replicas that are ready and have nothing to do.
pub(super) struct Snapshots {
    client: reqwest::Client,
    controls: Vec<SocketAddr>,
    request: SyncRequest,
}

impl Snapshots {
    pub(super) fn new(controls: Vec<SocketAddr>, upstreams: &[SocketAddr]) -> Result<Self> {
        let replica = |address: &SocketAddr| ReplicaReport {
            replica: ReplicaName { address: *address, rank: None },
            state: ReplicaState::Ready,
            running: 0,
            waiting: 0,
            kv_usage: 0.0,
            cache_tokens: 0,
            max_num_seqs: 32,
            prefix_hit_rate: None,
            age_ms: Some(0),
            peers: Peers::default(),
        };
        let generation = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
        let pools = vec![PoolReport {
            cluster: MODEL.to_owned(),
            bytes_per_token: None,
            shared_tokens: None,
            replicas: upstreams.iter().map(replica).collect(),
        }];
        let request = SyncRequest { version: SYNC_VERSION, generation, sequence: 0, pools, ..SyncRequest::default() };
        Ok(Self { client: reqwest::Client::new(), controls, request })
    }

    /// Pushes the next snapshot to every filter.
    pub(super) async fn push(&mut self) -> Result<Vec<SyncAnswer>> {
        self.request.sequence += 1;
        let mut answers = Vec::new();
        for control in &self.controls {
            let answer = self.client.post(format!("http://{control}{SYNC_PATH}")).json(&self.request).send().await?;
            answers.push(answer.error_for_status().context("the filter refused a snapshot")?.json().await?);
        }
        Ok(answers)
    }

    /// Pushes until that fails.
    pub(super) async fn keep_pushing(&mut self) -> Result<()> {
        loop {
            sleep(PUSH_INTERVAL).await;
            self.push().await?;
        }
    }
}
