//! The decision, told as an operator would: through snapshots, requests and statistics.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::control::Control;
use crate::host::{Expected, MemoryHost};
use crate::identity::{Digest, Source};
use crate::policy::Limit;
use crate::replica::ReplicaName;
use crate::sync::{Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_VERSION, SyncAnswer, SyncRequest};
use crate::testing::test;

mod admission;
mod fleet;

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
        self.router.served(&mut ticket, &chosen.address.to_string(), false);
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

// === Placing ===

#[test]
fn new_conversations_one_after_another_are_spread_evenly() {
    let mut site = Site::new(|_| {});
    let mut placed = BTreeMap::new();
    for id in 0..8 {
        let (outcome, replica) = site.turn(id);
        assert_eq!(outcome, Outcome::Placed);
        *placed.entry(replica).or_insert(0) += 1;
    }
    assert_eq!(placed.into_values().collect::<Vec<_>>(), [2; 4]);
}

#[test]
fn a_burst_over_two_threads_is_spread_evenly() {
    let mut site = Site::new(|_| {});
    let mut other = site.thread();
    let tickets: Vec<_> = (0..8).map(|id| ticket(if id % 2 == 0 { &mut site.router } else { &mut other }, id)).collect();
    assert_eq!(site.gauges().into_values().collect::<Vec<_>>(), [2; 4]);
    drop(tickets);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_new_conversation_goes_where_the_load_is_lowest_whoever_made_it() {
    let mut site = Site::new(|_| {});
    for (report, running) in site.reports.iter_mut().zip([3, 1, 2, 3]) {
        report.running = running;
    }
    site.sync();
    assert_eq!(site.turn(1).1, name(2));
}

#[test]
fn what_this_envoy_sent_itself_is_not_counted_twice() {
    let mut site = Site::new(|_| {});
    let tickets: Vec<_> = (0..4).map(|id| site.ticket(id)).collect();
    // The engines run what this Envoy sent; on the second one somebody else's request waits too.
    for report in &mut site.reports {
        report.running = 1;
    }
    site.reports[1].waiting = 1;
    site.sync();
    let loads: Vec<_> = (1..=4).map(|number| site.load(number)).collect();
    assert_eq!(loads, [1, 2, 1, 1]);
    drop(tickets);
}

#[test]
fn a_request_that_ended_while_the_snapshot_was_on_its_way_is_no_load() {
    let mut site = Site::new(|_| {});
    let ticket = site.ticket(1);
    let replica = chosen(&ticket);
    let number = (1..=4).find(|number| name(*number) == replica).expect("one of four");
    site.reports[number - 1].running = 1;
    site.router.ended(ticket);
    site.sync();
    assert_eq!(site.load(number), 0);
    // Two exchanges later it can only be somebody else's.
    site.sync();
    site.sync();
    assert_eq!(site.load(number), 1);
}

#[test]
fn an_old_snapshot_counts_for_nothing_and_stops_nothing() {
    let mut site = Site::new(|_| {});
    site.reports[0].running = 5;
    site.sync();
    assert_eq!(site.load(1), 5);
    site.host.advance(6_000);
    assert_eq!(site.load(1), 0);
    assert_eq!(site.turn(1).0, Outcome::Placed);
}

#[test]
fn ties_go_to_the_fewest_held_then_the_least_kv_then_the_least_recently_chosen() {
    let mut site = Site::new(|_| {});
    for id in 0..4 {
        site.turn(id);
    }
    // Each holds one; the cache of the third is the emptiest.
    for (report, kv_usage) in site.reports.iter_mut().zip([0.5, 0.5, 0.25, 0.5]) {
        report.kv_usage = kv_usage;
    }
    site.sync();
    assert_eq!(site.turn(10).1, name(3));
    // Now it holds two, and the first was chosen the longest ago.
    assert_eq!(site.turn(11).1, name(1));
}

#[test]
fn held_conversations_are_counted_by_the_sweep_and_forgotten_when_idle() {
    let mut site = Site::new(|_| {});
    for id in 0..8 {
        site.turn(id);
    }
    let held = |site: &Site| -> u64 {
        site.host
            .metrics()
            .into_iter()
            .filter(|(name, _)| name.starts_with("homing_held_conversations"))
            .map(|(_, value)| value)
            .sum()
    };
    site.host.advance(10_000);
    site.router.sweep(false).expect("a sweep");
    assert_eq!(held(&site), 8);
    site.host.advance(601_000);
    site.router.sweep(false).expect("a sweep");
    assert_eq!(held(&site), 0);
}

#[test]
fn a_thread_that_serves_leaves_the_sweep_to_one_that_does_not() {
    let mut site = Site::new(|_| {});
    let mut idle = site.thread();
    site.turn(1);
    site.host.advance(10_000);
    idle.sweep(false).expect("a sweep");
    site.turn(2);
    site.host.advance(1_500);
    site.router.sweep(true).expect("no sweep");
    let held = |site: &Site| {
        site.host.metrics().iter().filter(|(n, _)| n.starts_with("homing_held_conversations")).map(|(_, v)| v).sum::<u64>()
    };
    assert_eq!(held(&site), 1);
    site.host.advance(2_000);
    site.router.sweep(true).expect("a sweep");
    assert_eq!(held(&site), 2);
}

#[test]
fn an_answer_says_what_is_held_and_by_which_rules() {
    let mut site = Site::new(|policy| policy.spill_margin = Limit::Fixed(3));
    let since = site.host.now_ms();
    let (_, home) = site.turn(1);
    site.turn(1);
    site.host.advance(10_000);
    site.router.sweep(false).expect("a sweep");
    let answer = site.sync();
    assert_eq!((answer.filter_version.as_str(), answer.counting_since_ms), (env!("CARGO_PKG_VERSION"), Some(since)));
    let pool = &answer.pools[0];
    assert_eq!((pool.spill_threshold_auto, pool.spill_margin_auto), (Some(true), Some(false)));
    assert_eq!(pool.snapshot_age_ms, Some(10_000), "of the snapshot before this one");
    for replica in &pool.replicas {
        let count = u64::from(replica.replica == home);
        assert_eq!((replica.held_conversations, replica.recent_conversations), (Some(count), Some(count)));
        assert_eq!(replica.recent_context_bytes, Some(1000 * count));
        assert_eq!((replica.spill_threshold, replica.spill_margin), (8, Some(3)));
    }
    site.host.advance(150_000);
    site.router.sweep(false).expect("a sweep");
    let answer = site.sync();
    let quiet = answer.pools[0].replicas.iter().find(|replica| replica.replica == home).expect("the home");
    assert_eq!((quiet.held_conversations, quiet.recent_conversations, quiet.recent_context_bytes), (Some(1), Some(0), Some(0)));
}

#[test]
fn counting_began_with_the_first_thread() {
    let mut site = Site::new(|_| {});
    let since = site.host.now_ms();
    site.host.advance(60_000);
    drop(site.thread());
    assert_eq!(site.sync().counting_since_ms, Some(since));
}

// === Staying and spilling ===

#[test]
fn a_turn_stays_at_home_up_to_the_threshold_and_spills_above_it() {
    let mut site = Site::new(|policy| policy.spill_threshold = Limit::Fixed(2));
    let (_, home) = site.turn(0);
    let mut held = Vec::new();
    for _ in 0..3 {
        let ticket = site.ticket(0);
        assert_eq!((ticket.planned(), chosen(&ticket)), (Outcome::Sticky, home));
        held.push(ticket);
    }
    let spilled = site.ticket(0);
    assert_eq!(spilled.planned(), Outcome::Spilled);
    assert_ne!(chosen(&spilled), home);
    drop((held, spilled));
    assert_eq!(site.turn(0), (Outcome::Sticky, home), "the home is kept");
}

#[test]
fn an_automatic_threshold_is_a_quarter_of_what_the_engine_runs_at_once() {
    for (max_num_seqs, threshold) in [(32, 8), (256, 64), (4, 1), (1, 1), (0, 64)] {
        let mut site = Site::new(|_| {});
        for report in &mut site.reports {
            report.max_num_seqs = max_num_seqs;
        }
        let answer = site.sync();
        assert!(answer.pools[0].replicas.iter().all(|replica| replica.spill_threshold == threshold), "{max_num_seqs}");
    }
}

#[test]
fn a_turn_does_not_spill_where_it_would_gain_less_than_the_margin() {
    let mut site = Site::new(|policy| {
        policy.spill_threshold = Limit::Fixed(4);
        policy.spill_margin = Limit::Fixed(3);
    });
    let (_, home) = site.turn(0);
    for report in &mut site.reports {
        report.running = if report.replica == home { 5 } else { 3 };
    }
    site.settle();
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
    for report in &mut site.reports {
        report.running = if report.replica == home { 6 } else { 3 };
    }
    site.settle();
    assert_eq!(site.turn(0).0, Outcome::Spilled);
}

#[test]
fn when_every_replica_is_full_nothing_moves() {
    let mut site = Site::new(|policy| policy.spill_threshold = Limit::Fixed(4));
    let (_, home) = site.turn(0);
    for report in &mut site.reports {
        report.running = if report.replica == home { 50 } else { 5 };
    }
    site.sync();
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
}

#[test]
fn a_second_turn_away_in_a_row_moves_the_conversation_there() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    site.reports.iter_mut().filter(|report| report.replica == home).for_each(|report| report.running = 20);
    site.sync();
    let (outcome, second) = site.turn(0);
    assert_eq!(outcome, Outcome::Spilled);
    // Another replica is as free, but the second home has part of the conversation cached.
    assert_eq!(site.turn(0), (Outcome::Spilled, second));
    assert_eq!(site.turn(0), (Outcome::Sticky, second));
}

