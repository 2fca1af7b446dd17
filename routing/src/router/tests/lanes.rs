//! Threads that die or are held up.

use super::*;

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
    let metrics = site.host.metrics().into_iter();
    let lanes: Vec<_> = metrics.filter(|(name, value)| name.starts_with("homing_lane_in_flight") && *value != 0).collect();
    assert_eq!(lanes, [], "the lane that it lost must not keep what it did there since");
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
fn a_listener_that_routes_other_pools_for_a_while_leaves_every_count_right() {
    let mut site = Site::new(|_| {});
    let before: Vec<_> = (0..3).map(|id| site.ticket(id)).collect();
    let mut during = site.thread_of_two_pools();
    let kept: Vec<_> = (3..5).map(|id| ticket(&mut during, id)).collect();
    drop(before);
    // The change is taken back, and the first listener's thread is gone without a word.
    let mut after = site.thread();
    let new = ticket(&mut after, 5);
    for _ in 0..20 {
        site.host.advance(500);
        during.heal().expect("a tick");
        after.heal().expect("a tick");
    }
    assert_eq!(site.in_flight(), 3);
    drop((kept, new));
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn what_a_dead_thread_held_is_given_back_by_others_if_its_listener_is_gone() {
    let mut site = Site::new(|_| {});
    let mut dying = site.thread_of_two_pools();
    let lost = vec![ticket(&mut dying, 0)];
    trap(dying, lost);
    let kept = site.ticket(1);
    for _ in 0..80 {
        site.host.advance(500);
        site.router.heal().expect("a tick");
    }
    assert_eq!(site.in_flight(), 1);
    drop(kept);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_thread_beyond_the_lanes_routes_all_the_same_and_gets_one_when_there_is_one() {
    let mut site = Site::new(|_| {});
    let others: Vec<_> = (0..crate::lanes::LANES)
        .map(|_| crate::lanes::Lane::take(&site.host, crate::lanes::PoolList(1)).expect("lanes").expect("a free lane"))
        .collect();
    let without = site.ticket(0);
    assert_eq!((site.router.lane.get(), site.in_flight()), (None, 1));
    // The others' listener is gone; this thread settles one of its lanes at each tick.
    site.host.advance(31_000);
    site.router.heal().expect("a tick");
    let with = site.ticket(1);
    assert!(site.router.lane.get().is_some_and(|lane| others.iter().any(|other| other.number == lane.number)));
    drop((without, with));
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn a_lane_that_is_being_settled_is_waited_for() {
    let mut site = Site::new(|_| {});
    let held: Vec<_> = (0..3).map(|id| site.ticket(id)).collect();
    site.host.advance(6_000);
    let dead = crate::lanes::take_dead(&site.host, site.router.pool_list).expect("lanes").expect("a dead lane");
    // Its thread ticks before the other has done anything.
    site.router.heal().expect("a tick");
    let mut other = site.thread();
    other.refreshed_pools().map(drop).expect("pools");
    other.settle(dead).expect("settled");
    crate::lanes::free(&site.host, dead).expect("freed");
    assert_eq!(site.in_flight(), 0);
    site.router.heal().expect("a tick");
    assert_eq!(site.in_flight(), 3);
    drop(held);
    assert_eq!(site.in_flight(), 0);
}

#[test]
fn replicas_that_share_a_name_share_a_lane() {
    let mut site = Site::new(|_| {});
    let mut slow = site.thread();
    // All names are given: whoever comes now shares one of a few.
    let (mut ranks, mut others) = (0..u16::MAX, Vec::new());
    let pool = slow.pools.get_mut(POOL.as_bytes()).expect("the pool");
    while others.len() < 2 {
        let name = ReplicaName { rank: ranks.next(), ..name(9) };
        let replica = pool.registry.replica(&site.host, POOL, &name).expect("statistics");
        if replica.label == "spare-7" {
            others.push(replica);
        }
    }
    let pool = slow.pool(POOL.as_bytes()).expect("the pool");
    let reserve = |replica| slow.reserve(pool, replica).expect("a count");
    let held = [reserve(&others[0]), reserve(&others[0]), reserve(&others[1])];
    let spare = Metric::InFlight { pool: POOL, replica: "spare-7" };
    let lane = slow.lane.get().expect("a lane").number;
    assert_eq!(site.host.metric(&Metric::LaneInFlight { lane, pool: POOL, replica: "spare-7" }), 3);
    // It is taken for dead, by a thread that knows the name, and comes back.
    let pool = site.router.pools.get_mut(POOL.as_bytes()).expect("the pool");
    for rank in 0..u16::MAX - ranks.len() as u16 {
        pool.registry.replica(&site.host, POOL, &ReplicaName { rank: Some(rank), ..name(9) }).expect("statistics");
    }
    for _ in 0..12 {
        site.host.advance(500);
        site.router.heal().expect("a tick");
    }
    assert_eq!(site.host.metric(&spare), 0);
    slow.heal().expect("a tick");
    assert_eq!(site.host.metric(&spare), 3);
    drop(held);
    assert_eq!(site.host.metric(&spare), 0);
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
