//! What a decision costs per request: a turn at home among 65,536 conversations, and a placement among few and many replicas.
//!
//! The host is in memory, so this is the routing's own cost: in Envoy each host call adds its own.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use homing_routing::control::Control;
use homing_routing::host::MemoryHost;
use homing_routing::identity::{Conversation, Digest, Source};
use homing_routing::policy::Policy;
use homing_routing::replica::ReplicaName;
use homing_routing::router::{Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncRequest};

const POOL: &str = "pool";

fn name(number: usize) -> ReplicaName {
    ReplicaName::endpoint(([10, 0, (number / 250) as u8, (number % 250) as u8 + 1], 8000).into())
}

/// A router that has heard of this many replicas.
fn router(replicas: usize) -> (MemoryHost, Router<MemoryHost>) {
    let host = MemoryHost::new(1_000_000_000);
    let router = Router::new(host.clone(), Settings::default(), vec![Policy::new(POOL)]).expect("a router");
    let report = |number| ReplicaReport {
        replica: name(number),
        state: ReplicaState::Ready,
        running: (number % 7) as u32,
        waiting: 0,
        kv_usage: 0.5,
        cache_tokens: 36_000,
        max_num_seqs: 256,
        prefix_hit_rate: None,
        age_ms: Some(0),
        peers: Peers::default(),
    };
    let pools = vec![PoolReport {
        cluster: POOL.into(),
        bytes_per_token: None,
        shared_tokens: None,
        replicas: (0..replicas).map(report).collect(),
    }];
    let request = SyncRequest { version: SYNC_VERSION, generation: 1, sequence: 1, pools, ..SyncRequest::default() };
    Control::new(host.clone()).exchange(&serde_json::to_vec(&request).expect("JSON")).expect("an exchange");
    (host, router)
}

fn conversation(id: u128) -> Conversation {
    let digest = Digest((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
    Conversation { digest, source: Source::Known("x-session-id"), parent: None }
}

fn decide(router: &mut Router<MemoryHost>, conversation: Option<&Conversation>) -> Ticket<MemoryHost> {
    let request = Request { conversation, generates: true, bytes: 60_000, ..Request::default() };
    match router.decide(POOL.as_bytes(), &request) {
        Some(Verdict::Go(ticket)) => ticket,
        _ => unreachable!("nothing is pinned"),
    }
}

fn sticky(c: &mut Criterion) {
    let (_host, mut router) = router(8);
    for id in 0..65_536 {
        drop(decide(&mut router, Some(&conversation(id))));
    }
    let mut id = 0;
    c.bench_function("decision/sticky, 65,536 conversations", |b| {
        b.iter(|| {
            id = (id + 7919) % 65_536;
            black_box(decide(&mut router, Some(&conversation(id))))
        });
    });
}

fn placement(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision/placement among replicas");
    for replicas in [8, 64, 1024] {
        let (_host, mut router) = router(replicas);
        group.bench_with_input(BenchmarkId::from_parameter(replicas), &replicas, |b, _| {
            // A request without a conversation is placed each time.
            b.iter(|| black_box(decide(&mut router, None)));
        });
    }
    group.finish();
}

criterion_group!(benches, sticky, placement);
criterion_main!(benches);
