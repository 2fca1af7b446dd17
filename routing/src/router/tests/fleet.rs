//! Several Envoys: what each learns of the others through the exchange.

use super::*;
use crate::binding::{AHEAD_MS, Binding, Bindings};
use crate::sync::MAX_BINDINGS;

/// What one Envoy has told arrives at another, with the collector's clock.
fn relay(from: &mut Site, to: &mut Site) -> usize {
    let told = from.sync().bindings;
    let count = told.0.len();
    to.tell(told.0);
    count
}

impl Site {
    /// The collector tells of conversations.
    fn tell(&mut self, told: Vec<Binding>) -> SyncAnswer {
        self.sequence += 1;
        let bindings = Bindings(told);
        self.exchange(&SyncRequest { sequence: self.sequence, bindings, now_ms: self.host.now_ms(), ..request() })
    }

    /// What is in the journal behind `cursor`.
    fn journal(&mut self, cursor: &[u64]) -> SyncAnswer {
        self.sequence += 1;
        let now_ms = self.host.now_ms();
        self.exchange(&SyncRequest { sequence: self.sequence, journal: cursor.to_vec(), now_ms, ..request() })
    }

    /// The exchange that another collector opens.
    fn other_collector(&mut self, generation: u64) -> SyncAnswer {
        let pools = vec![PoolReport {
            cluster: POOL.into(),
            bytes_per_token: None,
            shared_tokens: None,
            replicas: vec![ReplicaReport { running: 77, ..report(name(1)) }],
        }];
        self.exchange(&SyncRequest { generation, sequence: 1, pools, ..request() })
    }
}

fn told(id: u128, home: ReplicaName, bound_at_ms: u64) -> Binding {
    let last_turn_s = u32::try_from(bound_at_ms / 1000).expect("seconds");
    Binding { conversation: conversation(id).digest, home: home.id(), bound_at_ms, last_turn_s, bytes: 1000 }
}

// === Homes ===

#[test]
fn a_conversation_that_another_envoy_placed_is_at_home_here() {
    let (mut here, mut there) = (Site::new(|_| {}), Site::new(|_| {}));
    for id in 0..20 {
        let (_, home) = there.turn(id);
        relay(&mut there, &mut here);
        assert_eq!(here.turn(id), (Outcome::Sticky, home));
    }
}

#[test]
fn a_home_that_moved_is_told_and_a_turn_at_home_is_not() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    let first = site.journal(&[]);
    let homes = |answer: &SyncAnswer| answer.bindings.0.iter().map(|binding| binding.home).collect::<Vec<_>>();
    assert_eq!(homes(&first), [home.id()]);
    site.turn(0);
    let second = site.journal(&first.journal);
    assert_eq!(homes(&second), []);
    let number = (1..=4).find(|number| name(*number) == home).expect("one of four");
    site.set_state(number, ReplicaState::Down);
    let (outcome, moved) = site.turn(0);
    assert_eq!(outcome, Outcome::Rehomed);
    let third = site.journal(&second.journal);
    assert_eq!(homes(&third), [moved.id()]);
    assert!(third.bindings.0[0].bound_at_ms > first.bindings.0[0].bound_at_ms, "the later home wins everywhere");
}

#[test]
fn of_two_envoys_that_place_one_conversation_both_take_the_later_home() {
    let (mut here, mut there) = (Site::new(|_| {}), Site::new(|_| {}));
    there.reports[0].running = 5;
    there.sync();
    let (_, first) = here.turn(7);
    there.host.advance(3);
    let (_, second) = there.turn(7);
    assert_ne!(first, second);
    relay(&mut here, &mut there);
    relay(&mut there, &mut here);
    assert_eq!(here.turn(7), (Outcome::Sticky, second));
    assert_eq!(there.turn(7), (Outcome::Sticky, second));
}

