//! What admission costs: a request, a tick and a look by the control role in a pool of 64 replicas with 64 conversations each and 256
//! requests in line, and a turn in a pool whose caches hold everything, with admission and without.
//!
//! The host is in memory, so this is the routing's own cost: in Envoy each host call adds its own.

mod site;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use homing_routing::admission::{Admission, occupancy};
use homing_routing::host::MemoryHost;
use homing_routing::policy::Policy;
use homing_routing::router::{Held, Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::ReplicaReport;

use site::{POOL, conversation};

const REPLICAS: usize = 64;
const PLACES: usize = 64;
const LINE: usize = 256;
/// Of each context: 10,000 tokens.
const BYTES: u32 = 40_000;
/// What a context takes: its tokens and room to grow.
const CONTEXT_TOKENS: u64 = 10_512;

/// A router for replicas whose caches hold so many contexts each.
fn router(replicas: usize, contexts: usize, admission: Option<Admission>) -> (MemoryHost, Router<MemoryHost>) {
    let settings = Settings { max_conversations: 16_384, ..Settings::default() };
    let cache_tokens = contexts as u64 * CONTEXT_TOKENS;
    let report = |number| ReplicaReport { cache_tokens, max_num_seqs: 1024, ..site::report(number) };
    site::router(settings, Policy { admission, ..Policy::new(POOL) }, (0..replicas).map(report).collect())
}

fn decide(router: &mut Router<MemoryHost>, id: usize) -> Verdict<MemoryHost> {
    let conversation = conversation(id as u128);
    let request = Request { conversation: Some(&conversation), generates: true, bytes: BYTES, ..Request::default() };
    router.decide(POOL.as_bytes(), &request).expect("a pool")
}

fn go(verdict: Verdict<MemoryHost>) -> Ticket<MemoryHost> {
    match verdict {
        Verdict::Go(ticket) => ticket,
        other => unreachable!("it fits: {other:?}"),
    }
}

fn hold(verdict: Verdict<MemoryHost>) -> Held<MemoryHost> {
    match verdict {
        Verdict::Hold(held) => held,
        other => unreachable!("it does not fit: {other:?}"),
    }
}

fn above_the_caches(c: &mut Criterion) {
    let (host, mut router) = router(REPLICAS, PLACES, Some(Admission::default()));
    let tickets: Vec<_> = (0..REPLICAS * PLACES).map(|id| go(decide(&mut router, id))).collect();
    let held: Vec<_> = (0..LINE - 1).map(|id| hold(decide(&mut router, 100_000 + id))).collect();
    let mut group = c.benchmark_group("admission/64 replicas x 64 places, 256 in line");
    // It leaves the line when it is dropped.
    group.bench_function("a request that is held, and leaves", |b| b.iter(|| drop(hold(decide(&mut router, 200_000)))));
    group.bench_function("a tick after which nothing has changed", |b| {
        b.iter(|| black_box(router.called(POOL.as_bytes()).expect("the line")));
    });
    group.bench_function("a tick after a change", |b| {
        b.iter(|| {
            router.still_waiting(held.iter().take(1)).expect("the line");
            black_box(router.called(POOL.as_bytes()).expect("the line"))
        });
    });
    group.bench_function("what the control role tells of it", |b| {
        b.iter(|| black_box(occupancy(&host, POOL).expect("a working set")));
    });
    group.finish();
    drop((tickets, held));
}

fn below_the_caches(c: &mut Criterion) {
    let mut group = c.benchmark_group("admission/a turn below the caches");
    for conversations in [16, 256, 4096] {
        for (name, admission) in [("without", None), ("with", Some(Admission::default()))] {
            let (_host, mut router) = router(8, 1024, admission);
            for id in 0..conversations {
                drop(go(decide(&mut router, id)));
            }
            let mut id = 0;
            group.bench_with_input(BenchmarkId::new(name, conversations), &conversations, |b, _| {
                b.iter(|| {
                    id = (id + 7919) % conversations;
                    drop(black_box(go(decide(&mut router, id))));
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, above_the_caches, below_the_caches);
criterion_main!(benches);
