//! The rules at one moment: who is active, what fits, and whose turn it is.

use super::working_set::{Place, Waiting, WorkingSet};
use crate::replica::ReplicaId;

/// How much longer than a returning conversation a new one waits before it is served before it: a returning one has cached what it needs,
/// and its client has waited before.
const NEW_WAITS_MS: u64 = 10_000;

/// For how long a request in line that does not fit lets others pass that do. Then nobody passes it any more until it fits.
const LETS_PASS_MS: u64 = 10_000;

/// How long a place with a turn in flight is believed without news of that turn.
const LEASE_MS: u64 = 600_000;

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

/// The rules at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) now_ms: u64,
    /// How long a quiet conversation keeps its place.
    pub(crate) grace_ms: u64,
    /// Tokens that all conversations share at a replica.
    pub(crate) shared_tokens: u32,
    /// The replicas that take turns.
    pub(crate) rooms: &'a [Room],
}

impl Terms<'_> {
    /// Whether a conversation's place is in use: a turn is in flight, or the next may still come.
    pub(crate) fn is_active(&self, place: &Place) -> bool {
        let quiet_ms = self.now_ms.saturating_sub(place.last_ms);
        quiet_ms <= if place.in_flight > 0 { LEASE_MS } else { self.grace_ms }
    }

    /// Forgets places that were left long ago and waiting requests whose thread has died.
    pub(crate) fn tidy(&self, set: &mut WorkingSet) {
        set.places.retain(|place| self.is_active(place) || self.now_ms.saturating_sub(place.last_ms) <= REMEMBERED_MS);
        set.waiting.retain(|waiting| self.now_ms.saturating_sub(waiting.seen_ms) <= SILENT_MS);
    }

    /// Tokens of a replica's cache that its active conversations need, what they share counted once.
    pub(crate) fn used(&self, set: &WorkingSet, replica: ReplicaId) -> u64 {
        let active = set.places.iter().filter(|place| place.replica == replica && self.is_active(place));
        let own = active.fold(0_u64, |sum, place| sum.saturating_add(self.own(place.tokens)));
        own.saturating_add(self.shared_tokens.into())
    }

    /// Whether a conversation gives up its place for its next turn, of `tokens`: those at its replica have outgrown the cache, and it came
    /// last. Better one waits than that all are read again at every turn.
    pub(crate) fn yields(&self, set: &WorkingSet, place: &Place, tokens: u32) -> bool {
        let Some(room) = self.rooms.iter().find(|room| room.replica == place.replica) else { return false };
        let grown = self.own(tokens).saturating_sub(self.own(place.tokens));
        let overfull =
            room.cache_tokens > 0 && self.used(set, place.replica).saturating_add(grown) > self.overfull(room.cache_tokens);
        let before = |other: &Place| (other.since_ms, other.digest) < (place.since_ms, place.digest);
        let mut others = set
            .places
            .iter()
            .filter(|other| other.replica == place.replica && other.digest != place.digest && self.is_active(other));
        let Some(first) = others.next() else { return false };
        overfull && before(first) && others.all(before)
    }

    /// Tokens above which a cache is overfull: while it is not known what conversations share, their sum says too much.
    fn overfull(&self, cache_tokens: u64) -> u64 {
        let unknown = if self.shared_tokens == 0 { cache_tokens / UNKNOWN_SHARE } else { 0 };
        cache_tokens.saturating_add(unknown)
    }

    fn own(&self, tokens: u32) -> u64 {
        tokens.saturating_sub(self.shared_tokens).into()
    }

    /// Tokens left at a replica after a context of `tokens` more; `None` if it does not fit. A replica with nothing active takes anything.
    pub(crate) fn left(&self, set: &WorkingSet, room: &Room, tokens: u32) -> Option<u64> {
        if room.cache_tokens == 0 {
            return Some(u64::MAX);
        }
        let idle = !set.places.iter().any(|place| place.replica == room.replica && self.is_active(place));
        let needed = self.used(set, room.replica).saturating_add(self.own(tokens));
        room.cache_tokens.checked_sub(needed).or(idle.then_some(0))
    }

    /// Where a context fits: at home, or else where the most is left.
    fn fits(&self, set: &WorkingSet, home: Option<ReplicaId>, tokens: u32) -> Option<ReplicaId> {
        let left = |room: &Room| Some((Some(room.replica) == home, self.left(set, room, tokens)?, room.replica));
        self.rooms.iter().filter_map(left).max_by_key(|(at_home, left, _)| (*at_home, *left)).map(|(.., replica)| replica)
    }

    /// The requests in line that may go now, the first one first. Those before them in line that fit are taken to have gone.
    pub(crate) fn called(&self, set: &WorkingSet) -> Vec<u64> {
        if set.waiting.is_empty() {
            return Vec::new();
        }
        let mut set = set.clone();
        let mut line = core::mem::take(&mut set.waiting);
        line.sort_by_key(|waiting| (self.order(waiting), waiting.id));
        let mut called = Vec::new();
        for waiting in line {
            match self.fits(&set, waiting.home, waiting.tokens) {
                Some(replica) => {
                    set.places.push(waiting.place(replica, self.now_ms));
                    called.push(waiting.id);
                }
                None if self.now_ms.saturating_sub(waiting.since_ms) > LETS_PASS_MS => break,
                None => {}
            }
        }
        called
    }

    /// Whether a request that has just come may go before those in line.
    pub(crate) fn may_pass(&self, set: &WorkingSet, request: &Waiting) -> bool {
        let mut with = set.clone();
        with.waiting.push(*request);
        self.called(&with).contains(&request.id)
    }

    /// Whether one of those in line could use what a place's end would free.
    pub(crate) fn is_wanted(&self, set: &WorkingSet, digest: u64) -> bool {
        let mut without = set.clone();
        without.places.retain(|place| place.digest != digest);
        !self.called(&without).is_empty()
    }

    fn order(&self, waiting: &Waiting) -> u64 {
        waiting.since_ms.saturating_add(if waiting.returns { 0 } else { NEW_WAITS_MS })
    }
}

impl Waiting {
    /// The place it gets at a replica, with its turn in flight.
    pub(crate) fn place(&self, replica: ReplicaId, now_ms: u64) -> Place {
        Place {
            digest: self.digest,
            replica,
            since_ms: now_ms,
            last_ms: now_ms,
            tokens: self.tokens,
            in_flight: 1,
            turns: 1,
            lane: 0,
            is_conversation: true,
        }
    }
}