#[test]
fn a_conversation_that_goes_on_at_one_envoy_is_not_forgotten_by_another() {
    let (mut here, mut there) = (Site::new(|_| {}), Site::new(|_| {}));
    let (_, home) = there.turn(3);
    let mut renewals = 0;
    // For a quarter of an hour; the idle time is ten minutes.
    for _ in 0..180 {
        here.host.advance(5_000);
        there.host.advance(5_000);
        there.turn(3);
        let first = there.sync();
        renewals = first.bindings.0.len();
        here.tell(first.bindings.0);
    }
    assert_eq!(here.turn(3), (Outcome::Sticky, home));
    assert!((10..=17).contains(&renewals), "once a minute, told {renewals} times");
}

#[test]
fn a_clock_that_is_wrong_neither_wins_for_ever_nor_forgets() {
    let (mut here, mut ahead) = (Site::new(|_| {}), Site::new(|_| {}));
    let collector_ms = here.host.now_ms();
    ahead.host.advance(3_600_000);
    // The collector tells both its own time.
    ahead.sequence += 1;
    let pools =
        vec![PoolReport { cluster: POOL.into(), bytes_per_token: None, shared_tokens: None, replicas: ahead.reports.clone() }];
    let place = SyncRequest { sequence: ahead.sequence, pools, now_ms: collector_ms, ..request() };
    ahead.exchange(&place);
    let (_, home) = ahead.turn(1);
    ahead.sequence += 1;
    let place = SyncRequest { sequence: ahead.sequence, now_ms: collector_ms, ..request() };
    let answer = ahead.exchange(&place);
    assert_eq!(answer.bindings.0[0].bound_at_ms, collector_ms);
    here.tell(answer.bindings.0);
    assert_eq!(here.turn(1), (Outcome::Sticky, home));
    // Whoever tells of the future is believed for seconds.
    here.tell(vec![told(2, name(1), collector_ms + 86_400_000)]);
    here.host.advance(AHEAD_MS + 1_000);
    here.tell(vec![told(2, name(2), here.host.now_ms())]);
    assert_eq!(here.turn(2), (Outcome::Sticky, name(2)));
}

#[test]
fn everything_can_be_recalled_in_parts() {
    let mut site = Site::new(|_| {});
    for id in 0..500 {
        site.turn(id);
    }
    let (mut from, mut recalled) = (Some(0), Vec::new());
    while let Some(bucket) = from {
        // Nothing of the journal: it has been read.
        let journal = site.journal(&[]).journal;
        site.sequence += 1;
        let answer = site.exchange(&SyncRequest { sequence: site.sequence, recall: Some(bucket), journal, ..request() });
        recalled.extend(answer.bindings.0);
        from = answer.recall;
    }
    recalled.sort_unstable_by_key(|binding| binding.conversation);
    recalled.dedup_by_key(|binding| binding.conversation);
    assert_eq!(recalled.len(), 500);
}

#[test]
fn a_request_with_more_bindings_than_allowed_is_refused() {
    let mut site = Site::new(|_| {});
    let bindings = Bindings((0..=MAX_BINDINGS as u128).map(|id| told(id, name(1), 1_000_000_000)).collect());
    let request = SyncRequest { sequence: 9, bindings, ..request() };
    let refused = site.control.exchange(&serde_json::to_vec(&request).expect("JSON"));
    assert!(refused.expect_err("too many").to_string().contains("more than 4096 bindings"));
}

#[test]
fn an_answer_tells_envoys_with_other_keys_apart() {
    let check = |key: u8| {
        let host = MemoryHost::new(1);
        let settings = Settings { hash_key: [key; 16], ..Settings::default() };
        drop(Router::new(host.clone(), settings, vec![Policy::new(POOL)]).expect("a router"));
        let request = SyncRequest { sequence: 1, ..request() };
        Control::new(host).exchange(&serde_json::to_vec(&request).expect("JSON")).expect("an answer").key_check.expect("a check")
    };
    assert_eq!(check(1), check(1));
    assert_ne!(check(1), check(2));
}

