//! What is learned and counted from where a request was served.

use super::*;

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
fn a_snapshot_that_never_came_is_as_old_as_this_envoy_unless_the_replicas_are_configured() {
    let age_s = |site: &mut Site| {
        site.host.advance(60_000);
        site.router.sweep(false).expect("a sweep");
        site.host.metric(&Metric::SnapshotAge { pool: POOL })
    };
    let mut site = Site::before_the_first_snapshot(|_| {});
    assert_eq!(age_s(&mut site), 60);
    site.sync();
    site.host.advance(60_000);
    assert_eq!(age_s(&mut site), 120);
    assert_eq!(age_s(&mut Site::before_the_first_snapshot(|policy| policy.replicas = vec![name(1)])), 0);
}

#[test]
fn counting_began_with_the_first_thread() {
    let mut site = Site::new(|_| {});
    let since = site.host.now_ms();
    site.host.advance(60_000);
    drop(site.thread());
    assert_eq!(site.sync().counting_since_ms, Some(since));
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
    site.router.served(&mut ticket, &other, Answer::Served);
    site.router.ended(ticket);
    site.host.advance(11_000);
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
}

#[test]
fn a_retry_of_a_spill_that_was_to_be_the_new_home_moves_the_home() {
    let mut site = Site::new(|policy| policy.spill_threshold = Limit::Fixed(2));
    let (_, home) = site.turn(0);
    for report in &mut site.reports {
        report.running = if report.replica == home { 20 } else { 0 };
    }
    site.settle();
    let (outcome, second) = site.turn(0);
    assert_eq!(outcome, Outcome::Spilled);
    // The second turn in a row there makes it the home, but a retry serves it.
    let (outcome, moved) = retried(&mut site, 0);
    assert_eq!(outcome, Outcome::Spilled);
    assert!(moved != home && moved != second);
    assert_eq!(site.turn(0), (Outcome::Sticky, moved));
}

#[test]
fn a_turn_served_outside_the_snapshot_is_in_flight_nowhere() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    site.router.served(&mut ticket, "192.168.0.1:1", Answer::Served);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn in_flight_moves_with_the_turn() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let before = site.gauges();
    let address = ticket.addresses().nth(1).expect("an alternate").to_owned();
    site.router.served(&mut ticket, &address, Answer::Served);
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
    site.router.served(&mut stranger, "192.168.0.1:1", Answer::Served);
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
        site.router.served(ticket, &name(2).address.to_string(), Answer::Served);
    }
    site.router.ended(ended);
    let answer = site.sync();
    let seen: Vec<_> = answer.pools[0].replicas.iter().map(|replica| (replica.in_flight, replica.requests.passed)).collect();
    assert_eq!(seen, [(0, 0), (1, 1), (0, 0), (0, 0)]);
    site.router.ended(under_way);
    let answer = site.sync();
    assert_eq!((answer.pools[0].replicas[1].in_flight, answer.pools[0].replicas[1].requests.passed), (0, 2));
}
