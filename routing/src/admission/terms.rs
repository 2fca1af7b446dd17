//! The rules at one moment: who is active, and whose turn it is.

use hashbrown::HashMap;

use super::usage::{Usage, Walk};
use super::working_set::{Place, Waiting, WorkingSet};
use crate::replica::ReplicaId;

/// How long a place is remembered after its conversation has become quiet.
const REMEMBERED_MS: u64 = 120_000;

/// How long a request stays in line whose thread says nothing of it any more.
const SILENT_MS: u64 = 4_000;

/// One part in so many of a cache may be what is counted twice while nothing is known of what conversations share.
const UNKNOWN_SHARE: u64 = 6;

/// A replica that takes turns, and how many tokens its cache holds; 0 when unknown: then everything fits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) replica: ReplicaId,
    pub(crate) cache_tokens: u64,
}

/// The replicas that take turns.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    list: Vec<Room>,
    at: HashMap<ReplicaId, usize>,
}

impl FromIterator<Room> for Rooms {
    fn from_iter<I: IntoIterator<Item = Room>>(rooms: I) -> Self {
        let list: Vec<Room> = rooms.into_iter().collect();
        let at = list.iter().enumerate().map(|(at, room)| (room.replica, at)).collect();
        Self { list, at }
    }
}

impl Rooms {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn list(&self) -> &[Room] {
        &self.list
    }

    pub(super) fn at(&self, replica: ReplicaId) -> Option<usize> {
        self.at.get(&replica).copied()
    }

    pub(crate) fn room(&self, replica: ReplicaId) -> Option<&Room> {
        self.list.get(self.at(replica)?)
    }
}

/// The rules at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) now_ms: u64,
    /// How long a quiet conversation keeps its place.
    pub(crate) grace_ms: u64,
    /// For how long one in line lets others go before it that came later.
    pub(crate) patience_ms: u64,
    /// Tokens that all conversations share at a replica.
    pub(crate) shared_tokens: u32,
    /// The replicas that take turns.
    pub(crate) rooms: &'a Rooms,
}

impl<'a> Terms<'a> {
    /// Whether a conversation's place is in use: a turn is in flight, or the next may still come.
    pub(crate) fn is_active(&self, place: &Place) -> bool {
        place.is_active(self.now_ms, self.grace_ms)
    }

    /// Forgets places that were left long ago and waiting requests whose thread has died.
    pub(crate) fn tidy(&self, set: &mut WorkingSet) {
        set.grace_ms = self.grace_ms;
        set.places.retain(|place| self.is_active(place) || self.now_ms.saturating_sub(place.last_ms) <= REMEMBERED_MS);
        set.waiting.retain(|waiting| self.now_ms.saturating_sub(waiting.seen_ms) <= SILENT_MS);
    }

    /// What a context takes of a room besides what all share: no more than there is, so that one larger than the cache fills it and no more.
    pub(super) fn takes(&self, room: &Room, tokens: u32) -> u64 {
        let own = self.own(tokens);
        if room.cache_tokens == 0 { own } else { own.min(room.cache_tokens.saturating_sub(self.shared_tokens.into())) }
    }

    /// A context without what all share.
    pub(crate) fn own(&self, tokens: u32) -> u64 {
        tokens.saturating_sub(self.shared_tokens).into()
    }

    /// Whether a conversation gives up its place for its next turn, of `tokens`: those at its replica have outgrown the cache, and it came
    /// last. Better one waits than that all are read again at every turn.
    pub(crate) fn yields(&self, set: &WorkingSet, place: &Place, tokens: u32) -> bool {
        let Some(room) = self.rooms.room(place.replica).filter(|room| room.cache_tokens > 0) else { return false };
        let mut used = self.takes(room, tokens).saturating_add(self.shared_tokens.into());
        let mut others = 0_u32;
        for other in set.places.iter().filter(|other| other.replica == place.replica && other.digest != place.digest) {
            if self.is_active(other) {
                if (other.since_ms, other.digest) > (place.since_ms, place.digest) {
                    return false;
                }
                others = others.saturating_add(1);
                used = used.saturating_add(self.takes(room, other.tokens));
            }
        }
        others > 0 && used > self.overfull(room.cache_tokens)
    }

    /// Tokens above which a cache is overfull: while it is not known what conversations share, their sum says too much.
    fn overfull(&self, cache_tokens: u64) -> u64 {
        let unknown = if self.shared_tokens == 0 { cache_tokens / UNKNOWN_SHARE } else { 0 };
        cache_tokens.saturating_add(unknown)
    }

    /// By what the line is ordered, the first one first: a returning conversation goes before a new one that came a little earlier, for it
    /// has cached what it needs, and its client has waited before.
    pub(crate) fn order_ms(&self, since_ms: u64, returns: bool) -> u64 {
        since_ms.saturating_add(if returns { 0 } else { self.patience_ms })
    }

    /// The requests in line that may go now, the first one first. Those before them in line that fit are taken to have gone.
    pub(crate) fn called(&self, set: &WorkingSet) -> Vec<u64> {
        if set.waiting.is_empty() {
            return Vec::new();
        }
        let mut walk = Walk::of(Usage::of(self, set), set);
        set.waiting.iter().filter(|waiting| walk.passes(waiting)).map(|waiting| waiting.id).collect()
    }

    /// What is in use once those have gone that go before a request.
    pub(crate) fn usage_before(&self, set: &WorkingSet, request: &Waiting) -> Usage<'a> {
        let mut before = set.waiting.iter().take_while(|waiting| waiting.order() < request.order()).peekable();
        let usage = Usage::of(self, set);
        if before.peek().is_none() {
            return usage;
        }
        let mut walk = Walk::of(usage, set);
        before.for_each(|waiting| {
            walk.passes(waiting);
        });
        walk.usage
    }

    /// Whether one of those in line could use what a place's end would free.
    pub(crate) fn is_wanted(&self, set: &WorkingSet, place: &Place) -> bool {
        if set.waiting.is_empty() {
            return false;
        }
        let mut usage = Usage::of(self, set);
        usage.give_back(place);
        let mut walk = Walk::of(usage, set);
        walk.seated.remove(&place.digest);
        set.waiting.iter().any(|waiting| !walk.seated.contains(&waiting.digest) && walk.passes(waiting))
    }

    /// The moment from which on time alone may call one in line.
    pub(crate) fn next_change_ms(&self, set: &WorkingSet) -> u64 {
        let quiet = set.places.iter().filter(|place| self.is_active(place)).map(|place| place.ends_ms(self.grace_ms));
        let lets_pass = set.waiting.iter().map(|waiting| waiting.since_ms.saturating_add(self.patience_ms));
        let silent = set.waiting.iter().map(|waiting| waiting.seen_ms.saturating_add(SILENT_MS));
        let to_come = quiet.chain(lets_pass).chain(silent).filter(|end_ms| *end_ms >= self.now_ms);
        to_come.min().map_or(u64::MAX, |end_ms| end_ms.saturating_add(1))
    }
}
