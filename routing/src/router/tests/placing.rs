//! Where new conversations go, and what counts as load.

use std::collections::BTreeMap;

use super::*;

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