// === Ready ===

#[test]
fn an_envoy_is_ready_when_everything_has_been_handed_over() {
    let mut site = Site::new(|_| {});
    assert!(site.control.unready().expect("an answer").expect("a reason").contains("not handed over"));
    let since_ms = site.sync().counting_since_ms.expect("a time");
    let handed_over = |since_ms, sequence| SyncRequest { sequence, handed_over: Some(since_ms), ..request() };
    site.exchange(&handed_over(since_ms - 1, 10));
    assert!(site.control.unready().expect("an answer").is_some(), "that was to the Envoy before this one");
    site.exchange(&handed_over(since_ms, 11));
    assert_eq!(site.control.unready(), Ok(None));
    site.host.advance(100_000);
    assert_eq!(site.control.unready(), Ok(None), "it stays so without a collector");
}

#[test]
fn without_a_collector_nobody_is_locked_out() {
    let host = MemoryHost::new(1_000);
    let control = Control::new(host.clone());
    assert!(control.unready().expect("an answer").expect("a reason").contains("role: route"));
    drop(Router::new(host.clone(), Settings::default(), vec![Policy::new(POOL)]).expect("a router"));
    assert_eq!(control.unready(), Ok(Some("no collector has come yet")));
    host.advance(10_001);
    assert_eq!(control.unready(), Ok(None));
}

// === Two collectors ===

#[test]
fn an_earlier_collector_stands_by_and_takes_over_when_the_later_is_silent() {
    let mut site = Site::new(|_| {});
    site.turn(1);
    site.settle();
    let loads = site.load(1);
    assert!(!site.other_collector(2).standby, "the later one is heard at once");
    assert_eq!(site.load(1), 77);
    site.host.advance(500);
    let answer = site.exchange(&SyncRequest { sequence: 100, ..request() });
    assert!(answer.standby);
    assert_eq!((answer.generation, answer.sequence), (2, 1));
    assert_eq!(answer.bindings.0.len(), 1, "it reads the journal for itself");
    assert_eq!(site.load(1), 77, "and changes nothing");
    site.host.advance(501);
    site.sequence = 100;
    assert!(!site.sync().standby);
    assert_eq!(site.load(1), loads);
    assert!(!site.other_collector(2).standby, "the later one is back");
}

#[test]
fn a_collector_that_pauses_for_longer_is_not_silent() {
    let mut site = Site::new(|_| {});
    site.exchange(&SyncRequest { generation: 2, sequence: 1, pause_ms: 10_000, ..request() });
    site.host.advance(15_000);
    assert!(site.exchange(&SyncRequest { sequence: 100, ..request() }).standby);
    site.host.advance(6_000);
    assert!(!site.exchange(&SyncRequest { sequence: 101, ..request() }).standby);
}

// === Load ===

#[test]
fn what_other_envoys_have_in_flight_counts_once() {
    let mut site = Site::new(|_| {});
    let ticket = site.ticket(1);
    let number = (1..=4).find(|number| name(*number) == chosen(&ticket)).expect("one of four");
    // The engine runs this Envoy's request, two of another's, and one that no Envoy sent.
    site.reports[number - 1].running = 4;
    site.reports[number - 1].peers = Peers { in_flight: 2, own: 2 };
    site.sync();
    assert_eq!(site.load(number), 4);
    // Another's that has just been sent is not in the engine's figures yet, and counts.
    site.reports[number - 1].peers = Peers { in_flight: 5, own: 5 };
    site.sync();
    assert_eq!(site.load(number), 6);
    // Another's that has just ended still is, and does not.
    site.reports[number - 1].peers = Peers { in_flight: 0, own: 3 };
    site.sync();
    assert_eq!(site.load(number), 1);
    // This one's own ends: what is left is others'.
    site.reports[number - 1].peers = Peers { in_flight: 2, own: 2 };
    site.router.ended(ticket);
    site.settle();
    assert_eq!(site.load(number), 4);
}

