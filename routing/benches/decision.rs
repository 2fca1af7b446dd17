//! What a decision costs per request: a turn at home among 65,536 conversations, and a placement among few and many replicas.
//!
//! The host is in memory, so this is the routing's own cost: in Envoy each host call adds its own.

mod site;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use homing_routing::host::MemoryHost;
use homing_routing::identity::Conversation;
use homing_routing::policy::Policy;
use homing_routing::router::{Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::ReplicaReport;

use site::{POOL, conversation};

/// A router that has heard of this many replicas.
fn router(replicas: usize) -> (MemoryHost, Router<MemoryHost>) {
    let report = |number| ReplicaReport { running: (number % 7) as u32, ..site::report(number) };
    site::router(Settings::default(), Policy::new(POOL), (0..replicas).map(report).collect())
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
