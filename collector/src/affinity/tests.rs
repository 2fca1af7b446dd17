use homing_routing::replica::ReplicaId;
use proptest::prelude::*;

use super::*;

const NOW_MS: u64 = 1_700_000_000_000;

fn binding(digest: u128, home: u64, age_ms: u64) -> Binding {
    let bound_at_ms = NOW_MS - age_ms;
    let last_turn_s = u32::try_from(bound_at_ms / 1000).expect("seconds");
    Binding { conversation: Digest(digest), home: ReplicaId(home), bound_at_ms, last_turn_s, bytes: 1 }
}

fn homes(batch: &Batch) -> Vec<(u128, u64)> {
    batch.bindings.iter().map(|binding| (binding.conversation.0, binding.home.0)).collect()
}

fn learn(affinity: &Affinity, envoy: u64, told: &[Binding]) {
    affinity.learn(Teller::Envoy(envoy), told, NOW_MS, true);
}

#[test]
fn an_envoy_gets_what_others_told_once_and_nothing_of_its_own() {
    let affinity = Affinity::new(false);
    learn(&affinity, 0, &[binding(1, 5, 0)]);
    learn(&affinity, 1, &[binding(2, 6, 0)]);
    let batch = affinity.batch(0, Place::default());
    assert_eq!(homes(&batch), [(2, 6)]);
    assert_eq!(homes(&affinity.batch(0, batch.place)), []);
    assert_eq!(homes(&affinity.batch(1, Place::default())), [(1, 5)]);
    // An answer that was lost is sent again: the place has not moved.
    assert_eq!(homes(&affinity.batch(1, Place::default())), [(1, 5)]);
}

#[test]
fn of_a_conflict_everybody_but_the_winner_hears() {
    let affinity = Affinity::new(false);
    learn(&affinity, 0, &[binding(1, 5, 10)]);
    learn(&affinity, 1, &[binding(1, 6, 0)]);
    let homes_of = |envoy| homes(&affinity.batch(envoy, Place::default()));
    assert_eq!((homes_of(0), homes_of(1), homes_of(2)), (vec![(1, 6)], vec![], vec![(1, 6)]));
    // The loser tells it again, with nothing new: nobody is bothered.
    let place = affinity.batch(2, Place::default()).place;
    learn(&affinity, 0, &[binding(1, 5, 10)]);
    assert_eq!(homes(&affinity.batch(2, place)), []);
}

#[test]
fn an_envoy_that_restarted_gets_everything_in_batches() {
    let affinity = Affinity::new(false);
    let all: Vec<_> = (0..10_000).map(|n| binding(n, 1, 0)).collect();
    learn(&affinity, 0, &all);
    let (mut place, mut seen) = (affinity.from_start(), Vec::new());
    assert!(!place.is_handed_over());
    // It goes on meanwhile.
    learn(&affinity, 1, &[binding(20_000, 1, 0)]);
    while !place.is_handed_over() {
        let batch = affinity.batch(0, place);
        assert!(batch.bindings.len() <= MAX_BINDINGS);
        seen.extend(batch.bindings.iter().map(|binding| binding.conversation.0));
        place = batch.place;
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 10_001);
}

#[test]
fn what_is_idle_or_too_much_is_forgotten() {
    let affinity = Affinity::bounded(false, 2);
    affinity.hold_for(600);
    learn(&affinity, 0, &[binding(1, 1, 601_000), binding(2, 1, 0), binding(3, 1, 0), binding(4, 1, 0)]);
    assert_eq!(homes(&affinity.batch(1, Place::default())), [(3, 1), (4, 1)]);
    affinity.forget_idle(NOW_MS + 602_000);
    assert_eq!(affinity.count(), 0);
    affinity.hold_for(3_600);
    learn(&affinity, 0, &[binding(1, 1, 601_000)]);
    assert_eq!(affinity.count(), 1);
}

#[test]
fn until_an_envoy_says_how_long_it_holds_conversations_all_that_the_store_has_is_taken() {
    let affinity = Affinity::new(true);
    affinity.learn(Teller::Store, &[binding(1, 1, 3_000_000), binding(2, 1, 4_000_000)], NOW_MS, true);
    affinity.forget_idle(NOW_MS);
    assert_eq!(affinity.count(), 2);
    affinity.hold_for(3_600);
    affinity.forget_idle(NOW_MS);
    assert_eq!(affinity.all(), [binding(1, 1, 3_000_000)]);
}

