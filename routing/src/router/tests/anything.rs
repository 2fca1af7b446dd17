//! What holds whatever happens.

use proptest::prelude::*;

use super::*;
use crate::testing::test;

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
                        router.served(&mut ticket, &address, false);
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

    #[test]
    fn any_bytes_sent_to_the_control_listener_are_an_exchange_or_a_refusal(body: Vec<u8>) {
        let host = MemoryHost::new(0);
        let refused = Control::new(host.clone()).exchange(&body).is_err();
        prop_assert!(refused);
        prop_assert_eq!(host.shared_bytes(), 0);
    }
}