#[test]
fn a_turn_at_home_in_between_keeps_the_home() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    let load_home = |site: &mut Site, running| {
        site.reports.iter_mut().filter(|report| report.replica == home).for_each(|report| report.running = running);
        site.sync();
    };
    for _ in 0..3 {
        load_home(&mut site, 20);
        assert_eq!(site.turn(0).0, Outcome::Spilled);
        load_home(&mut site, 0);
        assert_eq!(site.turn(0), (Outcome::Sticky, home));
    }
}

// === Homes that go away ===

#[test]
fn a_home_that_is_down_draining_asleep_or_gone_is_left_for_good() {
    for state in [Some(ReplicaState::Down), Some(ReplicaState::Draining), Some(ReplicaState::Asleep), None] {
        let mut site = Site::new(|_| {});
        let (_, home) = site.turn(0);
        match state {
            Some(state) => site.reports.iter_mut().filter(|report| report.replica == home).for_each(|report| report.state = state),
            None => site.reports.retain(|report| report.replica != home),
        }
        site.sync();
        let (outcome, moved) = site.turn(0);
        assert_eq!(outcome, Outcome::Rehomed, "{state:?}");
        assert_ne!(moved, home, "{state:?}");
        assert_eq!(site.turn(0), (Outcome::Sticky, moved), "{state:?}");
    }
}