#[test]
fn an_answer_says_what_an_envoy_takes_for_its_own() {
    let mut site = Site::new(|_| {});
    let ticket = site.ticket(1);
    let own = |answer: &SyncAnswer| answer.pools[0].replicas.iter().map(|replica| replica.own).sum::<u64>();
    assert_eq!(own(&site.sync()), 1);
    site.router.ended(ticket);
    assert_eq!(own(&site.sync()), 1, "the engine's figures may be from before");
    site.settle();
    assert_eq!(own(&site.sync()), 0);
}

/// New conversations at random Envoys, one every `gap` times 25 ms, 80 of them at any time on four replicas: the mean difference between the fullest and the
/// emptiest replica. Every Envoy has an exchange every 250 ms, each at another time, and engines report what they run at that moment.
/// With `by_chance` each goes to a replica that is drawn at random.
fn spread(envoys: usize, gap: usize, by_chance: bool) -> f64 {
    let mut sites: Vec<_> = (0..envoys).map(|_| Site::new(|_| {})).collect();
    let mut last: Vec<Option<SyncAnswer>> = vec![None; envoys];
    let mut open: Vec<(usize, usize, Ticket<MemoryHost>)> = Vec::new();
    let (mut random, mut sum) = (7_u64, 0);
    for step in 0..2_000 * gap {
        for site in &sites {
            site.host.advance(25);
        }
        let (over, rest) = open.into_iter().partition::<Vec<_>, _>(|(began, ..)| step - began >= 80 * gap);
        open = rest;
        over.into_iter().for_each(|(_, envoy, ticket)| sites[envoy].router.ended(ticket));
        if step % gap == 0 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let envoy = (random >> 33) as usize % envoys;
            let ticket = if by_chance {
                let pin = name((random >> 40) as usize % 4 + 1).to_string();
                go(decide(&mut sites[envoy].router, &Request { pin: Some(&pin), generates: true, ..Request::default() }))
            } else {
                sites[envoy].ticket(step as u128)
            };
            open.push((step, envoy, ticket));
        }

        let loads: Vec<u32> =
            (1..=4).map(|n| open.iter().filter(|(.., ticket)| chosen(ticket) == name(n)).count() as u32).collect();
        for envoy in (0..envoys).filter(|envoy| step % 10 == envoy * 10 / envoys) {
            for (place, report) in sites[envoy].reports.iter_mut().enumerate() {
                let others = last.iter().enumerate().filter(|(other, _)| *other != envoy).filter_map(|(_, answer)| answer.as_ref());
                let seen: Vec<_> = others.map(|answer| &answer.pools[0].replicas[place]).collect();
                let total = |of: fn(&crate::sync::ReplicaAnswer) -> u64| {
                    u32::try_from(seen.iter().map(|r| of(r)).sum::<u64>()).expect("few")
                };
                report.running = loads[place];
                report.peers = Peers { in_flight: total(|replica| replica.in_flight), own: total(|replica| replica.own) };
            }
            last[envoy] = Some(sites[envoy].sync());
        }
        if step >= 200 * gap {
            sum += loads.iter().max().expect("four") - loads.iter().min().expect("four");
        }
    }
    f64::from(sum) / (1_800 * gap) as f64
}

#[test]
fn eight_envoys_spread_new_conversations_though_they_hear_late_of_each_other() {
    // 4 a second, and 40: at 40, ten are placed before an Envoy hears of the first.
    for (gap, most) in [(10, 0.45), (1, 0.85)] {
        let (one, eight, chance) = (spread(1, gap, false), spread(8, gap, false), spread(8, gap, true));
        println!(
            "{} a second, 20 requests a replica: the fullest has {one:.2} more than the emptiest with one Envoy, {eight:.2} with eight, {chance:.2} by chance",
            40 / gap
        );
        assert!(one <= 1.0 && eight <= most * chance, "{one} {eight} {chance}");
    }
}
