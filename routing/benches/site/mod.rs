//! What benchmarks of decisions share: an Envoy's router that has heard of some replicas, and conversations.

use homing_routing::control::Control;
use homing_routing::host::MemoryHost;
use homing_routing::identity::{Conversation, Digest, Source};
use homing_routing::policy::Policy;
use homing_routing::replica::ReplicaName;
use homing_routing::router::{Router, Settings};
use homing_routing::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncRequest};

pub(crate) const POOL: &str = "pool";

fn name(number: usize) -> ReplicaName {
    ReplicaName::endpoint(([10, 0, (number / 250) as u8, (number % 250) as u8 + 1], 8000).into())
}

/// A replica with nothing to do.
pub(crate) fn report(number: usize) -> ReplicaReport {
    ReplicaReport {
        replica: name(number),
        state: ReplicaState::Ready,
        running: 0,
        waiting: 0,
        kv_usage: 0.5,
        cache_tokens: 36_000,
        max_num_seqs: 256,
        prefix_hit_rate: None,
        age_ms: Some(0),
        peers: Peers::default(),
    }
}

/// A router that has heard of these replicas, where four bytes make a token.
pub(crate) fn router(settings: Settings, policy: Policy, replicas: Vec<ReplicaReport>) -> (MemoryHost, Router<MemoryHost>) {
    let host = MemoryHost::new(1_000_000_000);
    let router = Router::new(host.clone(), settings, vec![policy]).expect("a router");
    let pools = vec![PoolReport { cluster: POOL.into(), bytes_per_token: Some(4.0), shared_tokens: None, replicas }];
    let request = SyncRequest { version: SYNC_VERSION, generation: 1, sequence: 1, pools, ..SyncRequest::default() };
    Control::new(host.clone()).exchange(&serde_json::to_vec(&request).expect("JSON")).expect("an exchange");
    (host, router)
}

pub(crate) fn conversation(id: u128) -> Conversation {
    let digest = Digest((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
    Conversation { digest, source: Source::Known("x-session-id"), parent: None }
}
