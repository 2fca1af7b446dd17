//! What each policy does with what it knows.

use std::collections::HashSet;
use std::time::Duration;

use proptest::prelude::*;

use super::hash::bound;
use super::prefix::{Piece, PrefixIndex, pieces};
use super::*;
use crate::text::words;

const FLEET: Fleet = Fleet { replicas: 4, max_num_seqs: 32, block_size: 16, blocks: 4000 };
const AFFINE: [PolicyName; 6] =
    [PolicyName::Hash, PolicyName::BoundedHash, PolicyName::StickySpill, PolicyName::LlmD, PolicyName::Higress, PolicyName::Homing];

fn policy(name: PolicyName) -> Box<dyn Policy> {
    name.policy(&FLEET, HomingOptions::default(), 1)
}

/// A proxy with one policy, whose engines show what a test says.
struct Proxy {
    policy: Box<dyn Policy>,
    in_flight: Vec<u32>,
    now: Duration,
    next: u64,
}

impl Proxy {
    fn new(name: PolicyName) -> Self {
        Self { policy: policy(name), in_flight: vec![0; FLEET.replicas], now: Duration::ZERO, next: 0 }
    }

    /// Sends the session's prompt, which is its own in all its turns, and leaves it in flight: its number and its replica.
    fn send_as(&mut self, session: u64, parent: Option<u64>) -> (u64, usize) {
        self.next += 1;
        self.now += Duration::from_millis(1);
        let prompt = words(session, 3000);
        let request = Routed { id: self.next, session, parent, prompt: &prompt, messages: &[3000], bytes: 12_000 };
        let view = View { now: self.now, in_flight: &self.in_flight };
        let replica = self.policy.choose(&request, &view).expect("nothing is held");
        self.in_flight[replica] += 1;
        (self.next, replica)
    }

    fn send(&mut self, session: u64) -> usize {
        self.send_as(session, None).1
    }

    fn end(&mut self, (id, replica): (u64, usize)) {
        self.in_flight[replica] -= 1;
        self.policy.ended(id, &View { now: self.now, in_flight: &self.in_flight });
    }

    /// A request that has ended when the next thing happens.
    fn serve(&mut self, session: u64) -> usize {
        let sent = self.send_as(session, None);
        self.end(sent);
        sent.1
    }

    fn look(&mut self, engines: [Gauges; 4]) {
        self.policy.looked(&engines, &View { now: self.now, in_flight: &self.in_flight });
    }
}

fn running(running: usize) -> Gauges {
    Gauges { running, ..Gauges::default() }
}

fn waiting(waiting: usize) -> Gauges {
    Gauges { waiting, ..Gauges::default() }
}

#[test]
fn affinity_policies_send_a_sessions_turns_where_the_first_went() {
    for name in AFFINE {
        let mut proxy = Proxy::new(name);
        let first: Vec<_> = (0..20).map(|session| proxy.serve(session)).collect();
        for _ in 0..3 {
            let again: Vec<_> = (0..20).map(|session| proxy.serve(session)).collect();
            assert_eq!(first, again, "{name:?}");
        }
        assert!(first.iter().collect::<HashSet<_>>().len() > 1, "{name:?} uses one replica");
    }
}

#[test]
fn others_spread_a_sessions_turns_over_all_replicas() {
    for name in PolicyName::value_variants().iter().filter(|name| !AFFINE.contains(name)) {
        let mut proxy = Proxy::new(*name);
        let used: HashSet<_> = (0..40).map(|_| proxy.serve(7)).collect();
        assert_eq!(used.len(), 4, "{name:?}");
    }
}

#[test]
fn round_robin_takes_one_after_the_other() {
    let mut proxy = Proxy::new(PolicyName::RoundRobin);
    assert_eq!([(); 6].map(|()| proxy.send(1)), [0, 1, 2, 3, 0, 1]);
}

#[test]
fn least_request_never_takes_the_one_with_most_in_flight_of_two() {
    let mut proxy = Proxy::new(PolicyName::LeastRequest);
    proxy.in_flight = vec![9, 0, 9, 9];
    let chosen: Vec<_> = (0..400).map(|_| proxy.serve(1)).collect();
    // It is among two of four at random in 7 of 16 cases.
    let share = chosen.iter().filter(|replica| **replica == 1).count() as f64 / 400.0;
    assert!((0.37..0.51).contains(&share), "{share}");
}

#[test]
fn a_replica_more_takes_sessions_and_moves_no_others() {
    let choose = |session: u64, replicas: usize| {
        let request = Routed { id: 1, session, parent: None, prompt: &[], messages: &[], bytes: 0 };
        policy(PolicyName::Hash).choose(&request, &View { now: Duration::ZERO, in_flight: &vec![0; replicas] })
    };
    let moved: Vec<_> =
        (0..1000).map(|session| (choose(session, 4), choose(session, 5))).filter(|(four, five)| four != five).collect();
    assert!(moved.iter().all(|(_, five)| *five == Some(4)));
    assert!((150..250).contains(&moved.len()), "{} of 1000, a fifth is fair", moved.len());
}

