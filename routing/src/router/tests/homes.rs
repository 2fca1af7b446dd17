//! When a turn stays at home, spills, or leaves its home for good.

use super::*;

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