#[test]
fn a_replica_that_does_not_take_turns_gets_no_conversation_and_no_retry() {
    let mut site = Site::new(|_| {});
    site.set_state(2, ReplicaState::Draining);
    for id in 0..20 {
        let ticket = site.ticket(id);
        let gone = name(2).address.to_string();
        assert!(ticket.addresses().all(|address| address != gone));
        assert_eq!(ticket.addresses().count(), 3);
    }
}

#[test]
fn with_no_replica_ready_the_choice_is_envoys() {
    let mut site = Site::new(|_| {});
    for number in 1..=4 {
        site.set_state(number, ReplicaState::Down);
    }
    let ticket = site.ticket(0);
    assert_eq!((ticket.planned(), ticket.addresses().count()), (Outcome::Passed, 0));
}

#[test]
fn a_replica_is_tried_again_when_the_collector_that_called_it_down_is_gone() {
    let mut site = Site::new(|_| {});
    for number in 1..=4 {
        site.set_state(number, if number == 2 { ReplicaState::Draining } else { ReplicaState::Down });
    }
    assert_eq!(site.ticket(0).planned(), Outcome::Passed);
    site.host.advance(31_000);
    let (outcome, replica) = site.turn(0);
    assert_eq!(outcome, Outcome::Placed);
    assert_ne!(replica, name(2));
}

#[test]
fn replicas_can_be_configured_until_a_snapshot_names_them() {
    let mut site = Site::new(|policy| policy.replicas = vec![name(7)]);
    assert_ne!(site.turn(0).1, name(7));
    let policy = Policy { replicas: vec![name(7)], ..Policy::new("alone") };
    let mut router = Router::new(MemoryHost::new(0), Settings::default(), vec![policy]).expect("a router");
    let request = Request { conversation: Some(&conversation(0)), generates: true, ..Request::default() };
    let ticket = go(router.decide(b"alone", &request).expect("a pool"));
    assert_eq!(chosen(&ticket), name(7));
}

// === Requests of other kinds ===