proptest! {
    #[test]
    fn bounded_hashing_keeps_its_bound(steps in prop::collection::vec((0u64..6, any::<bool>()), 1..120)) {
        let mut proxy = Proxy::new(PolicyName::BoundedHash);
        let mut sent = Vec::new();
        for (session, ends) in steps {
            if ends && !sent.is_empty() {
                proxy.end(sent.remove(session as usize % sent.len()));
            } else {
                let bound = bound(&proxy.in_flight);
                let (id, replica) = proxy.send_as(session, None);
                prop_assert!(proxy.in_flight[replica] <= bound, "{:?} above {bound}", proxy.in_flight);
                sent.push((id, replica));
            }
        }
    }
}

#[test]
fn the_bound_is_a_quarter_above_the_mean() {
    assert_eq!([bound(&[0; 4]), bound(&[4, 4, 4, 3]), bound(&[10, 0, 0, 0])], [1, 5, 4]);
}

#[test]
fn sticky_spill_leaves_a_full_home_and_comes_back() {
    let mut proxy = Proxy::new(PolicyName::StickySpill);
    let home = proxy.serve(1);
    proxy.in_flight[home] = 9;
    assert_eq!(proxy.serve(1), home, "nobody has looked yet");
    let mut engines = [running(0); 4];
    engines[home] = running(9);
    proxy.look(engines);
    assert_ne!(proxy.serve(1), home, "9 run, above 32 / 4");
    engines[home] = running(8);
    proxy.look(engines);
    assert_eq!(proxy.serve(1), home);
}

#[test]
fn vllm_sees_the_engines_as_its_coordinator_last_did() {
    for name in [PolicyName::Vllm, PolicyName::Vllm027] {
        let mut proxy = Proxy::new(name);
        proxy.look([running(20), running(20), running(0), running(20)]);
        assert_eq!([(); 3].map(|()| proxy.serve(1)), [2; 3], "{name:?}");
    }
    assert_eq!(policy(PolicyName::Vllm).looks_every(), Some(Duration::from_millis(100)));
}

#[test]
fn a_warm_prefix_weighs_more_than_a_queue_with_scorers() {
    for name in [PolicyName::LlmD, PolicyName::Higress] {
        let mut proxy = Proxy::new(name);
        let home = proxy.serve(1);
        let mut engines = [Gauges::default(); 4];
        engines[home] = waiting(3);
        proxy.look(engines);
        assert_eq!(proxy.serve(1), home, "{name:?}: 3 for the prefix against 2 for the queue");
        assert_ne!(proxy.serve(2), home, "{name:?}");
        // With a full cache besides it is 3 against 4.
        engines[home].kv_cache_usage = 1.0;
        proxy.look(engines);
        assert_ne!(proxy.serve(1), home, "{name:?}");
    }
}

#[test]
fn between_looks_higress_spreads_a_burst_by_its_own_requests() {
    let mut proxy = Proxy::new(PolicyName::Higress);
    (0..40).for_each(|session| {
        proxy.send(session);
    });
    assert_eq!(proxy.in_flight, [10; 4]);
    let mut proxy = Proxy::new(PolicyName::LlmD);
    (0..40).for_each(|session| {
        proxy.send(session);
    });
    assert!(proxy.in_flight.iter().max() > Some(&10), "a burst is spread by chance: {:?}", proxy.in_flight);
}

#[test]
fn homing_sends_a_subagent_to_its_parents_home() {
    let mut proxy = Proxy::new(PolicyName::Homing);
    let homes: Vec<_> = (0..8).map(|session| proxy.serve(session)).collect();
    for (parent, home) in homes.into_iter().enumerate() {
        let sent = proxy.send_as(100 + parent as u64, Some(parent as u64));
        proxy.end(sent);
        assert_eq!(sent.1, home);
    }
}

#[test]
fn homing_counts_a_request_until_it_ends() {
    let mut proxy = Proxy::new(PolicyName::Homing);
    let sent: Vec<_> = (0..4).map(|session| proxy.send_as(session, None)).collect();
    assert_eq!(sent.iter().map(|(_, replica)| replica).collect::<HashSet<_>>().len(), 4, "a burst is spread evenly");
    let freed = sent[2];
    proxy.end(freed);
    assert_eq!(proxy.send(9), freed.1, "the only one that is idle");
}

#[test]
fn a_prefix_index_forgets_what_was_sent_least_recently_and_ends_before_beginnings() {
    let prompt = |seed| pieces(&words(seed, 40), [10, 20, 30, 40]);
    let each = |_: &Piece| 1;
    let mut index = PrefixIndex::new(6);
    index.sent(&prompt(1), each);
    index.sent(&prompt(2), each);
    assert_eq!([index.matched(&prompt(1)), index.matched(&prompt(2))], [2, 4]);
    index.sent(&prompt(1), each);
    assert_eq!([index.matched(&prompt(1)), index.matched(&prompt(2))], [4, 2]);
}

#[test]
fn prompts_match_as_far_as_they_are_the_same() {
    let (one, mut two) = (words(1, 64), words(1, 64));
    two[40] += 1;
    let mut index = PrefixIndex::new(100);
    index.sent(&pieces(&one, [16, 32, 48, 64]), |_| 1);
    assert_eq!(index.matched(&pieces(&two, [16, 32, 48, 64])), 2);
}
