//! Homing's own router on a host in memory, fed by snapshots as in Envoy.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use homing_routing::admission::Admission;
use homing_routing::control::Control;
use homing_routing::estimate::{Estimator, Totals};
use homing_routing::host::MemoryHost;
use homing_routing::identity::{Conversation, Digest, Source};
use homing_routing::policy::{Limit, Policy as PoolPolicy};
use homing_routing::replica::ReplicaName;
use homing_routing::router::{Answer, Held, Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncRequest};

use super::{Fleet, Policy, Routed, View};
use crate::engine::{Counters, Gauges};

const POOL: &str = "pool";
/// How often the collector posts a snapshot.
const SNAPSHOT: Duration = Duration::from_millis(250);

/// Homing's settings that a comparison varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomingOptions {
    /// The spill threshold.
    pub threshold: Limit,
    /// The spill margin.
    pub margin: Limit,
    /// Turns in a row at the second home after which it becomes the home.
    pub turns_away: u8,
    /// Whether and how it admits by working set.
    pub admission: Option<Admission>,
    /// Tokens that all sessions share; None if that is to be learned.
    pub shared_tokens: Option<u32>,
}

impl Default for HomingOptions {
    fn default() -> Self {
        Self {
            threshold: Limit::Auto,
            margin: Limit::Auto,
            turns_away: Settings::default().turns_away,
            admission: None,
            shared_tokens: None,
        }
    }
}

/// The filter's router and control role on one host. Replicas answer every request, so that each is served where it was sent.
#[derive(Debug)]
pub(super) struct Homing {
    host: MemoryHost,
    router: Router<MemoryHost>,
    control: Control<MemoryHost>,
    tickets: HashMap<u64, Ticket<MemoryHost>>,
    replicas: HashMap<String, usize>,
    max_num_seqs: u32,
    cache_tokens: u64,
    sequence: u64,
    /// Requests in line, by the filter's names for them.
    held: BTreeMap<u64, InLine>,
    options: HomingOptions,
    /// As the collector learns what texts are like.
    estimator: Estimator,
    totals: Totals,
    said_waiting: Duration,
}

/// A request in line.
#[derive(Debug)]
struct InLine {
    held: Held<MemoryHost>,
    request: u64,
    conversation: Conversation,
    bytes: u32,
}

fn name(replica: usize) -> ReplicaName {
    ReplicaName::endpoint(([10, 0, (replica / 250) as u8, (replica % 250) as u8 + 1], 8000).into())
}

/// As the filter makes one of a session's id.
fn digest(session: u64) -> Digest {
    Digest(u128::from(session).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
}

impl Homing {
    pub(super) fn new(fleet: &Fleet, options: HomingOptions) -> Self {
        let max_num_seqs = fleet.max_num_seqs as u32;
        let pool = PoolPolicy {
            spill_threshold: options.threshold,
            spill_margin: options.margin,
            max_num_seqs: Some(max_num_seqs),
            admission: options.admission,
            replicas: (0..fleet.replicas).map(name).collect(),
            ..PoolPolicy::new(POOL)
        };
        let settings = Settings { turns_away: options.turns_away, max_conversations: 4096, ..Settings::default() };
        let host = MemoryHost::default();
        let router = Router::new(host.clone(), settings, vec![pool]).expect("a host in memory refuses nothing");
        let control = Control::new(host.clone());
        let replicas = (0..fleet.replicas).map(|replica| (name(replica).address.to_string(), replica)).collect();
        Self {
            host,
            router,
            control,
            tickets: HashMap::new(),
            replicas,
            max_num_seqs,
            cache_tokens: (fleet.blocks * fleet.block_size) as u64,
            sequence: 0,
            held: BTreeMap::new(),
            options,
            estimator: Estimator::default(),
            totals: Totals::default(),
            said_waiting: Duration::ZERO,
        }
    }

    fn set_now(&self, view: &View<'_>) {
        self.host.set_now(view.now.as_millis() as u64);
    }

    /// Where a decided request goes; replicas answer every request, so it is served there.
    fn goes(&mut self, id: u64, mut ticket: Ticket<MemoryHost>) -> usize {
        let chosen = ticket.chosen().map(|chosen| chosen.address.clone()).unwrap_or_default();
        self.router.served(&mut ticket, &chosen, Answer::Served);
        self.tickets.insert(id, ticket);
        self.replicas.get(chosen.as_str()).copied().unwrap_or(0)
    }
}

fn asked(conversation: &Conversation, bytes: u32) -> Request<'_> {
    Request { conversation: Some(conversation), generates: true, bytes, ..Request::default() }
}

