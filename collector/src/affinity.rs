//! The fleet's bindings: what every Envoy told of its conversations' homes, for all the others.
//!
//! A map in memory, bounded, in which each binding has a place in the order of changes. Whoever reads it goes through the changes, or
//! through everything in the order of digests ([`Place`]). Pure but for a lock; the tasks that talk to Envoys and to the [`store`] share it.

mod outbox;
pub mod store;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use homing_routing::binding::Binding;
use homing_routing::sync::MAX_BINDINGS;
use tokio::sync::watch;

use self::outbox::Outbox;
use crate::fleet::lock;

/// The most bindings that are kept, about 130 MB; of more the ones that changed the longest ago are forgotten.
const MAX_KNOWN: usize = 1 << 20;

/// What the store is told until an Envoy says how long it holds conversations.
const IDLE_S: u32 = 600;

/// Changes that an Envoy is sent first when this collector takes over from another: of those it may not have heard.
const RECENT: u64 = MAX_BINDINGS as u64;

/// Who told a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Teller {
    /// The Envoy of this number.
    Envoy(u64),
    /// The store.
    Store,
}

/// The fleet's bindings.
#[derive(Debug)]
pub struct Affinity {
    known: Mutex<Known>,
    /// The number of the newest change.
    changes: watch::Sender<u64>,
    /// What the store is to be told, if there is one.
    pub(crate) outbox: Option<Outbox>,
    /// Whether the store has been read once, or there is none.
    loaded: AtomicBool,
}

#[derive(Debug)]
struct Known {
    by_digest: BTreeMap<u128, Held>,
    /// Which conversation each change was of; each stands here once, with its last change.
    by_change: BTreeMap<u64, u128>,
    last_change: u64,
    /// Nothing until an Envoy says it: what the store has is all taken until then.
    idle_s: Option<u32>,
    /// How many may be kept.
    most: usize,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    binding: Binding,
    change: u64,
    teller: Teller,
    /// Whether the store has it, or it is on its way there.
    stored: bool,
}

/// Up to where an Envoy has been sent bindings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The last change it was sent.
    change: u64,
    /// While everything is handed over: the digest to go on with.
    handover: Option<u128>,
}

/// Bindings for one Envoy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// At most [`MAX_BINDINGS`].
    pub bindings: Vec<Binding>,
    /// Where the Envoy stands once it has taken them.
    pub place: Place,
    /// Whether there are more.
    pub more: bool,
}

// === impl Affinity ===

impl Affinity {
    /// No bindings; what is learned of them goes to a store too, if there is one.
    pub fn new(with_store: bool) -> Self {
        Self::bounded(with_store, MAX_KNOWN)
    }

    fn bounded(with_store: bool, most: usize) -> Self {
        let known = Known { by_digest: BTreeMap::new(), by_change: BTreeMap::new(), last_change: 0, idle_s: None, most };
        Self {
            known: Mutex::new(known),
            changes: watch::Sender::new(0),
            outbox: with_store.then(Outbox::default),
            loaded: AtomicBool::new(!with_store),
        }
    }

