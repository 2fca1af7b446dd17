//! Requests that are no turn of a conversation, name a replica, or need a rank.

use super::*;

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
    site.router.served(&mut ticket, "10.0.0.2:8000", Answer::Served);
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
        site.router.served(&mut ticket, &chosen.address.to_string(), Answer::Served);
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
    site.router.served(&mut ticket, &other, Answer::Served);
    site.router.ended(ticket);
    let ticket = go(decide(&mut site.router, &request));
    assert_eq!((ticket.planned(), chosen(&ticket).address.to_string()), (Outcome::Sticky, other));
}

#[test]
fn such_calls_are_load_of_every_rank_of_their_endpoint_and_are_answered_for() {
    let mut site = ranked_site(|_| {});
    let call = |site: &mut Site, id: u128| {
        let named = conversation(id);
        let request = Request { conversation: Some(&named), generates: true, ignores_rank: true, ..Request::default() };
        go(decide(&mut site.router, &request))
    };
    // Two ranks at each of two endpoints: every call goes where fewer are.
    let calls: Vec<_> = (0..8).map(|id| call(&mut site, id)).collect();
    let at_first = calls.iter().filter(|call| chosen(call).address == chosen(&calls[0]).address).count();
    assert_eq!(at_first, 4);
    let loads = |site: &mut Site| {
        let now_ms = site.host.now_ms();
        let pool = site.router.refreshed_pools().expect("pools").last().expect("the pool");
        let load = |member| pool.load(&site.host, member, now_ms, 5_000).expect("a load");
        pool.members().iter().map(load).collect::<Vec<_>>()
    };
    assert_eq!(loads(&mut site), [2; 4], "two a rank");
    // The engines run them, and they count once.
    site.reports.iter_mut().for_each(|report| report.running = 2);
    let answer = site.sync();
    let (endpoints, ranks): (Vec<_>, Vec<_>) = answer.pools[0].replicas.iter().partition(|answer| answer.replica.rank.is_none());
    assert_eq!(endpoints.iter().map(|answer| answer.in_flight).collect::<Vec<_>>(), [4, 4]);
    assert!(
        ranks.iter().all(|answer| (answer.in_flight, answer.own) == (0, 0)),
        "the other Envoys find them in the engines' figures"
    );
    assert_eq!(loads(&mut site), [2; 4]);
    // One that fails makes both ranks of its endpoint look loaded, and no other's.
    let mut failed = call(&mut site, 9);
    let address = chosen(&failed).address;
    site.router.served(&mut failed, &address.to_string(), Answer::Failed);
    site.router.ended(failed);
    for id in 10..13 {
        assert_ne!(chosen(&site.ticket(id)).address, address);
    }
    calls.into_iter().for_each(|mut call| {
        let address = chosen(&call).address.to_string();
        site.router.served(&mut call, &address, Answer::Served);
        site.router.ended(call);
    });
    let answer = site.sync();
    let placed: u64 = answer.pools[0].replicas.iter().map(|answer| answer.requests.placed).sum();
    assert_eq!(placed, 9);
}
