//! The fleet's bindings: what every Envoy told of its conversations' homes, for all the others.
//!
//! A map in memory, bounded, in which each binding has a place in the order of changes. Whoever reads it goes through the changes, or
//! through everything in the order of digests ([`Place`]). Pure but for a lock; the tasks that talk to Envoys and to the [`store`] share it.

mod outbox;
pub mod store;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use homing_routing::binding::Binding;
use homing_routing::identity::Digest;
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
    /// Whether the store has it: it was read there, or written.
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
            if has_it && let Some(held) = known.by_digest.get_mut(&now.conversation.0) {
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
        if let Some(outbox) = &self.outbox {
            outbox.is_behind();
        }
    }

    /// Notes that the store has these and nothing else.
    pub(crate) fn store_has_only(&self, stored: &HashMap<Digest, Binding>) {
        for held in self.known().by_digest.values_mut() {
            held.stored = stored.get(&held.binding.conversation) == Some(&held.binding);
        }
    }

    /// Notes that these were written to the store. One that has changed since is not there as it is.
    pub(crate) fn were_written(&self, bindings: &[Binding]) {
        let mut known = self.known();
        for binding in bindings {
            if let Some(held) = known.by_digest.get_mut(&binding.conversation.0) {
                held.stored |= held.binding == *binding;
            }
        }
    }

    /// Every binding that the store does not have.
    pub(crate) fn unstored(&self) -> Vec<Binding> {
        self.known().by_digest.values().filter(|held| !held.stored).map(|held| held.binding).collect()
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
    #[cfg(test)]
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
mod tests;
