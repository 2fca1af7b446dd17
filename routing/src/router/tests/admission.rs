//! Admission by working set: caches of 36,000 tokens, and conversations of 10,000 tokens of which three fit each.

use super::*;
use crate::admission::{Admission, Overflow, Reason};
use crate::metric::AdmissionEvent;

mod anything;
mod told;

/// Conversations that fit the four replicas.
const FIT: u128 = 12;
/// Of 10,000 tokens.
const BYTES: u32 = 40_000;

fn site(change: impl FnOnce(&mut Admission)) -> Site {
    let mut admission = Admission::default();
    change(&mut admission);
    Site::new(|policy| policy.admission = Some(admission))
}

fn asked(conversation: &Conversation, bytes: u32) -> Request<'_> {
    Request { conversation: Some(conversation), generates: true, bytes, ..Request::default() }
}

fn ask(router: &mut Router<MemoryHost>, id: u128) -> Verdict<MemoryHost> {
    decide(router, &asked(&conversation(id), BYTES))
}

fn held(verdict: Verdict<MemoryHost>) -> Held<MemoryHost> {
    match verdict {
        Verdict::Hold(held) => held,
        other => panic!("not held: {other:?}"),
    }
}

fn retry(router: &mut Router<MemoryHost>, id: u128, held: &Held<MemoryHost>) -> Option<Ticket<MemoryHost>> {
    router.retry(POOL.as_bytes(), &asked(&conversation(id), BYTES), held).map(go)
}

impl Site {
    /// A whole turn that is not held; where it went.
    fn whole(&mut self, id: u128) -> ReplicaName {
        let mut ticket = go(ask(&mut self.router, id));
        let replica = chosen(&ticket);
        self.router.served(&mut ticket, &replica.address.to_string(), Answer::Served);
        self.router.ended(ticket);
        replica
    }

    /// As many conversations as fit, each with a turn in flight.
    fn full(&mut self) -> Vec<Ticket<MemoryHost>> {
        (0..FIT).map(|id| go(ask(&mut self.router, id))).collect()
    }

    fn called(&mut self) -> Vec<u64> {
        self.router.called(POOL.as_bytes()).expect("the line")
    }

    fn held_requests(&self) -> u64 {
        self.host.metric(&Metric::HeldRequests { pool: POOL })
    }

    /// Requests that were held, for whatever reason.
    fn were_held(&self) -> u64 {
        Reason::ALL.iter().map(|reason| self.event(AdmissionEvent::Held(*reason))).sum()
    }

    fn event(&self, event: AdmissionEvent) -> u64 {
        self.host.metric(&Metric::Admission { pool: POOL, event })
    }
}

#[test]
fn what_does_not_fit_waits_until_a_conversation_is_quiet() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    let waiting = held(ask(&mut site.router, 99));
    assert_eq!((site.called().len(), site.held_requests(), site.in_flight()), (0, 1, FIT as u64));
    let quiet = tickets.remove(0);
    let replica = chosen(&quiet);
    site.router.ended(quiet);
    assert!(site.called().is_empty(), "its next turn may still come");
    site.host.advance(5_001);
    site.router.still_waiting(core::iter::once(&waiting)).expect("a line");
    assert_eq!(site.called(), [waiting.id()]);
    let ticket = retry(&mut site.router, 99, &waiting).expect("its turn");
    assert_eq!((chosen(&ticket), ticket.planned()), (replica, Outcome::Placed));
    assert_eq!(site.held_requests(), 0);
    assert_eq!((site.event(AdmissionEvent::Held(Reason::NoRoom)), site.event(AdmissionEvent::Admitted)), (1, 1));
    assert_eq!(site.host.metric(&Metric::AdmissionWait { pool: POOL }), 5_001);
}

#[test]
fn a_conversation_keeps_its_place_from_turn_to_turn() {
    let mut site = site(|_| {});
    let homes: Vec<_> = (0..FIT).map(|id| site.whole(id)).collect();
    let waiting = held(ask(&mut site.router, 99));
    for _ in 0..5 {
        site.host.advance(1_500);
        site.router.still_waiting(core::iter::once(&waiting)).expect("a line");
        let again: Vec<_> = (0..FIT).map(|id| site.whole(id)).collect();
        assert_eq!(again, homes);
        assert!(site.called().is_empty());
    }
    assert_eq!(site.count(Outcome::Sticky), 5 * FIT as u64);
}

#[test]
fn requests_of_one_conversation_that_came_together_go_together() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    let line = [held(ask(&mut site.router, 99)), held(ask(&mut site.router, 99))];
    site.router.ended(tickets.remove(0));
    site.host.advance(5_001);
    site.router.still_waiting(line.iter()).expect("a line");
    assert_eq!(site.called(), [line[0].id(), line[1].id()]);
    let first = retry(&mut site.router, 99, &line[0]).expect("its turn");
    // Now its conversation has a place, and nothing else is free.
    assert_eq!(site.called(), [line[1].id()]);
    let second = retry(&mut site.router, 99, &line[1]).expect("its turn");
    assert_eq!(chosen(&second), chosen(&first));
}

