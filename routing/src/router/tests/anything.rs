//! What holds whatever happens.

use homing_corpus::{mutated, seeds};
use proptest::prelude::*;

use super::*;
use crate::admission::Admission;
use crate::sync::{MAX_BINDINGS, MAX_SYNC_BYTES};

/// Something that happens to a site.
#[derive(Clone, Debug)]
enum Event {
    Turn { id: u128, thread: bool },
    End { ticket: usize, retried: bool, answered: bool },
    State { number: usize, state: ReplicaState },
    Load { number: usize, running: u32 },
    Gone { number: usize },
    Wait { seconds: u32 },
    Sweep,
}

fn any_event() -> impl Strategy<Value = Event> {
    let state = prop::sample::select(vec![ReplicaState::Ready, ReplicaState::Down, ReplicaState::Draining, ReplicaState::Asleep]);
    prop_oneof![
        6 => (0_u128..30, any::<bool>()).prop_map(|(id, thread)| Event::Turn { id, thread }),
        6 => (0_usize..20, any::<bool>(), any::<bool>()).prop_map(|(ticket, retried, answered)| Event::End { ticket, retried, answered }),
        1 => (1_usize..=4, state).prop_map(|(number, state)| Event::State { number, state }),
        1 => (1_usize..=4, 0_u32..20).prop_map(|(number, running)| Event::Load { number, running }),
        1 => (1_usize..=4).prop_map(|number| Event::Gone { number }),
        1 => (0_u32..700).prop_map(|seconds| Event::Wait { seconds }),
        1 => Just(Event::Sweep),
    ]
}

