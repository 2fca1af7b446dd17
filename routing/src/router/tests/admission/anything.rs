//! What holds whatever happens.

use proptest::prelude::*;

use super::*;

/// What may happen to a pool below its caches.
#[derive(Clone, Debug)]
enum Turn {
    Begins { id: u8, parent: Option<u8>, tokens: u16 },
    Ends(u8),
    Passes { ms: u16 },
    Sync,
    Drains(u8),
}

fn any_turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        5 => (0_u8..12, prop::option::of(0_u8..12), 0_u16..2_900).prop_map(|(id, parent, tokens)| Turn::Begins { id, parent, tokens }),
        4 => any::<u8>().prop_map(Turn::Ends),
        3 => (1_u16..30_000).prop_map(|ms| Turn::Passes { ms }),
        1 => Just(Turn::Sync),
        1 => (1_u8..5).prop_map(Turn::Drains),
    ]
}

/// What may happen to a pool that admits.
#[derive(Clone, Debug)]
enum Happening {
    Ask { thread: bool, id: u8, kib: u8 },
    End(u8),
    Leave(u8),
    Tick { ms: u16 },
    Sync,
}

fn any_happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (any::<bool>(), 0_u8..30, 1_u8..120).prop_map(|(thread, id, kib)| Happening::Ask { thread, id, kib }),
        3 => any::<u8>().prop_map(Happening::End),
        1 => any::<u8>().prop_map(Happening::Leave),
        3 => (1_u16..3_000).prop_map(|ms| Happening::Tick { ms }),
        1 => Just(Happening::Sync),
    ]
}

proptest! {
    /// Twelve conversations of which none has more than a twelfth of a cache: spilled, moved, drained and by parents' sides.
    #[test]
    fn below_the_caches_every_choice_is_as_without_admission(
        turns in prop::collection::vec(any_turn(), 1..150),
        threshold in 0_u32..4,
        granted in 0_u16..3,
    ) {
        let with = |admission: Option<Admission>| {
            Site::new(|policy| (policy.spill_threshold, policy.admission) = (Limit::Fixed(threshold), admission))
        };
        let mut sites = [with(Some(Admission { turns: granted, ..Admission::default() })), with(None)];
        let mut running: [Vec<Ticket<MemoryHost>>; 2] = Default::default();
        let mut drained = None;
        for turn in turns {
            let mut chosen_by = Vec::new();
            for (site, running) in sites.iter_mut().zip(&mut running) {
                match turn {
                    Turn::Begins { id, parent, tokens } => {
                        let parent = parent.filter(|parent| *parent != id).map(|parent| conversation(parent.into()).digest);
                        let named = Conversation { parent, ..conversation(id.into()) };
                        let mut ticket = match decide(&mut site.router, &asked(&named, u32::from(tokens) * 4)) {
                            Verdict::Go(ticket) => ticket,
                            verdict => return Err(TestCaseError::fail(format!("{verdict:?}"))),
                        };
                        let replica = chosen(&ticket);
                        site.router.served(&mut ticket, &replica.address.to_string(), Answer::Served);
                        chosen_by.push((replica, ticket.planned(), ticket.addresses().map(str::to_owned).collect::<Vec<_>>()));
                        running.push(ticket);
                    }
                    Turn::Ends(which) if !running.is_empty() => {
                        let ticket = running.remove(usize::from(which) % running.len());
                        site.router.ended(ticket);
                    }
                    Turn::Ends(_) => {}
                    Turn::Passes { ms } => {
                        site.host.advance(ms.into());
                        prop_assert!(site.router.called(POOL.as_bytes()).expect("a line").is_empty());
                    }
                    Turn::Sync => drop(site.sync()),
                    Turn::Drains(number) => {
                        let number = usize::from(number);
                        if let Some(before) = drained {
                            site.set_state(before, ReplicaState::Ready);
                        }
                        site.set_state(number, ReplicaState::Draining);
                    }
                }
            }
            if let Turn::Drains(number) = turn {
                drained = Some(usize::from(number));
            }
            prop_assert_eq!(chosen_by.first(), chosen_by.last(), "{:?}", turn);
        }
        prop_assert_eq!(sites[0].were_held(), 0);
    }

    #[test]
    fn nothing_waits_for_ever_and_everything_is_given_back(
        happenings in prop::collection::vec(any_happening(), 1..120),
        turns in 0_u16..3,
    ) {
        let mut site = site(|admission| (admission.turns, admission.max_held) = (turns, 16));
        let mut other = site.thread();
        let mut running = Vec::new();
        let mut line: Vec<(bool, u8, u32, Held<MemoryHost>)> = Vec::new();
        for happening in happenings {
            match happening {
                Happening::Ask { thread, id, kib } => {
                    let bytes = u32::from(kib) * 1024;
                    let named = conversation(id.into());
                    match decide(if thread { &mut other } else { &mut site.router }, &asked(&named, bytes)) {
                        Verdict::Go(ticket) => running.push(ticket),
                        Verdict::Hold(held) => line.push((thread, id, bytes, held)),
                        verdict => prop_assert!(false, "{verdict:?}"),
                    }
                }
                Happening::End(which) if !running.is_empty() => {
                    let ticket = running.remove(usize::from(which) % running.len());
                    site.router.ended(ticket);
                }
                Happening::Leave(which) if !line.is_empty() => drop(line.remove(usize::from(which) % line.len())),
                Happening::Tick { ms } => {
                    site.host.advance(ms.into());
                    site.router.still_waiting(line.iter().map(|(.., held)| held)).expect("a line");
                    for id in site.called() {
                        let Some(at) = line.iter().position(|(.., held)| held.id() == id) else { continue };
                        let (thread, id, bytes, held) = line.remove(at);
                        let router = if thread { &mut other } else { &mut site.router };
                        match router.retry(POOL.as_bytes(), &asked(&conversation(id.into()), bytes), &held) {
                            Some(verdict) => running.push(go(verdict)),
                            None => line.push((thread, id, bytes, held)),
                        }
                    }
                }
                Happening::Sync => drop(site.sync()),
                Happening::End(_) | Happening::Leave(_) => {}
            }
        }
        // Everybody who runs ends, and those in line go one after the other.
        running.into_iter().for_each(|ticket| site.router.ended(ticket));
        for _ in 0..200 {
            if line.is_empty() {
                break;
            }
            site.host.advance(3_000);
            site.router.still_waiting(line.iter().map(|(.., held)| held)).expect("a line");
            for id in site.called() {
                let Some(at) = line.iter().position(|(.., held)| held.id() == id) else { continue };
                let (_, id, bytes, held) = line.remove(at);
                if let Some(verdict) = site.router.retry(POOL.as_bytes(), &asked(&conversation(id.into()), bytes), &held) {
                    site.router.ended(go(verdict));
                } else {
                    line.push((false, id, bytes, held));
                }
            }
        }
        prop_assert!(line.is_empty(), "{} wait for ever", line.len());
        prop_assert_eq!(site.in_flight(), 0);
        prop_assert_eq!(site.errors(ErrorKind::Contended), 0);
    }
}