impl Policy for Homing {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> Option<usize> {
        self.set_now(view);
        let conversation = Conversation {
            digest: digest(request.session),
            source: Source::Known("x-session-id"),
            parent: request.parent.map(digest),
        };
        match self.router.decide(POOL.as_bytes(), &asked(&conversation, request.bytes)) {
            Some(Verdict::Go(ticket)) => Some(self.goes(request.id, ticket)),
            Some(Verdict::Hold(held)) => {
                let in_line = InLine { request: request.id, conversation, bytes: request.bytes, held };
                self.held.insert(in_line.held.id(), in_line);
                None
            }
            _ => unreachable!("a pool without pins that sends what it cannot hold refuses nothing"),
        }
    }

    fn released(&mut self, view: &View<'_>) -> Vec<(u64, usize)> {
        self.set_now(view);
        let now_ms = view.now.as_millis() as u64;
        let max_wait_ms = self.options.admission.map_or(u64::MAX, |admission| admission.max_wait_ms);
        let mut released = Vec::new();
        if view.now >= self.said_waiting + Duration::from_secs(1) {
            self.said_waiting = view.now;
            self.router.still_waiting(self.held.values().map(|in_line| &in_line.held)).expect("a host in memory refuses nothing");
        }
        let called = self.router.called(POOL.as_bytes()).expect("a host in memory refuses nothing");
        let overdue: Vec<u64> =
            self.held.iter().filter(|(_, in_line)| now_ms - in_line.held.since_ms() >= max_wait_ms).map(|(id, _)| *id).collect();
        for (id, is_overdue) in called.into_iter().map(|id| (id, false)).chain(overdue.into_iter().map(|id| (id, true))) {
            let Some(in_line) = self.held.get(&id) else { continue };
            let request = asked(&in_line.conversation, in_line.bytes);
            let verdict = if is_overdue {
                Some(self.router.overdue(POOL.as_bytes(), &request, &in_line.held))
            } else {
                self.router.retry(POOL.as_bytes(), &request, &in_line.held)
            };
            if let Some(Verdict::Go(ticket)) = verdict {
                let request = in_line.request;
                self.held.remove(&id);
                released.push((request, self.goes(request, ticket)));
            }
        }
        released
    }

    fn ended(&mut self, id: u64, view: &View<'_>) {
        self.set_now(view);
        self.held.retain(|_, in_line| in_line.request != id);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.router.ended(ticket);
        }
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(SNAPSHOT)
    }

    fn counted(&mut self, counters: &Counters) {
        self.totals.prompt_tokens = counters.prompt_tokens_cached + counters.prompt_tokens_computed;
        self.totals.cached_tokens = counters.prompt_tokens_cached;
    }

    fn looked(&mut self, engines: &[Gauges], view: &View<'_>) {
        self.set_now(view);
        self.sequence += 1;
        let report = |(replica, gauges): (usize, &Gauges)| ReplicaReport {
            replica: name(replica),
            state: ReplicaState::Ready,
            running: gauges.running as u32,
            waiting: gauges.waiting as u32,
            kv_usage: gauges.kv_cache_usage as f32,
            cache_tokens: self.cache_tokens,
            max_num_seqs: self.max_num_seqs,
            prefix_hit_rate: None,
            age_ms: Some(0),
            peers: Peers::default(),
        };
        let replicas = engines.iter().enumerate().map(report).collect();
        let pools = vec![PoolReport {
            cluster: POOL.into(),
            bytes_per_token: self.estimator.bytes_per_token(),
            shared_tokens: self.options.shared_tokens.or(self.estimator.shared_tokens()),
            replicas,
        }];
        let request =
            SyncRequest { version: SYNC_VERSION, generation: 1, sequence: self.sequence, pools, ..SyncRequest::default() };
        let body = serde_json::to_vec(&request).expect("a snapshot is JSON");
        let answer = self.control.exchange(&body).expect("the snapshot is newer than the last");
        for pool in answer.pools {
            let (prompt_bytes, repeated_bytes, first_turns) = (pool.prompt_bytes, pool.repeated_bytes, pool.first_turns);
            self.totals = Totals { prompt_bytes, repeated_bytes, first_turns, ..self.totals };
        }
        self.estimator.update(&self.totals);
        self.router.sweep(false).expect("a host in memory refuses nothing");
    }
}
