//! Replicas that fail.

use super::*;

#[test]
fn a_replica_that_fails_fast_does_not_attract_work() {
    let mut site = Site::new(|_| {});
    let broken = name(1);
    let mut sent = 0;
    for id in 0..100 {
        let mut ticket = site.ticket(id);
        let chosen = chosen(&ticket);
        sent += u32::from(chosen == broken);
        site.router.served(
            &mut ticket,
            &chosen.address.to_string(),
            if chosen == broken { Answer::Failed } else { Answer::Served },
        );
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
    site.router.served(&mut ticket, &home.address.to_string(), Answer::Failed);
    site.router.ended(ticket);
    assert!(site.penalty(home) > 0);
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
    assert_eq!(site.penalty(home), 0);
}

#[test]
fn a_replica_a_retry_left_counts_as_failed() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    retried(&mut site, 0);
    assert!(site.penalty(home) > 0);
    site.host.advance(11_000);
    assert_eq!(site.penalty(home), 0);
}

#[test]
fn what_a_client_pins_forgives_nothing() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let home = chosen(&ticket);
    site.router.served(&mut ticket, &home.address.to_string(), Answer::Failed);
    site.router.ended(ticket);
    let pin = home.to_string();
    let mut pinned = go(decide(&mut site.router, &Request { pin: Some(&pin), generates: true, ..Request::default() }));
    site.router.served(&mut pinned, &home.address.to_string(), Answer::Served);
    site.router.ended(pinned);
    assert!(site.penalty(home) > 0);
}

#[test]
fn a_client_that_pins_cannot_have_a_500_held_against_its_replica() {
    for status in [b"500", b"501", b"505"] {
        assert_eq!(Answer::of(status, Outcome::Pinned), Answer::Refused);
        assert_eq!([Outcome::Placed, Outcome::Sticky].map(|planned| Answer::of(status, planned)), [Answer::Failed; 2]);
    }
    for status in [b"502", b"503", b"504"] {
        assert_eq!([Outcome::Pinned, Outcome::Placed].map(|planned| Answer::of(status, planned)), [Answer::Failed; 2]);
    }
    for status in [b"400", b"404", b"429"] {
        assert_eq!(Answer::of(status, Outcome::Placed), Answer::Refused);
    }
    assert_eq!(Answer::of(b"200", Outcome::Placed), Answer::Served);
    assert_eq!(Answer::of(b"", Outcome::Placed), Answer::Served, "a response without a status says nothing");
}

#[test]
fn what_was_refused_is_no_prompt_that_was_read() {
    let mut site = Site::new(|_| {});
    site.turn(0);
    let read = |site: &mut Site| (site.sync().pools[0].prompt_bytes, site.sync().pools[0].first_turns);
    assert_eq!(read(&mut site), (1_000, 1));
    for (id, answer) in [(0, Answer::Refused), (1, Answer::Failed), (2, Answer::Refused)] {
        let mut ticket = site.ticket(id);
        let address = chosen(&ticket).address.to_string();
        site.router.served(&mut ticket, &address, answer);
        site.router.ended(ticket);
    }
    assert_eq!(read(&mut site), (1_000, 1));
}

#[test]
fn the_collector_is_told_how_many_requests_went_elsewhere_than_chosen() {
    let mut site = Site::new(|_| {});
    assert_eq!(site.sync().mismatches, 0);
    site.router.count_error(ErrorKind::Mismatch, 2);
    assert_eq!(site.sync().mismatches, 2);
}

#[test]
fn a_failure_is_forgotten_although_the_clock_is_set_back() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let replica = chosen(&ticket);
    site.router.served(&mut ticket, &replica.address.to_string(), Answer::Failed);
    assert!(site.penalty(replica) > 0);
    site.host.set_back(3_600_000);
    assert_eq!(site.penalty(replica), 0);
}