#[test]
fn a_request_without_a_conversation_goes_to_the_least_loaded_and_is_not_remembered() {
    let mut site = Site::new(|_| {});
    let tickets: Vec<_> =
        (0..4).map(|_| go(decide(&mut site.router, &Request { generates: true, ..Request::default() }))).collect();
    assert!(tickets.iter().all(|ticket| ticket.planned() == Outcome::Unkeyed));
    assert_eq!(site.gauges().into_values().collect::<Vec<_>>(), [1; 4]);
}

#[test]
fn a_call_that_generates_nothing_follows_a_home_and_makes_none() {
    let mut site = Site::new(|_| {});
    let silent = |site: &mut Site, id| {
        go(decide(&mut site.router, &Request { conversation: Some(&conversation(id)), ..Request::default() }))
    };
    assert_eq!(silent(&mut site, 0).planned(), Outcome::Unkeyed);
    assert_eq!(site.turn(0).0, Outcome::Placed);
    let (_, home) = site.turn(0);
    let ticket = silent(&mut site, 0);
    assert_eq!((ticket.planned(), chosen(&ticket)), (Outcome::Sticky, home));
}

#[test]
fn a_pin_is_followed_or_refused_with_the_ready_replicas() {
    let mut site = Site::new(|_| {});
    site.set_state(2, ReplicaState::Down);
    let mut pin = |pin| decide(&mut site.router, &Request { pin: Some(pin), generates: true, ..Request::default() });
    let pinned = go(pin("10.0.0.3:8000"));
    assert_eq!((pinned.planned(), chosen(&pinned)), (Outcome::Pinned, name(3)));
    assert_eq!(pinned.addresses().collect::<Vec<_>>(), ["10.0.0.3:8000"; 3], "a retry goes there too");
    for unusable in ["10.0.0.2:8000", "10.0.0.9:8000", "nonsense", ""] {
        match pin(unusable) {
            Verdict::Refuse(why) => assert!(why.contains("10.0.0.1:8000, 10.0.0.3:8000, 10.0.0.4:8000"), "{why}"),
            other => panic!("{unusable} was followed: {other:?}"),
        }
    }
}

#[test]
fn a_pool_may_deny_pins() {
    let mut site = Site::new(|policy| policy.client_pin = false);
    let verdict = decide(&mut site.router, &Request { pin: Some("10.0.0.3:8000"), ..Request::default() });
    assert!(matches!(verdict, Verdict::Refuse(why) if why.contains("does not let clients")));
}

#[test]
fn a_pool_without_affinity_and_a_cluster_without_pool_are_envoys() {
    let mut site = Site::new(|policy| policy.affinity = false);
    let mut ticket = site.ticket(0);
    assert_eq!((ticket.planned(), ticket.addresses().count()), (Outcome::Passed, 0));
    site.router.served(&mut ticket, "10.0.0.2:8000", false);
    assert_eq!(site.in_flight(), 1, "counted where Envoy sent it");
    site.router.ended(ticket);
    assert_eq!((site.in_flight(), site.count(Outcome::Passed)), (0, 1));
    assert!(site.router.decide(b"other", &Request::default()).is_none());
}

#[test]
fn ranks_of_one_endpoint_are_replicas_and_a_retry_keeps_the_rank() {
    let mut site = ranked_site(|_| {});
    let ranks = ["10.0.0.1:8000#0", "10.0.0.1:8000#1", "10.0.0.2:8000#0", "10.0.0.2:8000#1"];
    let tickets: Vec<_> = (0..4).map(|id| site.ticket(id)).collect();
    let mut placed: Vec<_> = tickets.iter().map(|ticket| chosen(ticket).to_string()).collect();
    placed.sort();
    assert_eq!(placed, ranks);
    assert!(tickets.iter().all(|ticket| ticket.alternates.len() == 1));
    assert!(tickets.iter().all(|ticket| ticket.alternates[0].name.rank == chosen(ticket).rank));
}

fn ranked_site(change: impl FnOnce(&mut Policy)) -> Site {
    let mut site = Site::new(change);
    let ranks = ["10.0.0.1:8000#0", "10.0.0.1:8000#1", "10.0.0.2:8000#0", "10.0.0.2:8000#1"];
    site.reports = ranks.iter().map(|name| report(name.parse().expect("a name"))).collect();
    site.sync();
    site
}