#[test]
fn the_store_hears_what_envoys_tell_and_what_wins_over_its_own() {
    let affinity = Affinity::new(true);
    let outbox = affinity.outbox.as_ref().expect("an outbox");
    learn(&affinity, 0, &[binding(1, 5, 0)]);
    assert_eq!(outbox.take(10), [binding(1, 5, 0)]);
    affinity.learn(Teller::Store, &[binding(2, 5, 0)], NOW_MS, true);
    assert_eq!(outbox.take(10), [], "it knows that itself");
    affinity.learn(Teller::Store, &[binding(1, 6, 100)], NOW_MS, true);
    assert_eq!(outbox.take(10), [binding(1, 5, 0)], "its own is the earlier one");
    affinity.learn(Teller::Envoy(0), &[binding(3, 5, 0)], NOW_MS, false);
    assert_eq!(outbox.take(10), [], "another collector tells it");
}

#[test]
fn a_collector_that_takes_over_tells_the_store_what_the_other_one_has_not() {
    let affinity = Affinity::new(true);
    let outbox = affinity.outbox.as_ref().expect("an outbox");
    affinity.learn(Teller::Envoy(0), &[binding(1, 5, 0), binding(2, 5, 0), binding(3, 5, 0)], NOW_MS, false);
    // The other collector wrote these before it died, the second one as it was before.
    affinity.learn(Teller::Store, &[binding(1, 5, 0), binding(2, 6, 9)], NOW_MS, false);
    affinity.tell_store();
    assert!(outbox.take_behind());
    assert_eq!(affinity.unstored(), [binding(2, 5, 0), binding(3, 5, 0)]);
    affinity.were_written(&[binding(2, 5, 0)]);
    assert_eq!(affinity.unstored(), [binding(3, 5, 0)], "the other one is not written yet");
    learn(&affinity, 0, &[binding(3, 7, 0)]);
    affinity.were_written(&[binding(3, 5, 0)]);
    assert_eq!(affinity.unstored(), [binding(3, 7, 0)], "it has changed while it was written");
}

/// Something that happens between a collector and its Envoys.
#[derive(Clone, Debug)]
enum Event {
    Told { envoy: usize, digest: u128, home: u64, age_ms: u64 },
    Sent { envoy: usize, lost: bool },
    Restarted { envoy: usize },
    TookOver { envoy: usize },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0_usize..3, 0_u128..5, 1_u64..4, 0_u64..4)
            .prop_map(|(envoy, digest, home, age_ms)| Event::Told { envoy, digest, home, age_ms }),
        4 => (0_usize..3, any::<bool>()).prop_map(|(envoy, lost)| Event::Sent { envoy, lost }),
        1 => (0_usize..3).prop_map(|envoy| Event::Restarted { envoy }),
        1 => (0_usize..3).prop_map(|envoy| Event::TookOver { envoy }),
    ]
}

proptest! {
    #[test]
    fn in_the_end_every_envoy_has_the_same(events in prop::collection::vec(event(), 1..60)) {
        let affinity = Affinity::new(false);
        let mut tables = vec![BTreeMap::<u128, Binding>::new(); 3];
        let mut places = [Place::default(); 3];
        let merge = |table: &mut BTreeMap<u128, Binding>, told: Binding| {
            let known = table.get(&told.conversation.0).copied();
            table.insert(told.conversation.0, known.map_or(told, |known| known.merged(told)));
        };
        for event in events {
            match event {
                Event::Told { envoy, digest, home, age_ms } => {
                    // An Envoy tells what is in its table.
                    merge(&mut tables[envoy], binding(digest, home, age_ms));
                    learn(&affinity, envoy as u64, &[tables[envoy][&digest]]);
                }
                Event::Sent { envoy, lost } => {
                    let batch = affinity.batch(envoy as u64, places[envoy]);
                    if !lost {
                        places[envoy] = batch.place;
                        batch.bindings.into_iter().for_each(|told| merge(&mut tables[envoy], told));
                    }
                }
                Event::Restarted { envoy } => {
                    tables[envoy].clear();
                    places[envoy] = affinity.from_start();
                }
                Event::TookOver { envoy } => places[envoy] = affinity.from_takeover(),
            }
        }
        for (envoy, table) in tables.iter_mut().enumerate() {
            affinity.batch(envoy as u64, places[envoy]).bindings.into_iter().for_each(|told| merge(table, told));
        }
        let all: Vec<_> = affinity.all();
        for table in &tables {
            prop_assert_eq!(&table.values().copied().collect::<Vec<_>>(), &all);
        }
    }
}