#[test]
fn places_end_although_the_clock_is_set_back() {
    let mut site = site(|_| {});
    let tickets = site.full();
    tickets.into_iter().for_each(|ticket| site.router.ended(ticket));
    site.host.set_back(3_600_000);
    site.sync();
    site.whole(99);
}

#[test]
fn those_in_line_go_in_the_order_in_which_they_came() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    let line: Vec<_> = (50..54)
        .map(|id| {
            site.host.advance(10);
            held(ask(&mut site.router, id))
        })
        .collect();
    for ticket in tickets.drain(..2) {
        site.router.ended(ticket);
    }
    site.host.advance(5_001);
    site.router.still_waiting(line.iter()).expect("a line");
    assert_eq!(site.called(), [line[0].id(), line[1].id()]);
    assert!(retry(&mut site.router, 52, &line[2]).is_none(), "others are before it");
    let _late = held(ask(&mut site.router, 60));
    assert!(retry(&mut site.router, 50, &line[0]).is_some());
}

#[test]
fn one_that_returns_goes_before_new_ones_but_not_for_ever() {
    let mut site = site(|_| {});
    site.whole(77);
    site.host.advance(60_000);
    let mut tickets = site.full();
    let new = held(ask(&mut site.router, 99));
    site.host.advance(3_000);
    let returns = held(ask(&mut site.router, 77));
    site.router.ended(tickets.remove(0));
    site.host.advance(5_001);
    site.router.still_waiting([&new, &returns].into_iter()).expect("a line");
    assert_eq!(site.called(), [returns.id()]);
    drop(returns);
    site.host.advance(10_000);
    site.router.still_waiting(core::iter::once(&new)).expect("a line");
    let later = held(ask(&mut site.router, 78));
    assert_eq!(site.called(), [new.id()]);
    drop(later);
}