#[test]
fn a_rank_the_client_names_is_a_pin_to_the_least_loaded_replica_of_that_rank() {
    let mut site = ranked_site(|_| {});
    let mut pinned = |rank| decide(&mut site.router, &Request { rank: Some(rank), generates: true, ..Request::default() });
    let tickets = [go(pinned(1)), go(pinned(1))];
    let mut names = tickets.iter().map(|ticket| chosen(ticket).to_string()).collect::<Vec<_>>();
    names.sort();
    assert_eq!(names, ["10.0.0.1:8000#1", "10.0.0.2:8000#1"]);
    assert!(tickets.iter().all(|ticket| ticket.planned() == Outcome::Pinned));
    assert!(matches!(pinned(7), Verdict::Refuse(why) if why.contains("10.0.0.1:8000#0")));
}

#[test]
fn a_rank_means_nothing_where_no_replica_has_one() {
    let mut site = Site::new(|policy| policy.client_pin = false);
    let ticket = go(decide(&mut site.router, &Request { rank: Some(0), generates: true, ..Request::default() }));
    assert_eq!((ticket.planned(), chosen(&ticket).rank), (Outcome::Unkeyed, None));
}

#[test]
fn a_call_whose_rank_the_engine_ignores_counts_at_its_endpoint_and_stays_there() {
    let mut site = ranked_site(|_| {});
    let responses = |site: &mut Site| {
        let request = Request { conversation: Some(&conversation(0)), generates: true, ignores_rank: true, ..Request::default() };
        let mut ticket = go(decide(&mut site.router, &request));
        let chosen = chosen(&ticket);
        assert_eq!(ticket.alternates.len(), 1, "the other endpoint, once");
        site.router.served(&mut ticket, &chosen.address.to_string(), false);
        (ticket.served().expect("an outcome").outcome, chosen)
    };
    let (outcome, first) = responses(&mut site);
    assert_eq!((outcome, first.rank), (Outcome::Placed, None));
    for _ in 0..3 {
        assert_eq!(responses(&mut site), (Outcome::Sticky, first));
    }
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_retry_of_such_a_call_moves_the_conversation_to_the_other_endpoint() {
    let mut site = ranked_site(|_| {});
    let request = Request { conversation: Some(&conversation(0)), generates: true, ignores_rank: true, ..Request::default() };
    let mut ticket = go(decide(&mut site.router, &request));
    let other = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &other, false);
    site.router.ended(ticket);
    let ticket = go(decide(&mut site.router, &request));
    assert_eq!((ticket.planned(), chosen(&ticket).address.to_string()), (Outcome::Sticky, other));
}

// === Learning from where it went ===

/// A turn that was sent home and served at the first address a retry had.
fn retried(site: &mut Site, id: u128) -> (Outcome, ReplicaName) {
    let mut ticket = site.ticket(id);
    let address = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &address, false);
    let served = ticket.served().expect("an outcome").clone();
    assert!(served.moved);
    site.router.ended(ticket);
    (served.outcome, served.replica.expect("a replica").name)
}

#[test]
fn a_retry_that_moves_a_turn_moves_the_conversation() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    let (outcome, moved) = retried(&mut site, 0);
    assert_eq!(outcome, Outcome::Rehomed);
    assert_ne!(moved, home);
    assert_eq!(site.turn(0), (Outcome::Sticky, moved));
    assert_eq!(retried(&mut site, 1).0, Outcome::Placed);
}

#[test]
fn a_retry_that_moves_a_call_that_generates_nothing_moves_no_home() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    let request = Request { conversation: Some(&conversation(0)), ..Request::default() };
    let mut ticket = go(decide(&mut site.router, &request));
    let other = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &other, false);
    site.router.ended(ticket);
    site.host.advance(11_000);
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
}

#[test]
fn a_turn_served_outside_the_snapshot_is_in_flight_nowhere() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    site.router.served(&mut ticket, "192.168.0.1:1", false);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn in_flight_moves_with_the_turn() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let before = site.gauges();
    let address = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &address, false);
    assert_ne!(site.gauges(), before);
    assert_eq!(site.in_flight(), 1);
    site.router.ended(ticket);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn outcomes_are_counted_from_where_a_request_was_served() {
    let mut site = Site::new(|_| {});
    let home = site.turn(0).1.to_string();
    site.turn(0);
    let nobody = site.ticket(0);
    site.router.ended(nobody);
    let mut stranger = site.ticket(0);
    site.router.served(&mut stranger, "192.168.0.1:1", false);
    site.router.ended(stranger);
    let dropped = site.ticket(0);
    drop(dropped);
    let counts = Outcome::ALL.map(|outcome| (outcome, site.count(outcome)));
    let expected = [(Outcome::Sticky, 1), (Outcome::Placed, 1), (Outcome::Passed, 1), (Outcome::Unserved, 1)];
    for (outcome, count) in counts {
        let expected = expected.iter().find(|(other, _)| *other == outcome).map_or(0, |(_, count)| *count);
        assert_eq!(count, expected, "{outcome:?}");
    }
    assert_eq!(site.in_flight(), 0);
    assert_eq!(site.host.metric(&Metric::Requests { pool: POOL, replica: &home, outcome: Outcome::Unserved }), 1);
    assert_eq!(site.host.metric(&Metric::Requests { pool: POOL, replica: "other", outcome: Outcome::Passed }), 1);
}

