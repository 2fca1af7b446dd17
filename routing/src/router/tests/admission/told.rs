//! What others are told: who waits, since when and why, and what is active where.

use super::*;
use crate::admission::{Occupancy, occupancy};
use crate::sync::{AdmissionAnswer, HeldCounts};

#[test]
fn anyone_on_the_host_can_see_who_waits_why_and_what_is_active_where() {
    let mut site = site(|_| {});
    let seen = |site: &Site| occupancy(&site.host, POOL).expect("a working set");
    assert_eq!(seen(&site).first_since_ms(), None);
    let began_ms = site.host.now_ms();
    (0..FIT).for_each(|id| {
        site.whole(id);
    });
    let first = held(ask(&mut site.router, 98));
    site.host.advance(50);
    let second = held(decide(&mut site.router, &asked(&conversation(99), 400_000)));
    let now = seen(&site);
    let reasons: Vec<_> = now.held.iter().map(|held| (held.tokens, held.reason)).collect();
    assert_eq!(reasons, [(10_512, Reason::NoRoom), (100_512, Reason::NoRoom)]);
    assert_eq!(now.first_since_ms(), Some(began_ms));
    assert!(now.replicas.iter().all(|at| (at.active_places, at.active_tokens) == (3, 31_536)), "{now:?}");
    drop((first, second));
    // A context larger than its cache counts as the whole of it.
    site.host.advance(10_000);
    let ticket = go(decide(&mut site.router, &asked(&conversation(99), 400_000)));
    let replica = chosen(&ticket).id();
    let now = seen(&site);
    let at = now.replicas.iter().find(|at| at.replica == replica).expect("the replica");
    assert_eq!((at.active_tokens, at.active_places, now.held.len()), (36_000, 1, 0));
    assert_eq!(occupancy(&site.host, "other").expect("none"), Occupancy::default());
}

#[test]
fn each_is_told_why_it_waits() {
    let reasons = |site: &Site| -> Vec<_> {
        occupancy(&site.host, POOL).expect("a working set").held.iter().map(|held| held.reason).collect()
    };
    let mut one = site(|_| {});
    let _tickets = one.full();
    let _first = held(ask(&mut one.router, 50));
    assert_eq!(reasons(&one), [Reason::NoRoom]);

    // Room for small ones, but nobody passes one that has waited for long.
    let mut behind = site(|_| {});
    behind.reports.truncate(1);
    behind.sync();
    let _two: Vec<_> = (0..2).map(|id| go(ask(&mut behind.router, id))).collect();
    let large = held(decide(&mut behind.router, &asked(&conversation(9), 100_000)));
    behind.host.advance(10_001);
    behind.router.still_waiting(core::iter::once(&large)).expect("a line");
    let _small = held(ask(&mut behind.router, 10));
    assert_eq!(reasons(&behind), [Reason::NoRoom, Reason::BehindOthers]);

    let mut due = site(|admission| admission.turns = 1);
    (0..FIT).for_each(|id| {
        due.whole(id);
    });
    let _waits = held(ask(&mut due.router, 50));
    let _again = held(ask(&mut due.router, 0));
    assert_eq!(reasons(&due), [Reason::NoRoom, Reason::TurnsUsed]);
    // Each is counted once, when it comes.
    let counted = Reason::ALL.map(|reason| due.event(AdmissionEvent::Held(reason)));
    assert_eq!(counted, [1, 0, 1, 0]);
    assert_eq!(due.were_held(), 2);
}

#[test]
fn the_collector_is_told_who_waits_for_how_long_and_why_and_what_is_active_where() {
    let mut site = site(|admission| admission.turns = 1);
    site.shared_tokens = Some(1_000);
    let before = site.sync().pools.remove(0);
    assert_eq!(before.admission, Some(AdmissionAnswer { shared_tokens: 1_000, ..AdmissionAnswer::default() }));
    assert_eq!((before.replicas[0].active_conversations, before.replicas[0].active_context_tokens), (Some(0), Some(0)));

    (0..FIT).for_each(|id| {
        site.whole(id);
    });
    let _new = held(ask(&mut site.router, 98));
    site.host.advance(700);
    let _due = held(ask(&mut site.router, 0));
    site.host.advance(300);
    let now = site.sync().pools.remove(0);
    let by_reason = HeldCounts { no_room: 1, turns_used: 1, ..HeldCounts::default() };
    assert_eq!(now.admission, Some(AdmissionAnswer { held: 2, oldest_held_ms: Some(1_000), by_reason, shared_tokens: 1_000 }));
    // The one that has had its turns gave its place up.
    let mut active: Vec<_> = now.replicas.iter().map(|at| (at.active_conversations, at.active_context_tokens)).collect();
    active.sort_unstable();
    let three = (Some(3), Some(3 * 9_512 + 1_000));
    assert_eq!(active, [(Some(2), Some(2 * 9_512 + 1_000)), three, three, three]);
}

#[test]
fn of_a_pool_that_admits_everything_the_collector_is_told_nothing_of_admission() {
    // As it is where admission was turned off while somebody waited.
    let mut site = site(|_| {});
    let _tickets = site.full();
    let _waits = held(ask(&mut site.router, 99));
    let policy = Policy::new(POOL);
    let _now = Router::new(site.host.clone(), site.router.settings.clone(), vec![policy]).expect("a router");
    let answer = site.sync().pools.remove(0);
    assert_eq!(answer.admission, None);
    assert!(answer.replicas.iter().all(|at| (at.active_conversations, at.active_context_tokens) == (None, None)));
    let json = serde_json::to_string(&answer).expect("JSON");
    assert!(!json.contains("admission") && !json.contains("active"), "{json}");
}
