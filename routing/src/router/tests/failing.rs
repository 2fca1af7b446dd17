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
        site.router.served(&mut ticket, &chosen.address.to_string(), chosen == broken);
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
    let number = (1..=4).find(|number| name(*number) == home).expect("one of four");
    site.router.served(&mut ticket, &home.address.to_string(), true);
    site.router.ended(ticket);
    let penalty =
        |site: &Site| site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].penalty(site.host.now_ms());
    assert!(penalty(&site) > 0);
    assert_eq!(site.turn(0), (Outcome::Sticky, home));
    assert_eq!(penalty(&site), 0);
}

#[test]
fn a_replica_a_retry_left_counts_as_failed() {
    let mut site = Site::new(|_| {});
    let (_, home) = site.turn(0);
    retried(&mut site, 0);
    let number = (1..=4).find(|number| name(*number) == home).expect("one of four");
    assert!(site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].penalty(site.host.now_ms()) > 0);
    site.host.advance(11_000);
    assert_eq!(site.router.pool(POOL.as_bytes()).expect("the pool").members()[number - 1].penalty(site.host.now_ms()), 0);
}

#[test]
fn what_a_client_pins_forgives_nothing() {
    let mut site = Site::new(|_| {});
    let mut ticket = site.ticket(0);
    let home = chosen(&ticket);
    site.router.served(&mut ticket, &home.address.to_string(), true);
    site.router.ended(ticket);
    let pin = home.to_string();
    let mut pinned = go(decide(&mut site.router, &Request { pin: Some(&pin), generates: true, ..Request::default() }));
    site.router.served(&mut pinned, &home.address.to_string(), false);
    site.router.ended(pinned);
    let pool = site.router.pool(POOL.as_bytes()).expect("the pool");
    assert!(pool.member(home.id()).expect("the home").penalty(site.host.now_ms()) > 0);
}

#[test]
fn a_client_that_pins_cannot_have_a_500_held_against_its_replica() {
    for status in [b"500", b"501", b"505"] {
        assert!(!is_failure(status, Outcome::Pinned));
        assert!(is_failure(status, Outcome::Placed) && is_failure(status, Outcome::Sticky));
    }
    for status in [b"502", b"503", b"504"] {
        assert!(is_failure(status, Outcome::Pinned) && is_failure(status, Outcome::Placed));
    }
    for status in [b"200", b"400", b"429"] {
        assert!(!is_failure(status, Outcome::Placed));
    }
    assert!(!is_failure(b"", Outcome::Placed), "a response without a status says nothing");
}