#[test]
fn what_came_before_the_first_snapshot_is_known_once_it_is_there() {
    let mut site = Site::before_the_first_snapshot(|_| {});
    let [mut ended, mut under_way] = [site.ticket(0), site.ticket(1)];
    for ticket in [&mut ended, &mut under_way] {
        assert_eq!(ticket.planned(), Outcome::Passed);
        site.router.served(ticket, &name(2).address.to_string(), false);
    }
    site.router.ended(ended);
    let answer = site.sync();
    let seen: Vec<_> = answer.pools[0].replicas.iter().map(|replica| (replica.in_flight, replica.requests.passed)).collect();
    assert_eq!(seen, [(0, 0), (1, 1), (0, 0), (0, 0)]);
    site.router.ended(under_way);
    let answer = site.sync();
    assert_eq!((answer.pools[0].replicas[1].in_flight, answer.pools[0].replicas[1].requests.passed), (0, 2));
}

impl Site {
    fn load(&mut self, number: usize) -> u32 {
        let max_age_ms = self.router.settings.snapshot_max_age_ms;
        let pools = self.router.refreshed_pools().expect("pools");
        let pool = pools.last().expect("the pool");
        let member = pool.member(name(number).id()).expect("a member");
        pool.load(&self.host, member, self.host.now_ms(), max_age_ms).expect("a load")
    }
}

// === Whatever happens ===

/// Something that happens to a site.
#[derive(Clone, Debug)]
enum Event {
    Turn { id: u128, thread: bool },
    End { ticket: usize, retried: bool, answered: bool },
    State { number: usize, state: ReplicaState },
    Load { number: usize, running: u32 },
    Gone { number: usize },
    Wait { seconds: u32 },
    Sweep,
}

fn any_event() -> impl Strategy<Value = Event> {
    let state = prop::sample::select(vec![ReplicaState::Ready, ReplicaState::Down, ReplicaState::Draining, ReplicaState::Asleep]);
    prop_oneof![
        6 => (0_u128..30, any::<bool>()).prop_map(|(id, thread)| Event::Turn { id, thread }),
        6 => (0_usize..20, any::<bool>(), any::<bool>()).prop_map(|(ticket, retried, answered)| Event::End { ticket, retried, answered }),
        1 => (1_usize..=4, state).prop_map(|(number, state)| Event::State { number, state }),
        1 => (1_usize..=4, 0_u32..20).prop_map(|(number, running)| Event::Load { number, running }),
        1 => (1_usize..=4).prop_map(|number| Event::Gone { number }),
        1 => (0_u32..700).prop_map(|seconds| Event::Wait { seconds }),
        1 => Just(Event::Sweep),
    ]
}