proptest! {
    #[test]
    fn in_flight_is_never_negative_and_ends_at_zero(events in prop::collection::vec(any_event(), 1..120)) {
        let mut site = Site::new(|policy| policy.spill_threshold = Limit::Fixed(1));
        let mut other = site.thread();
        let mut open: Vec<(bool, Ticket<MemoryHost>)> = Vec::new();
        let (mut ended, mut taken) = (0, 0);
        for event in events {
            match event {
                Event::Turn { id, thread } => {
                    let ticket = ticket(if thread { &mut other } else { &mut site.router }, id);
                    taken += u64::from(ticket.chosen().is_some());
                    open.push((thread, ticket));
                }
                Event::End { ticket, retried, answered } if ticket < open.len() => {
                    let (thread, mut ticket) = open.swap_remove(ticket);
                    let router = if thread { &mut other } else { &mut site.router };
                    let address = ticket.addresses().nth(usize::from(retried)).map(str::to_owned);
                    let had = ticket.chosen().is_some();
                    if let Some(address) = address.filter(|_| answered) {
                        router.served(&mut ticket, &address, Answer::Served);
                    }
                    router.ended(ticket);
                    ended += 1;
                    taken -= u64::from(had);
                }
                Event::End { .. } => {}
                Event::State { number, state } => {
                    site.reports.iter_mut().filter(|report| report.replica == name(number)).for_each(|report| report.state = state);
                    site.sync();
                }
                Event::Load { number, running } => {
                    site.reports.iter_mut().filter(|report| report.replica == name(number)).for_each(|report| report.running = running);
                    site.sync();
                }
                Event::Gone { number } => {
                    site.reports.retain(|report| report.replica != name(number));
                    site.sync();
                    site.reports.push(report(name(number)));
                }
                Event::Wait { seconds } => site.host.advance(u64::from(seconds) * 1000),
                Event::Sweep => site.router.sweep(false).expect("a sweep"),
            }
            // A count below zero would wrap to a huge one.
            prop_assert_eq!(site.in_flight(), taken);
        }
        drop(open);
        prop_assert_eq!(site.in_flight(), 0);
        let counted: u64 = Outcome::ALL.iter().map(|outcome| site.count(*outcome)).sum();
        prop_assert_eq!(counted, ended);
        prop_assert_eq!(site.errors(ErrorKind::Host), 0);
    }

    #[test]
    fn any_bytes_in_shared_data_leave_a_router_that_works(bytes: Vec<u8>, layout in 0_u8..4) {
        let mut site = Site::new(|_| {});
        site.turn(9);
        let garbage: Vec<u8> = core::iter::once(layout).chain(bytes).collect();
        let pool = ["snapshot", "ledger", "policy"].map(|part| format!("homing/pool/{POOL}/{part}"));
        let others = ["homing/lanes", "homing/sweep", "homing/sync", "homing/bindings/0", "homing/settings", "homing/since"].map(str::to_owned);
        for key in pool.into_iter().chain(others) {
            site.host.write(&key, &garbage, Expected::Anything).expect("room");
        }
        site.turn(0);
        site.host.advance(30_000);
        site.router.heal().expect("a tick");
        site.router.sweep(false).expect("a sweep");
        let mut other = site.thread();
        drop(ticket(&mut other, 0));
        // The stored order of snapshots may be ahead; it is forgotten once it is old.
        site.host.advance(30_000);
        site.sequence = u64::MAX - 1;
        site.sync();
        site.turn(1);
        prop_assert_eq!(site.in_flight(), 0);
    }

    /// Unlike random bytes, these are mostly of the right layout.
    #[test]
    fn any_damage_to_a_shared_value_leaves_a_router_that_works((key, bytes) in damaged_value(), admits: bool) {
        let mut site = worked(admits);
        site.host.write(&key, &bytes, Expected::Anything).expect("room");
        let turn = |router: &mut Router<MemoryHost>, id| {
            match decide(router, &Request { conversation: Some(&conversation(id)), generates: true, bytes: 1000, ..Request::default() }) {
                Verdict::Go(ticket) => router.ended(ticket),
                other => drop(other),
            }
        };
        turn(&mut site.router, 0);
        site.host.advance(30_000);
        site.router.heal().expect("a tick");
        site.router.sweep(false).expect("a sweep");
        drop(site.router.called(POOL.as_bytes()));
        turn(&mut site.thread(), 0);
        site.host.advance(30_000);
        site.sequence = u64::MAX - 1;
        site.sync();
        turn(&mut site.router, 1);
        prop_assert_eq!(site.in_flight(), 0);
    }

    #[test]
    fn any_exchange_is_answered_within_bounds_or_refused_and_changes_nothing(body in mutated(seeds("exchange"))) {
        let mut site = worked(false);
        let before = site.host.shared();
        match site.control.exchange(&body) {
            Ok(answer) => {
                let written = serde_json::to_vec(&answer).expect("JSON");
                prop_assert!(written.len() <= MAX_SYNC_BYTES && answer.bindings.0.len() <= 2 * MAX_BINDINGS);
                prop_assert_eq!(serde_json::from_slice::<SyncAnswer>(&written).ok(), Some(answer));
            }
            Err(error) => {
                prop_assert!(error.to_string().len() <= body.len() + 200, "{}", error);
                prop_assert_eq!(site.host.shared(), before);
            }
        }
        // A collector of another generation that is heard later sets everything right; of the same one a lower number is rightly refused.
        let sent = serde_json::from_slice::<SyncRequest>(&body).map_or(0, |request| request.generation);
        let generation = sent.max(request().generation).checked_add(1).unwrap_or(2);
        site.host.advance(31_000);
        let pools = vec![PoolReport { cluster: POOL.into(), bytes_per_token: None, shared_tokens: None, replicas: site.reports.clone() }];
        site.exchange(&SyncRequest { generation, sequence: 1, pools, now_ms: site.host.now_ms(), ..request() });
        site.turn(1);
        prop_assert_eq!(site.in_flight(), 0);
    }
}

/// A site after some turns.
fn worked(admits: bool) -> Site {
    let mut site = Site::new(|policy| policy.admission = admits.then(Admission::default));
    for id in 0..3 {
        site.turn(id);
    }
    site.sync();
    site
}

/// A shared value of that site, damaged.
fn damaged_value() -> impl Strategy<Value = (String, homing_corpus::Input)> {
    // Of the table's many buckets one that is empty and one that is not will do.
    let is_one_of_many = |key: &str, bytes: &[u8]| key.starts_with("homing/table/") && bytes[1..].iter().all(|byte| *byte == 0);
    let values = worked(true).host.shared().into_iter().filter(move |(key, bytes)| !is_one_of_many(key, bytes));
    let values: Vec<_> = values.collect();
    prop::sample::select(values).prop_flat_map(|(key, bytes)| (Just(key), mutated([bytes])))
}