    /// Whether the store has been read once, or there is none.
    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Relaxed)
    }

    pub(crate) fn set_loaded(&self) {
        self.loaded.store(true, Ordering::Relaxed);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    /// How many bindings were dropped on their way to the store.
    pub(crate) fn dropped(&self) -> u64 {
        self.outbox.as_ref().map_or(0, Outbox::dropped)
    }

    /// How many bindings are known.
    pub fn count(&self) -> usize {
        self.known().by_digest.len()
    }

    /// After how many seconds without a turn a conversation is forgotten.
    pub fn idle_s(&self) -> u32 {
        self.known().idle_s.unwrap_or(IDLE_S)
    }

    /// Takes in what was told, at `now_ms` since 1970; the store hears of it too if this collector is the one to tell it.
    ///
    /// What is told is not trusted: times to come are cut, and what is idle is not taken.
    pub fn learn(&self, teller: Teller, told: &[Binding], now_ms: u64, tells_store: bool) {
        if told.is_empty() {
            return;
        }
        let mut known = self.known();
        let outbox = self.outbox.as_ref().filter(|_| tells_store);
        let before = known.last_change;
        for binding in told {
            let binding = binding.clamped(now_ms);
            let news = known.learn(teller, binding, now_ms);
            let Some(now) = news.now else { continue };
            let has_it = teller == Teller::Store && now == binding;
            // What the store has is told to it again where another binding wins: its own writers may have come in another order.
            let outbox = outbox.filter(|_| !has_it && (teller == Teller::Store || news.changed));
            if let Some(outbox) = outbox {
                outbox.put(now);
            }
            if (has_it || outbox.is_some())
                && let Some(held) = known.by_digest.get_mut(&now.conversation.0)
            {
                held.stored = true;
            }
        }
        let last_change = known.last_change;
        drop(known);
        if last_change != before {
            self.changes.send_replace(last_change);
        }
    }

    /// Tells the store what it has not been told: what was learned while that was another collector's part, which has not done it.
    pub fn tell_store(&self) {
        let Some(outbox) = &self.outbox else { return };
        for held in self.known().by_digest.values_mut().filter(|held| !held.stored) {
            outbox.put(held.binding);
            held.stored = true;
        }
    }

    /// Keeps bindings for so many seconds after the last turn from now on.
    pub fn hold_for(&self, idle_s: u32) {
        self.known().idle_s = Some(idle_s);
    }

    /// Forgets what is idle.
    pub fn forget_idle(&self, now_ms: u64) {
        self.known().forget_idle(now_ms);
    }

    /// Every binding, in the order of digests.
    pub(crate) fn all(&self) -> Vec<Binding> {
        self.known().by_digest.values().map(|held| held.binding).collect()
    }

    /// Told of changes.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Where an Envoy begins that knows nothing: with everything.
    pub fn from_start(&self) -> Place {
        Place { change: self.known().last_change, handover: Some(0) }
    }

    /// Where an Envoy begins that another collector told until now: with the newest changes, then everything.
    pub fn from_takeover(&self) -> Place {
        Place { change: self.known().last_change.saturating_sub(RECENT), handover: Some(0) }
    }

    /// What an Envoy is to be sent next, changes before the rest of a hand-over. Of changes it does not get what it told itself.
    pub fn batch(&self, envoy: u64, place: Place) -> Batch {
        let known = self.known();
        let mut batch = Batch { place, ..Batch::default() };
        for (&change, digest) in known.by_change.range(place.change.saturating_add(1)..) {
            if batch.bindings.len() == MAX_BINDINGS {
                batch.more = true;
                return batch;
            }
            batch.place.change = change;
            batch
                .bindings
                .extend(known.by_digest.get(digest).filter(|held| held.teller != Teller::Envoy(envoy)).map(|held| held.binding));
        }
        if let Some(from) = place.handover {
            batch.place.handover = None;
            for (&digest, held) in known.by_digest.range(from..) {
                if batch.bindings.len() == MAX_BINDINGS {
                    batch.place.handover = Some(digest);
                    batch.more = true;
                    return batch;
                }
                batch.bindings.push(held.binding);
            }
        }
        batch
    }
}

impl Place {
    /// Whether an Envoy there has been sent everything that was known when it began.
    pub fn is_handed_over(self) -> bool {
        self.handover.is_none()
    }
}

/// What came of one binding.
struct News {
    changed: bool,
    /// What is known now; nothing if it was not taken.
    now: Option<Binding>,
}

impl Known {
    fn learn(&mut self, teller: Teller, told: Binding, now_ms: u64) -> News {
        if self.is_idle(&told, now_ms) {
            return News { changed: false, now: None };
        }
        let digest = told.conversation.0;
        let before = self.by_digest.get(&digest).copied();
        let binding = before.map_or(told, |held| held.binding.merged(told));
        if before.is_some_and(|held| held.binding == binding) {
            return News { changed: false, now: Some(binding) };
        }
        if let Some(held) = before {
            self.by_change.remove(&held.change);
        } else if self.by_digest.len() >= self.most
            && let Some((_, oldest)) = self.by_change.pop_first()
        {
            self.by_digest.remove(&oldest);
        }
        self.last_change += 1;
        // Whoever told less than this is told the whole again.
        let teller = if binding == told { teller } else { Teller::Store };
        self.by_digest.insert(digest, Held { binding, change: self.last_change, teller, stored: false });
        self.by_change.insert(self.last_change, digest);
        News { changed: true, now: Some(binding) }
    }

    fn is_idle(&self, binding: &Binding, now_ms: u64) -> bool {
        self.idle_s.is_some_and(|idle_s| (now_ms / 1000).saturating_sub(binding.last_turn_s.into()) > idle_s.into())
    }

    fn forget_idle(&mut self, now_ms: u64) {
        let idle: Vec<_> = self.by_digest.values().filter(|held| self.is_idle(&held.binding, now_ms)).copied().collect();
        for held in idle {
            self.by_digest.remove(&held.binding.conversation.0);
            self.by_change.remove(&held.change);
        }
    }
}

#[cfg(test)]
mod tests {
    use homing_routing::identity::Digest;
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
        assert_eq!(outbox.take(10), [binding(2, 5, 0), binding(3, 5, 0)]);
        affinity.tell_store();
        assert_eq!(outbox.take(10), []);
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
}