proptest! {
    #[test]
    fn in_flight_is_never_negative_and_ends_at_zero(events in prop::collection::vec(any_event(), 1..120)) {
        let mut site = Site::new(|policy| policy.spill_threshold = Limit::Fixed(1));
        let mut other = site.thread();
        let mut open: Vec<(bool, Ticket<MemoryHost>)> = Vec::new();
        let (mut ended, mut taken) = (0, 0);
        for event in events {
            match event {
                Event::Turn { id, thread } => {
                    let ticket = ticket(if thread { &mut other } else { &mut site.router }, id);
                    taken += u64::from(ticket.chosen().is_some());
                    open.push((thread, ticket));
                }
                Event::End { ticket, retried, answered } if ticket < open.len() => {
                    let (thread, mut ticket) = open.swap_remove(ticket);
                    let router = if thread { &mut other } else { &mut site.router };
                    let address = ticket.addresses().nth(usize::from(retried)).map(str::to_owned);
                    let had = ticket.chosen().is_some();
                    if let Some(address) = address.filter(|_| answered) {
                        router.served(&mut ticket, &address, false);
                    }
                    router.ended(ticket);
                    ended += 1;
                    taken -= u64::from(had);
                }
                Event::End { .. } => {}
                Event::State { number, state } => {
                    site.reports.iter_mut().filter(|report| report.replica == name(number)).for_each(|report| report.state = state);
                    site.sync();
                }
                Event::Load { number, running } => {
                    site.reports.iter_mut().filter(|report| report.replica == name(number)).for_each(|report| report.running = running);
                    site.sync();
                }
                Event::Gone { number } => {
                    site.reports.retain(|report| report.replica != name(number));
                    site.sync();
                    site.reports.push(report(name(number)));
                }
                Event::Wait { seconds } => site.host.advance(u64::from(seconds) * 1000),
                Event::Sweep => site.router.sweep(false).expect("a sweep"),
            }
            // A count below zero would wrap to a huge one.
            prop_assert_eq!(site.in_flight(), taken);
        }
        drop(open);
        prop_assert_eq!(site.in_flight(), 0);
        let counted: u64 = Outcome::ALL.iter().map(|outcome| site.count(*outcome)).sum();
        prop_assert_eq!(counted, ended);
        prop_assert_eq!(site.errors(ErrorKind::Host), 0);
    }

    #[test]
    fn any_bytes_in_shared_data_leave_a_router_that_works(bytes: Vec<u8>, layout in 0_u8..4) {
        let mut site = Site::new(|_| {});
        site.turn(9);
        let garbage: Vec<u8> = core::iter::once(layout).chain(bytes).collect();
        let pool = ["snapshot", "ledger", "policy"].map(|part| format!("homing/pool/{POOL}/{part}"));
        let others = ["homing/lanes", "homing/sweep", "homing/sync", "homing/bindings/0", "homing/settings", "homing/since"].map(str::to_owned);
        for key in pool.into_iter().chain(others) {
            site.host.write(&key, &garbage, Expected::Anything).expect("room");
        }
        site.turn(0);
        site.host.advance(30_000);
        site.router.heal().expect("a tick");
        site.router.sweep(false).expect("a sweep");
        let mut other = site.thread();
        drop(ticket(&mut other, 0));
        // The stored order of snapshots may be ahead; it is forgotten once it is old.
        site.host.advance(30_000);
        site.sequence = u64::MAX - 1;
        site.sync();
        site.turn(1);
        prop_assert_eq!(site.in_flight(), 0);
    }

    #[test]
    fn any_bytes_sent_to_the_control_listener_are_an_exchange_or_a_refusal(body: Vec<u8>) {
        let host = MemoryHost::new(0);
        let refused = Control::new(host.clone()).exchange(&body).is_err();
        prop_assert!(refused);
        prop_assert_eq!(host.shared_bytes(), 0);
    }
}

// === Threads that die ===

/// What a trap does: the thread's memory is gone and nothing is given back.
fn trap(router: Router<MemoryHost>, tickets: Vec<Ticket<MemoryHost>>) {
    core::mem::forget(tickets);
    core::mem::forget(router);
}

