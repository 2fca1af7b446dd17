//! What of each cache is in use, summed once and kept while the line is walked.

use hashbrown::HashSet;

use super::occupancy::ReplicaUse;
use super::terms::{Room, Terms};
use super::working_set::{Place, Waiting, WorkingSet};
use crate::replica::ReplicaId;

/// What of each room is in use.
#[derive(Clone, Debug)]
pub(crate) struct Usage<'a> {
    terms: Terms<'a>,
    rooms: Vec<RoomUse>,
    /// The most that is left in a room.
    most_left: u64,
    /// The room that is kept for one in line that has let others pass for long enough. Only one room is kept, for the first such request:
    /// what others may still use elsewhere delays it by nothing.
    kept: Option<usize>,
}

/// A walk along the line, from its front.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    pub(super) usage: Usage<'a>,
    /// Conversations that have a place, or get one in this walk.
    pub(super) seated: HashSet<u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn of(usage: Usage<'a>, set: &WorkingSet) -> Self {
        let has_room = |place: &&Place| usage.terms.rooms.room(place.replica).is_some();
        let active = set.places.iter().filter(|place| usage.terms.is_active(place));
        let seated = active.filter(has_room).map(|place| place.digest).collect();
        Self { usage, seated }
    }

    /// Lets one in line go if its conversation has a place, which another of its requests got since it came, or if it fits.
    pub(super) fn passes(&mut self, waiting: &Waiting) -> bool {
        let passes = self.seated.contains(&waiting.digest) || self.usage.passes(waiting);
        if passes {
            self.seated.insert(waiting.digest);
        }
        passes
    }
}

/// What of one room is in use.
#[derive(Clone, Copy, Debug, Default)]
struct RoomUse {
    /// Conversations with a place.
    active: u32,
    /// Tokens of their contexts, without what they share.
    tokens: u64,
}

impl<'a> Usage<'a> {
    /// What the active places use.
    pub(crate) fn of(terms: &Terms<'a>, set: &WorkingSet) -> Self {
        Self::sum(terms, set.places.iter().filter(|place| terms.is_active(place)))
    }

    /// What those with a turn in flight use: the others may have ended.
    pub(crate) fn of_running(terms: &Terms<'a>, set: &WorkingSet) -> Self {
        Self::sum(terms, set.places.iter().filter(|place| place.in_flight > 0 && terms.is_active(place)))
    }

    fn sum<'p>(terms: &Terms<'a>, places: impl Iterator<Item = &'p Place>) -> Self {
        let rooms = vec![RoomUse::default(); terms.rooms.list().len()];
        let mut usage = Self { terms: *terms, rooms, most_left: 0, kept: None };
        for place in places {
            usage.change(place.replica, |in_use, room| {
                in_use.active = in_use.active.saturating_add(1);
                in_use.tokens = in_use.tokens.saturating_add(terms.takes(room, place.tokens));
            });
        }
        usage.find_most_left();
        usage
    }

    /// Takes a place out that is active.
    pub(crate) fn give_back(&mut self, place: &Place) {
        let terms = self.terms;
        self.change(place.replica, |in_use, room| {
            in_use.active = in_use.active.saturating_sub(1);
            in_use.tokens = in_use.tokens.saturating_sub(terms.takes(room, place.tokens));
        });
        self.find_most_left();
    }

    /// Whether a context fits at a replica. One with nothing active takes anything, and so does one whose size is not known.
    pub(crate) fn fits(&self, replica: ReplicaId, tokens: u32) -> bool {
        self.terms.rooms.at(replica).is_some_and(|at| self.fits_at(at, tokens))
    }

    /// Whether a context fits at some replica.
    pub(crate) fn fits_somewhere(&self, tokens: u32) -> bool {
        self.terms.own(tokens) <= self.most_left
    }

    /// Lets one in line go if it fits somewhere: at home, or else where the most is left.
    fn passes(&mut self, waiting: &Waiting) -> bool {
        if !self.fits_somewhere(waiting.tokens) {
            if self.kept.is_none() && self.terms.now_ms.saturating_sub(waiting.since_ms) > self.terms.patience_ms {
                self.kept = self.most_left_at();
                self.find_most_left();
            }
            return false;
        }
        let home = waiting.home.and_then(|home| self.terms.rooms.at(home)).filter(|home| self.fits_at(*home, waiting.tokens));
        let Some(room) = home.or_else(|| self.most_left_at()).and_then(|at| self.terms.rooms.list().get(at)) else { return false };
        let terms = self.terms;
        self.change(room.replica, |in_use, room| {
            in_use.active = in_use.active.saturating_add(1);
            in_use.tokens = in_use.tokens.saturating_add(terms.takes(room, waiting.tokens));
        });
        self.find_most_left();
        true
    }

    /// What is in use at each replica.
    pub(super) fn by_replica(&self) -> impl Iterator<Item = ReplicaUse> {
        let shared = u64::from(self.terms.shared_tokens);
        self.terms.rooms.list().iter().zip(&self.rooms).map(move |(room, in_use)| ReplicaUse {
            replica: room.replica,
            active_tokens: if in_use.active == 0 { 0 } else { in_use.tokens.saturating_add(shared) },
            active_places: in_use.active,
        })
    }

    fn change(&mut self, replica: ReplicaId, with: impl FnOnce(&mut RoomUse, &Room)) {
        let rooms = self.terms.rooms;
        if let Some(at) = rooms.at(replica)
            && let (Some(in_use), Some(room)) = (self.rooms.get_mut(at), rooms.list().get(at))
        {
            with(in_use, room);
        }
    }

    fn fits_at(&self, at: usize, tokens: u32) -> bool {
        self.left(at).is_some_and(|left| self.terms.own(tokens) <= left)
    }

    /// Tokens left in a room; `None` if it is kept for another or overfull.
    fn left(&self, at: usize) -> Option<u64> {
        let (in_use, room) = (self.rooms.get(at)?, self.terms.rooms.list().get(at)?);
        match room.cache_tokens {
            _ if self.kept == Some(at) => None,
            0 => Some(u64::MAX),
            _ if in_use.active == 0 => Some(u64::MAX),
            cache => cache.checked_sub(in_use.tokens.saturating_add(self.terms.shared_tokens.into())),
        }
    }

    fn most_left_at(&self) -> Option<usize> {
        let left = |at: usize| Some((self.left(at)?, at));
        // The one with the fewest active of those that take anything.
        let active = |at: usize| self.rooms.get(at).map_or(u32::MAX, |in_use| in_use.active);
        (0..self.rooms.len()).filter_map(left).max_by_key(|(left, at)| (*left, core::cmp::Reverse(active(*at)))).map(|(_, at)| at)
    }

    fn find_most_left(&mut self) {
        self.most_left = (0..self.rooms.len()).filter_map(|at| self.left(at)).max().unwrap_or(0);
    }
}