#[test]
fn a_client_that_leaves_is_forgotten() {
    let mut site = site(|_| {});
    let tickets = site.full();
    let (first, second) = (held(ask(&mut site.router, 50)), held(ask(&mut site.router, 51)));
    drop(first);
    drop(tickets);
    site.host.advance(5_001);
    site.router.still_waiting(core::iter::once(&second)).expect("a line");
    assert_eq!(site.called(), [second.id()]);
    drop(second);
    assert!(site.called().is_empty());
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn one_that_has_waited_too_long_is_sent_or_refused_as_configured() {
    for (overflow, event) in [(Overflow::Send, AdmissionEvent::Overdue), (Overflow::Reject, AdmissionEvent::Rejected)] {
        let mut site = site(|admission| admission.overflow = overflow);
        let _tickets = site.full();
        let waiting = held(ask(&mut site.router, 99));
        let verdict = site.router.overdue(POOL.as_bytes(), &asked(&conversation(99), BYTES), &waiting);
        match overflow {
            Overflow::Send => assert_eq!(go(verdict).planned(), Outcome::Placed),
            Overflow::Reject => assert!(matches!(verdict, Verdict::Busy { after_s: 1.. }), "{verdict:?}"),
        }
        assert_eq!((site.event(event), site.called().len()), (1, 0));
    }
}

#[test]
fn the_line_has_an_end() {
    let mut site = site(|admission| (admission.max_held, admission.overflow) = (2, Overflow::Reject));
    let _tickets = site.full();
    let _line: Vec<_> = (50..52).map(|id| held(ask(&mut site.router, id))).collect();
    assert!(matches!(ask(&mut site.router, 52), Verdict::Busy { .. }));
}

#[test]
fn what_evicts_little_or_follows_the_client_is_never_held() {
    let mut site = site(|_| {});
    let _tickets = site.full();
    let named = conversation(99);
    let small = asked(&named, 4_000);
    let silent = Request { generates: false, ..asked(&named, BYTES) };
    let pinned = Request { pin: Some("10.0.0.1:8000"), ..asked(&named, BYTES) };
    for request in [small, silent, pinned] {
        drop(go(decide(&mut site.router, &request)));
    }
    // A large one without a conversation evicts as much as any, and gives its place back when it ends.
    let large = Request { conversation: None, ..asked(&named, BYTES) };
    assert!(matches!(decide(&mut site.router, &large), Verdict::Hold(_)));
}

#[test]
fn a_request_without_a_conversation_has_a_place_for_as_long_as_it_runs() {
    let mut site = site(|_| {});
    let large = Request { generates: true, bytes: BYTES, ..Request::default() };
    let tickets: Vec<_> = (0..FIT).map(|_| go(decide(&mut site.router, &large))).collect();
    let waiting = held(decide(&mut site.router, &large));
    drop(tickets);
    assert_eq!(site.called(), [waiting.id()]);
}

#[test]
fn what_conversations_share_counts_once_at_each_replica() {
    let mut site = site(|_| {});
    site.shared_tokens = Some(6_000);
    site.sync();
    // 6,000 shared and 4,512 each: six fit 36,000.
    let tickets: Vec<_> = (0..24).map(|id| go(ask(&mut site.router, id))).collect();
    let _held = held(ask(&mut site.router, 99));
    drop(tickets);
}

#[test]
fn where_contexts_have_outgrown_the_cache_the_last_that_came_waits() {
    let mut site = site(|_| {});
    site.shared_tokens = Some(1);
    site.reports.truncate(1);
    site.sync();
    for id in 0..3 {
        site.host.advance(10);
        site.whole(id);
    }
    let grown = |id: u128| (conversation(id), 52_000);
    for id in [0, 1] {
        let (conversation, bytes) = grown(id);
        let ticket = go(decide(&mut site.router, &asked(&conversation, bytes)));
        site.router.ended(ticket);
    }
    let (last, bytes) = grown(2);
    let waiting = held(decide(&mut site.router, &asked(&last, bytes)));
    assert!(site.called().is_empty());
    site.host.advance(5_001);
    site.router.still_waiting(core::iter::once(&waiting)).expect("a line");
    assert_eq!(site.called(), [waiting.id()]);
}

#[test]
fn a_place_for_some_turns_is_given_up_when_others_wait() {
    let mut site = site(|admission| admission.turns = 2);
    for id in 0..FIT {
        site.whole(id);
    }
    let new = held(ask(&mut site.router, 99));
    site.whole(0);
    let again = held(ask(&mut site.router, 0));
    assert_eq!(site.called(), [new.id()], "it has had its turns");
    drop(new);
    drop(again);
    site.whole(1);
    let alone = ask(&mut site.router, 1);
    assert!(matches!(alone, Verdict::Go(_)), "nobody waits");
}

#[test]
fn a_replica_of_unknown_size_takes_everything() {
    let mut site = site(|_| {});
    site.reports[0].cache_tokens = 0;
    site.sync();
    let tickets: Vec<_> = (0..40).map(|id| go(ask(&mut site.router, id))).collect();
    drop(tickets);
}

#[test]
fn a_conversation_larger_than_any_cache_goes_where_nothing_else_is() {
    let mut site = site(|_| {});
    let huge = 400_000;
    let ticket = go(decide(&mut site.router, &asked(&conversation(1), huge)));
    let others: Vec<_> = (10..13).map(|id| go(decide(&mut site.router, &asked(&conversation(id), huge)))).collect();
    let _waits = held(decide(&mut site.router, &asked(&conversation(20), huge)));
    drop((ticket, others));
}

#[test]
fn a_turn_that_ends_at_a_replica_its_conversation_has_left_takes_no_new_place() {
    let mut site = site(|_| {});
    let old = go(ask(&mut site.router, 0));
    let number = (1..=4).find(|number| name(*number) == chosen(&old)).expect("one of four");
    site.set_state(number, ReplicaState::Draining);
    site.host.advance(1);
    let new = go(ask(&mut site.router, 0));
    assert_ne!(chosen(&new), chosen(&old));
    let in_flight = |site: &Site| {
        let pool = site.router.pool(POOL.as_bytes()).expect("the pool");
        let places = pool.working_set.open(&site.host).expect("a set").places;
        places.iter().map(|place| place.in_flight).collect::<Vec<_>>()
    };
    site.router.ended(old);
    assert_eq!(in_flight(&site), [1], "the turn at the new replica runs");
    site.router.ended(new);
    assert_eq!(in_flight(&site), [0]);
}

#[test]
fn places_of_a_thread_that_died_are_given_back() {
    let mut site = site(|_| {});
    let mut dying = site.thread();
    for id in 0..FIT {
        core::mem::forget(go(ask(&mut dying, id)));
    }
    core::mem::forget(held(ask(&mut dying, 50)));
    let waiting = held(ask(&mut site.router, 99));
    core::mem::forget(dying);
    for _ in 0..24 {
        site.host.advance(500);
        site.router.heal().expect("lanes");
        site.router.still_waiting(core::iter::once(&waiting)).expect("a line");
    }
    assert_eq!(site.called(), [waiting.id()], "also the dead thread's own request in line is gone");
    let ticket = retry(&mut site.router, 99, &waiting).expect("its turn");
    site.router.ended(ticket);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn below_the_caches_nothing_is_held_and_every_choice_is_as_without_admission() {
    for peers in [0, 1] {
        every_choice_is_as_without_admission(peers);
    }
}

/// With other Envoys that have so many requests in flight at each replica.
fn every_choice_is_as_without_admission(peers: u32) {
    let mut with = site(|_| {});
    let mut without = Site::new(|_| {});
    for site in [&mut with, &mut without] {
        site.reports.iter_mut().for_each(|report| report.peers = Peers { in_flight: peers, own: peers });
        site.sync();
    }
    let mut turns = 0_u128;
    for round in 0..20_u128 {
        for id in 0..4 {
            turns += 1;
            let id = id + if round < 10 { 0 } else { 4 };
            let one = with.whole(id);
            let other = without.whole(id);
            assert_eq!(one, other, "turn {turns}");
            with.host.advance(700);
            without.host.advance(700);
        }
    }
    assert_eq!(with.were_held(), 0);
}

#[test]
fn a_think_time_is_heard_once_however_long_its_request_waits() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    // Twenty short thoughts, so that think times are believed.
    let mut keeps = tickets.remove(0);
    for _ in 0..25 {
        site.router.ended(keeps);
        site.host.advance(300);
        keeps = go(ask(&mut site.router, 0));
    }
    // One that has been away for longer than any grace comes back and is looked at often.
    site.router.ended(tickets.remove(0));
    site.host.advance(30_000);
    let taker = go(ask(&mut site.router, 70));
    let waiting = held(ask(&mut site.router, 1));
    for _ in 0..100 {
        assert!(retry(&mut site.router, 1, &waiting).is_none());
    }
    site.router.ended(taker);
    site.host.advance(2_001);
    site.router.still_waiting(core::iter::once(&waiting)).expect("a line");
    assert_eq!(site.called(), [waiting.id()], "the grace is still that of short thoughts");
}

#[test]
fn one_larger_than_any_cache_is_kept_a_replica_and_others_go_on_elsewhere() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    let huge = asked(&conversation(90), 400_000).bytes;
    let giant = held(decide(&mut site.router, &asked(&conversation(90), huge)));
    site.host.advance(10_001);
    site.router.still_waiting(core::iter::once(&giant)).expect("a line");
    let mut small: Vec<_> = (91..97).map(|id| (id, held(ask(&mut site.router, id)))).collect();
    let mut served = Vec::new();
    let mut giant_at = None;
    for _ in 0..40 {
        // A turn ends, and its conversation with it.
        if !tickets.is_empty() {
            let ticket = tickets.remove(0);
            site.router.ended(ticket);
        }
        site.host.advance(2_600);
        let waiting: Vec<_> = small.iter().map(|(_, held)| held).chain(giant_at.is_none().then_some(&giant)).collect();
        site.router.still_waiting(waiting.into_iter()).expect("a line");
        for called in site.called() {
            if called == giant.id() {
                let verdict = site.router.retry(POOL.as_bytes(), &asked(&conversation(90), huge), &giant).expect("its turn");
                giant_at = Some((served.len(), go(verdict)));
            } else if let Some(at) = small.iter().position(|(_, held)| held.id() == called) {
                let (id, held) = small.remove(at);
                served.push(retry(&mut site.router, id, &held).expect("its turn"));
            }
        }
    }
    let (before, ticket) = giant_at.expect("it is not starved");
    assert!(before > 0, "others went on at the replicas that were not kept for it");
    assert!(small.is_empty(), "nor does it block others for ever");
    let giants = chosen(&ticket);
    assert!(served.iter().all(|ticket| chosen(ticket) != giants), "it shares its replica with nobody");
}

#[test]
fn ticks_find_what_time_changes_and_what_others_change() {
    let mut site = site(|_| {});
    let mut tickets = site.full();
    let waiting = held(ask(&mut site.router, 99));
    assert!(site.called().is_empty() && site.called().is_empty());
    let mut other = site.thread();
    other.ended(tickets.remove(0));
    for _ in 0..5 {
        site.host.advance(1_000);
        other.still_waiting(core::iter::once(&waiting)).expect("a line");
        assert!(site.called().is_empty() && other.called(POOL.as_bytes()).expect("a line").is_empty());
    }
    site.host.advance(1);
    assert_eq!(site.called(), [waiting.id()], "the grace has run out");
    assert_eq!(other.called(POOL.as_bytes()).expect("a line"), [waiting.id()]);
    // A larger cache makes room too.
    drop(retry(&mut site.router, 99, &waiting));
    let again = held(ask(&mut site.router, 98));
    assert!(site.called().is_empty());
    site.reports.iter_mut().for_each(|report| report.cache_tokens = 100_000);
    site.sync();
    assert_eq!(site.called(), [again.id()]);
}