#[test]
fn what_a_dead_thread_held_is_given_back_within_ten_seconds() {
    let mut site = Site::new(|_| {});
    let mut dying = site.thread();
    let kept = site.ticket(0);
    let lost: Vec<_> = (1..6).map(|id| ticket(&mut dying, id)).collect();
    trap(dying, lost);
    assert_eq!(site.in_flight(), 6);
    for _ in 0..20 {
        site.host.advance(500);
        site.router.heal().expect("a tick");
    }
    assert_eq!(site.in_flight(), 1);
    assert_eq!(site.errors(ErrorKind::Leak), 5);
    drop(kept);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_thread_that_was_only_held_up_gets_its_own_back() {
    let mut site = Site::new(|_| {});
    let mut slow = site.thread();
    let mut held: Vec<_> = (0..5).map(|id| ticket(&mut slow, id)).collect();
    for _ in 0..12 {
        site.host.advance(500);
        site.router.heal().expect("a tick");
    }
    // Before its next tick, some of its requests end and new ones begin.
    held.truncate(2);
    held.push(ticket(&mut slow, 9));
    slow.heal().expect("a tick");
    assert_eq!(site.in_flight(), 3);
    drop(held);
    assert_eq!(site.in_flight(), 0);
    for _ in 0..20 {
        site.host.advance(500);
        slow.heal().expect("a tick");
        site.router.heal().expect("a tick");
    }
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn threads_that_all_seem_dead_at_once_all_come_back() {
    let mut site = Site::new(|_| {});
    let mut other = site.thread();
    let mut third = site.thread();
    let held: Vec<_> =
        (0..9).map(|id| ticket([&mut site.router, &mut other, &mut third][usize::try_from(id % 3).expect("small")], id)).collect();
    // The machine was suspended; then every thread ticks.
    site.host.advance(60_000);
    for _ in 0..6 {
        for router in [&mut site.router, &mut other, &mut third] {
            router.heal().expect("a tick");
        }
        site.host.advance(500);
    }
    assert_eq!(site.in_flight(), 9);
    drop(held);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_lane_that_is_being_settled_is_waited_for() {
    let mut site = Site::new(|_| {});
    let held: Vec<_> = (0..3).map(|id| site.ticket(id)).collect();
    site.host.advance(6_000);
    let key = site.router.lanes_key.clone();
    let dead = crate::lanes::take_dead(&site.host, &key).expect("lanes").expect("a dead lane");
    // Its thread ticks before the other has done anything.
    site.router.heal().expect("a tick");
    let mut other = site.thread();
    other.refreshed_pools().map(drop).expect("pools");
    other.settle(dead).expect("settled");
    crate::lanes::free(&site.host, &key, dead).expect("freed");
    assert_eq!(site.in_flight(), 0);
    site.router.heal().expect("a tick");
    assert_eq!(site.in_flight(), 3);
    drop(held);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_count_below_zero_is_read_as_none() {
    let mut site = Site::new(|_| {});
    let gauge = Metric::InFlight { pool: POOL, replica: &name(1).to_string() };
    let gauge = site.host.define(&gauge).expect("a gauge");
    site.host.add(gauge, -3).expect("room");
    assert_eq!(site.load(1), 0);
    assert_eq!(site.sync().pools[0].replicas[0].in_flight, 0);
}

// === Replicas that fail ===

#[test]
fn a_replica_that_fails_fast_does_not_attract_work() {
    let mut site = Site::new(|_| {});
    let broken = name(1);
    let mut sent = 0;
    for id in 0..100 {
        let mut ticket = site.ticket(id);
        let chosen = chosen(&ticket);
        sent += u32::from(chosen == broken);
        site.router.served(&mut ticket, &chosen.address.to_string(), chosen == broken);
        site.router.ended(ticket);
        site.host.advance(10);
    }
    assert!(sent <= 3, "{sent} of 100 went to the broken one");
}

#[test]
fn a_replica_that_serves_again_is_forgiven() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let home = chosen(&ticket);
    let number = (1..=4).find(|number| name(*number) == home).expect("one of four");
    site.router.served(&mut ticket, &home.address.to_string(), true);
    site.router.ended(ticket);
    let penalty = |site: &Site| {
        site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].replica.penalty(site.host.now_ms())
    };
    assert!(penalty(&site) > 0);
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
    assert_eq!(penalty(&site), 0);
}

#[test]
fn a_replica_a_retry_left_counts_as_failed() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    retried(&mut site, 0);
    let number = (1..=4).find(|number| name(*number) == home).expect("one of four");
    assert!(site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].replica.penalty(site.host.now_ms()) > 0);
    site.host.advance(11_000);
    assert_eq!(site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].replica.penalty(site.host.now_ms()), 0);
}

// === Subagents ===

fn subagent(id: u128, parent: u128) -> Conversation {
    Conversation { parent: Some(conversation(parent).digest), ..conversation(id) }
}

#[test]
fn a_subagent_begins_at_its_parents_home_while_the_loads_are_within_the_margin() {
    let mut site = Site::new(|policy| policy.spill_margin = Limit::Fixed(2));
    let (_, home) = site.turn(0);
    let first = |site: &mut Site, id| {
        go(decide(&mut site.router, &Request { conversation: Some(&subagent(id, 0)), generates: true, ..Request::default() }))
    };
    let tickets: Vec<_> = (1..=4).map(|id| first(&mut site, id)).collect();
    let at_home = tickets.iter().filter(|ticket| chosen(ticket) == home).count();
    assert_eq!(tickets[0].planned(), Outcome::Placed);
    assert_eq!(at_home, 3, "up to two more than elsewhere");
}
