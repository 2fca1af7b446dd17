//! Where each turn goes.

use std::collections::HashMap;

use homing_routing::control::Control;
use homing_routing::host::MemoryHost;
use homing_routing::identity::{Conversation, Digest, Source};
use homing_routing::policy::{Limit, Policy as PoolPolicy};
use homing_routing::replica::ReplicaName;
use homing_routing::router::{Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::{PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncRequest};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::engine::Gauges;

/// Policies that can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyName {
    /// One replica after the other.
    RoundRobin,
    /// Envoy's `least_request`: the one with fewer requests in flight of two taken at random.
    LeastRequest,
    /// vLLM's own balancer up to 0.26: the least `4 * waiting + running`.
    Vllm,
    /// A hash of the session: always the same replica.
    Hash,
    /// Sticky, and to the least loaded replica when more than a quarter of `max_num_seqs` run at home: no margin, no memory.
    StickySpill,
    /// Homing's own routing code.
    Homing,
}

/// What a policy sees of the fleet.
#[derive(Debug)]
pub struct View<'a> {
    /// Milliseconds since the start.
    pub now_ms: u64,
    /// Requests sent to each replica that have not ended.
    pub in_flight: &'a [u32],
    /// Each engine's state now.
    pub gauges: &'a [Gauges],
}

/// A policy's choice for one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The replica.
    pub replica: usize,
}

/// Chooses a replica for each turn.
pub trait Policy {
    /// Where a turn of `session` goes whose request has `bytes`; `id` names the turn.
    fn choose(&mut self, id: u64, session: u64, bytes: u32, view: &View<'_>) -> Choice;

    /// A turn has ended.
    fn ended(&mut self, id: u64, view: &View<'_>);

    /// The collector's next look at the fleet.
    fn snapshot(&mut self, _view: &View<'_>) {}
}

/// Homing's settings that a comparison varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomingOptions {
    /// The spill threshold.
    pub threshold: Limit,
    /// The spill margin.
    pub margin: Limit,
    /// Turns in a row at the second home after which it becomes the home.
    pub turns_away: u8,
}

impl Default for HomingOptions {
    fn default() -> Self {
        Self { threshold: Limit::Auto, margin: Limit::Auto, turns_away: Settings::default().turns_away }
    }
}

impl PolicyName {
    /// The policy, for a fleet of this size.
    pub(super) fn policy(self, replicas: usize, max_num_seqs: u32, homing: HomingOptions) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin(0)),
            Self::LeastRequest => Box::new(LeastRequest(ChaCha8Rng::seed_from_u64(1))),
            Self::Vllm => Box::new(Vllm(0)),
            Self::Hash => Box::new(Hash),
            Self::StickySpill => Box::new(StickySpill { homes: HashMap::new(), threshold: (max_num_seqs / 4).max(1), next: 0 }),
            Self::Homing => Box::new(Homing::new(replicas, max_num_seqs, homing)),
        }
    }
}

struct RoundRobin(usize);

impl Policy for RoundRobin {
    fn choose(&mut self, _id: u64, _session: u64, _bytes: u32, view: &View<'_>) -> Choice {
        self.0 += 1;
        Choice { replica: self.0 % view.in_flight.len() }
    }

    fn ended(&mut self, _id: u64, _view: &View<'_>) {}
}

struct LeastRequest(ChaCha8Rng);

impl Policy for LeastRequest {
    fn choose(&mut self, _id: u64, _session: u64, _bytes: u32, view: &View<'_>) -> Choice {
        let [one, two] = [0; 2].map(|_| self.0.random_range(0..view.in_flight.len()));
        Choice { replica: if view.in_flight[two] < view.in_flight[one] { two } else { one } }
    }

    fn ended(&mut self, _id: u64, _view: &View<'_>) {}
}

/// Ties go round, as vLLM's start index does.
struct Vllm(usize);

impl Policy for Vllm {
    fn choose(&mut self, _id: u64, _session: u64, _bytes: u32, view: &View<'_>) -> Choice {
        self.0 += 1;
        let replicas = view.gauges.len();
        let score = |replica: &usize| 4 * view.gauges[*replica].waiting + view.gauges[*replica].running;
        let order = (0..replicas).map(|offset| (self.0 + offset) % replicas);
        Choice { replica: order.min_by_key(score).unwrap_or(0) }
    }

    fn ended(&mut self, _id: u64, _view: &View<'_>) {}
}

struct Hash;

impl Policy for Hash {
    fn choose(&mut self, _id: u64, session: u64, _bytes: u32, view: &View<'_>) -> Choice {
        let spread = u128::from(digest(session).0 as u64) * view.in_flight.len() as u128;
        Choice { replica: (spread >> 64) as usize }
    }

