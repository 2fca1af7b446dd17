//! Homing's own router on a host in memory, fed by snapshots as in Envoy.

use std::collections::HashMap;
use std::time::Duration;

use homing_routing::control::Control;
use homing_routing::host::MemoryHost;
use homing_routing::identity::{Conversation, Digest, Source};
use homing_routing::policy::{Limit, Policy as PoolPolicy};
use homing_routing::replica::ReplicaName;
use homing_routing::router::{Request, Router, Settings, Ticket, Verdict};
use homing_routing::sync::{PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncRequest};

use super::{Fleet, Policy, Routed, View};
use crate::engine::Gauges;

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
}

impl Default for HomingOptions {
    fn default() -> Self {
        Self { threshold: Limit::Auto, margin: Limit::Auto, turns_away: Settings::default().turns_away }
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
    sequence: u64,
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
            replicas: (0..fleet.replicas).map(name).collect(),
            ..PoolPolicy::new(POOL)
        };
        let settings = Settings { turns_away: options.turns_away, max_conversations: 4096, ..Settings::default() };
        let host = MemoryHost::default();
        let router = Router::new(host.clone(), settings, vec![pool]).expect("a host in memory refuses nothing");
        let control = Control::new(host.clone());
        let replicas = (0..fleet.replicas).map(|replica| (name(replica).address.to_string(), replica)).collect();
        Self { host, router, control, tickets: HashMap::new(), replicas, max_num_seqs, sequence: 0 }
    }

    fn set_now(&self, view: &View<'_>) {
        self.host.set_now(view.now.as_millis() as u64);
    }
}

impl Policy for Homing {
    fn choose(&mut self, request: &Routed<'_>, view: &View<'_>) -> usize {
        self.set_now(view);
        let conversation = Conversation {
            digest: digest(request.session),
            source: Source::Known("x-session-id"),
            parent: request.parent.map(digest),
        };
        let asked = Request { conversation: Some(&conversation), generates: true, bytes: request.bytes, ..Request::default() };
        let Some(Verdict::Go(mut ticket)) = self.router.decide(POOL.as_bytes(), &asked) else {
            unreachable!("a pool without pins refuses nothing")
        };
        let chosen = ticket.chosen().map(|chosen| chosen.address.clone()).unwrap_or_default();
        self.router.served(&mut ticket, &chosen, false);
        self.tickets.insert(request.id, ticket);
        self.replicas.get(chosen.as_str()).copied().unwrap_or(0)
    }

    fn ended(&mut self, id: u64, view: &View<'_>) {
        self.set_now(view);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.router.ended(ticket);
        }
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(SNAPSHOT)
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
            cache_tokens: 0,
            max_num_seqs: self.max_num_seqs,
            prefix_hit_rate: None,
            age_ms: Some(0),
        };
        let replicas = engines.iter().enumerate().map(report).collect();
        let pools = vec![PoolReport { cluster: POOL.into(), replicas }];
        let request = SyncRequest { version: SYNC_VERSION, generation: 1, sequence: self.sequence, pools };
        let body = serde_json::to_vec(&request).expect("a snapshot is JSON");
        self.control.exchange(&body).expect("the snapshot is newer than the last");
        self.router.sweep(false).expect("a host in memory refuses nothing");
    }
}
