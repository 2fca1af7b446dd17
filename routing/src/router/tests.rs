//! The decision, told as an operator would: through snapshots, requests and statistics.

use std::collections::BTreeMap;

use super::*;
use crate::control::Control;
use crate::host::{Expected, MemoryHost};
use crate::identity::{Digest, Source};
use crate::metric::Metric;
use crate::policy::Limit;
use crate::replica::ReplicaName;
use crate::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncAnswer, SyncRequest};

mod admission;
mod anything;
mod failing;
mod fleet;
mod homes;
mod lanes;
mod placing;
mod requests;
mod serving;

const POOL: &str = "pool";

/// An Envoy with one thread, and a collector that polls `replicas`.
struct Site {
    host: MemoryHost,
    router: Router<MemoryHost>,
    control: Control<MemoryHost>,
    reports: Vec<ReplicaReport>,
    shared_tokens: Option<u32>,
    sequence: u64,
}

fn name(number: usize) -> ReplicaName {
    format!("10.0.0.{number}:8000").parse().expect("a name")
}

fn report(name: ReplicaName) -> ReplicaReport {
    ReplicaReport {
        replica: name,
        state: ReplicaState::Ready,
        running: 0,
        waiting: 0,
        kv_usage: 0.0,
        cache_tokens: 36_000,
        max_num_seqs: 32,
        prefix_hit_rate: None,
        age_ms: Some(0),
        peers: Peers::default(),
    }
}

/// A request of the first collector, without pools.
fn request() -> SyncRequest {
    SyncRequest { version: SYNC_VERSION, generation: 1, pause_ms: 250, ..SyncRequest::default() }
}

impl Site {
    /// Four replicas and a policy that begins with every default.
    fn new(change: impl FnOnce(&mut Policy)) -> Self {
        let mut site = Self::before_the_first_snapshot(change);
        site.sync();
        site
    }

    fn before_the_first_snapshot(change: impl FnOnce(&mut Policy)) -> Self {
        let mut policy = Policy::new(POOL);
        change(&mut policy);
        let host = MemoryHost::new(1_000_000_000);
        let settings = Settings { max_conversations: 1_000, ..Settings::default() };
        let router = Router::new(host.clone(), settings, vec![policy]).expect("a router");
        let control = Control::new(host.clone());
        Self {
            host,
            router,
            control,
            reports: (1..=4).map(|number| report(name(number))).collect(),
            shared_tokens: None,
            sequence: 0,
        }
    }

    /// Another thread of the same Envoy.
    fn thread(&self) -> Router<MemoryHost> {
        let policy = self.router.pool(POOL.as_bytes()).expect("the pool").policy.clone();
        Router::new(self.host.clone(), self.router.settings.clone(), vec![policy]).expect("a router")
    }

    /// A thread of a listener that routes another pool besides.
    fn thread_of_two_pools(&self) -> Router<MemoryHost> {
        let policy = self.router.pool(POOL.as_bytes()).expect("the pool").policy.clone();
        Router::new(self.host.clone(), self.router.settings.clone(), vec![policy, Policy::new("another")]).expect("a router")
    }

    /// The collector's next snapshot arrives.
    fn sync(&mut self) -> SyncAnswer {
        self.sequence += 1;
        let pools = vec![PoolReport {
            cluster: POOL.into(),
            bytes_per_token: Some(4.0),
            shared_tokens: self.shared_tokens,
            replicas: self.reports.clone(),
        }];
        self.exchange(&SyncRequest { sequence: self.sequence, pools, now_ms: self.host.now_ms(), ..request() })
    }

    /// Any request arrives.
    fn exchange(&mut self, request: &SyncRequest) -> SyncAnswer {
        self.control.exchange(&serde_json::to_vec(request).expect("JSON")).expect("an answer")
    }

    /// Enough snapshots that this Envoy's own requests of before are in none of the engines' figures.
    fn settle(&mut self) {
        for _ in 0..3 {
            self.sync();
        }
    }

    fn set_state(&mut self, number: usize, state: ReplicaState) {
        self.reports[number - 1].state = state;
        self.sync();
    }

    fn ticket(&mut self, id: u128) -> Ticket<MemoryHost> {
        ticket(&mut self.router, id)
    }

    /// A whole turn, served where it was sent.
    fn turn(&mut self, id: u128) -> (Outcome, ReplicaName) {
        let mut ticket = self.ticket(id);
        let chosen = ticket.chosen().expect("a choice").name;
        self.router.served(&mut ticket, &chosen.address.to_string(), Answer::Served);
        let outcome = ticket.served().expect("an outcome").outcome;
        self.router.ended(ticket);
        (outcome, chosen)
    }

    fn in_flight(&self) -> u64 {
        self.gauges().values().sum()
    }

    fn gauges(&self) -> BTreeMap<String, u64> {
        self.host.metrics().into_iter().filter(|(name, _)| name.starts_with("homing_in_flight")).collect()
    }

    fn count(&self, outcome: Outcome) -> u64 {
        let suffix = format!("outcome={}", outcome.as_str());
        self.host.metrics().iter().filter(|(name, _)| name.ends_with(&suffix)).map(|(_, value)| value).sum()
    }

    fn errors(&self, kind: ErrorKind) -> u64 {
        self.host.metric(&Metric::Errors { kind })
    }

    /// What its failures of late add to a replica's load.
    fn penalty(&self, replica: ReplicaName) -> u32 {
        let pool = self.router.pool(POOL.as_bytes()).expect("the pool");
        pool.member(replica.id()).expect("a member").penalty(self.host.now_ms())
    }

    fn load(&mut self, number: usize) -> u32 {
        let max_age_ms = self.router.settings.snapshot_max_age_ms;
        let pools = self.router.refreshed_pools().expect("pools");
        let pool = pools.last().expect("the pool");
        let member = pool.member(name(number).id()).expect("a member");
        pool.load(&self.host, member, self.host.now_ms(), max_age_ms).expect("a load")
    }
}

fn conversation(id: u128) -> Conversation {
    // Spread over the table as a digest is.
    Conversation {
        digest: Digest((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)),
        source: Source::Known("x-session-id"),
        parent: None,
    }
}

fn decide(router: &mut Router<MemoryHost>, request: &Request<'_>) -> Verdict<MemoryHost> {
    router.decide(POOL.as_bytes(), request).expect("a pool")
}

fn go(verdict: Verdict<MemoryHost>) -> Ticket<MemoryHost> {
    match verdict {
        Verdict::Go(ticket) => ticket,
        other => panic!("not sent: {other:?}"),
    }
}

fn ticket(router: &mut Router<MemoryHost>, id: u128) -> Ticket<MemoryHost> {
    go(decide(router, &Request { conversation: Some(&conversation(id)), generates: true, bytes: 1000, ..Request::default() }))
}

fn chosen(ticket: &Ticket<MemoryHost>) -> ReplicaName {
    ticket.chosen().expect("a choice").name
}

/// A turn that was sent home and served at the first address a retry had.
fn retried(site: &mut Site, id: u128) -> (Outcome, ReplicaName) {
    let mut ticket = site.ticket(id);
    let address = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &address, Answer::Served);
    let served = ticket.served().expect("an outcome").clone();
    assert!(served.moved);
    site.router.ended(ticket);
    (served.outcome, served.replica.expect("a replica").name)
}