    fn ended(&mut self, _id: u64, _view: &View<'_>) {}
}

struct StickySpill {
    homes: HashMap<u64, usize>,
    threshold: u32,
    next: usize,
}

impl Policy for StickySpill {
    fn choose(&mut self, _id: u64, session: u64, _bytes: u32, view: &View<'_>) -> Choice {
        self.next += 1;
        let replicas = view.in_flight.len();
        let order = (0..replicas).map(|offset| (self.next + offset) % replicas);
        let least = order.min_by_key(|replica| view.in_flight[*replica]).unwrap_or(0);
        let home = *self.homes.entry(session).or_insert(least);
        let full = view.gauges[home].running > self.threshold as usize;
        Choice { replica: if full { least } else { home } }
    }

    fn ended(&mut self, _id: u64, _view: &View<'_>) {}
}

/// Homing's router on a host in memory, fed by snapshots as in Envoy.
struct Homing {
    host: MemoryHost,
    router: Router<MemoryHost>,
    control: Control<MemoryHost>,
    tickets: HashMap<u64, Ticket<MemoryHost>>,
    max_num_seqs: u32,
    sequence: u64,
}

const POOL: &str = "pool";

fn name(replica: usize) -> ReplicaName {
    ReplicaName::endpoint(([10, 0, (replica / 250) as u8, (replica % 250) as u8 + 1], 8000).into())
}

impl Homing {
    fn new(replicas: usize, max_num_seqs: u32, options: HomingOptions) -> Self {
        let pool = PoolPolicy {
            spill_threshold: options.threshold,
            spill_margin: options.margin,
            max_num_seqs: Some(max_num_seqs),
            replicas: (0..replicas).map(name).collect(),
            ..PoolPolicy::new(POOL)
        };
        let settings = Settings { turns_away: options.turns_away, max_conversations: 4096, ..Settings::default() };
        let host = MemoryHost::default();
        let router = Router::new(host.clone(), settings, vec![pool]).expect("a host in memory refuses nothing");
        let control = Control::new(host.clone());
        Self { host, router, control, tickets: HashMap::new(), max_num_seqs, sequence: 0 }
    }
}

fn digest(session: u64) -> Digest {
    Digest(u128::from(session + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
}

impl Policy for Homing {
    fn choose(&mut self, id: u64, session: u64, bytes: u32, view: &View<'_>) -> Choice {
        self.host.set_now(view.now_ms);
        let conversation = Conversation { digest: digest(session), source: Source::Known("x-session-id"), parent: None };
        let request = Request { conversation: Some(&conversation), generates: true, bytes, ..Request::default() };
        let Some(Verdict::Go(mut ticket)) = self.router.decide(POOL.as_bytes(), &request) else {
            unreachable!("a pool without pins refuses nothing")
        };
        let chosen = ticket.chosen().map(|chosen| chosen.address.clone()).unwrap_or_default();
        let replica = (0..view.in_flight.len()).find(|replica| name(*replica).address.to_string() == chosen).unwrap_or(0);
        self.router.served(&mut ticket, &chosen, false);
        self.tickets.insert(id, ticket);
        Choice { replica }
    }

    fn ended(&mut self, id: u64, view: &View<'_>) {
        self.host.set_now(view.now_ms);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.router.ended(ticket);
        }
    }

    fn snapshot(&mut self, view: &View<'_>) {
        self.host.set_now(view.now_ms);
        self.sequence += 1;
        let report = |(replica, gauges): (usize, &Gauges)| ReplicaReport {
            replica: name(replica),
            state: ReplicaState::Ready,
            running: gauges.running as u32,
            waiting: gauges.waiting as u32,
            kv_usage: gauges.kv_cache_usage as f32,
            cache_tokens: 0,
            max_num_seqs: self.max_num_seqs,
            prefix_hit_rate: None,
            age_ms: Some(0),
        };
        let replicas = view.gauges.iter().enumerate().map(report).collect();
        let pools = vec![PoolReport { cluster: POOL.into(), replicas }];
        let request = SyncRequest { version: SYNC_VERSION, generation: 1, sequence: self.sequence, pools };
        let body = serde_json::to_vec(&request).expect("a snapshot is JSON");
        self.control.exchange(&body).expect("the snapshot is newer than the last");
        self.router.sweep(false).expect("a host in memory refuses nothing");
    }
}
