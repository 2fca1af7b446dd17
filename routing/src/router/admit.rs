//! Admission: a turn is decided when its conversation has a place, and waits in line until then.

use core::cell::Cell;
use std::rc::Rc;

use hashbrown::HashMap;

use super::{Request, Router, Verdict};
use crate::admission::{
    Admission, GROWTH_TOKENS, Overflow, Place, Reason, SMALL_TOKENS, SharedSet, Terms, Usage, Waiting, WorkingSet,
};
use crate::host::{Host, HostError, MANY_TRIES, TRIES};
use crate::metric::{AdmissionEvent, ErrorKind};
use crate::outcome::Outcome;
use crate::pool::Pool;
use crate::replica::ReplicaId;

/// A request in line. Dropping it takes it out.
#[derive(Debug)]
pub struct Held<H: Host> {
    host: H,
    set: Rc<SharedSet>,
    waiting: Waiting,
    /// Whether it has left the line already.
    has_left: Cell<bool>,
}

/// A turn's place, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<H: Host> {
    host: H,
    set: Rc<SharedSet>,
    digest: u64,
    /// Since when it has the place: what ends later than its place belongs to no other.
    since_ms: u64,
}

/// Why a request that waits is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Whether it is its turn.
    IsCalled,
    /// It has waited for long enough, or could not be held.
    Overdue,
}

impl<H: Host> Router<H> {
    /// Whether this request needs a place of its conversation to be admitted.
    pub(super) fn is_admitted_by_place(pool: &Pool, request: &Request<'_>) -> bool {
        pool.policy.admission.is_some() && request.generates && pool.texts.tokens(request.bytes) >= SMALL_TOKENS
    }

    /// Decides a request that needs a place, or holds it.
    pub(super) fn admit(&mut self, cluster: &[u8], request: &Request<'_>) -> Result<Option<Verdict<H>>, HostError> {
        // Places are given back by lane if this thread dies, so it needs one before its first place.
        self.take_lane()?;
        let Some((pool, admission)) = self.admitting(cluster) else { return Ok(None) };
        let mut waiting = self.waiting(pool, request)?;
        for first in core::iter::once(true).chain(core::iter::repeat_n(false, MANY_TRIES)) {
            let Some((pool, _)) = self.admitting(cluster) else { return Ok(None) };
            let mut set = pool.working_set.open(&self.host)?;
            // A think time is heard once, however often the request is looked at.
            if let Some(place) = set.place(waiting.digest).filter(|place| first && place.in_flight == 0) {
                pool.hear(self.now_ms.saturating_sub(place.last_ms));
            }
            let terms = pool.terms(self.now_ms);
            terms.tidy(&mut set);
            if let Some(place) = self.enters(pool, &terms, &mut set, request, &mut waiting, Look::IsCalled)? {
                if pool.working_set.store(&self.host, &set)? {
                    return self.admitted(cluster, request, &place).map(Some);
                }
                continue;
            }
            if set.waiting.len() >= admission.max_held as usize {
                return self.overflows(cluster, request, &waiting);
            }
            set.join(waiting);
            if pool.working_set.store(&self.host, &set)? {
                pool.working_set.set_held(&self.host, set.waiting.len())?;
                pool.count_admission(&self.host, AdmissionEvent::Held(waiting.reason))?;
                let (host, set) = (self.host.clone(), Rc::clone(&pool.working_set));
                return Ok(Some(Verdict::Hold(Held { host, set, waiting, has_left: Cell::new(false) })));
            }
        }
        self.count_error(ErrorKind::Contended, 1);
        self.forced(cluster, request, &waiting)
    }

    /// Those of a pool's requests in line, of every thread, whose turn it is.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn called(&mut self, cluster: &[u8]) -> Result<Vec<u64>, HostError> {
        self.refresh(cluster)?;
        let Some((pool, _)) = self.admitting(cluster) else { return Ok(Vec::new()) };
        pool.called(&self.host, self.now_ms)
    }

    /// Says that this thread's requests in line still wait. Call it at least every two seconds: those that nothing is said of are taken for
    /// a dead thread's after four.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn still_waiting<'a>(&mut self, held: impl Iterator<Item = &'a Held<H>>) -> Result<(), HostError>
    where
        H: 'a,
    {
        let mut by_pool: HashMap<*const SharedSet, (&SharedSet, HashMap<u64, &Waiting>)> = HashMap::new();
        for held in held {
            let (_, of_pool) = by_pool.entry(Rc::as_ptr(&held.set)).or_insert_with(|| (&held.set, HashMap::new()));
            of_pool.insert(held.waiting.id, &held.waiting);
        }
        let seen_ms = self.host.now_ms();
        for (shared, held) in by_pool.into_values() {
            for _ in 0..MANY_TRIES {
                let mut set = shared.open(&self.host)?;
                let mut lost = held.clone();
                for waiting in &mut set.waiting {
                    if lost.remove(&waiting.id).is_some() {
                        waiting.seen_ms = seen_ms;
                    }
                }
                // They were taken for a dead thread's: they go back to where they were.
                lost.into_values().for_each(|waiting| set.join(Waiting { seen_ms, ..*waiting }));
                if shared.store(&self.host, &set)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Decides a request that is held, if it is its turn.
    ///
    /// Whatever the host refuses on the way is counted, and the choice left to Envoy.
    pub fn retry(&mut self, cluster: &[u8], request: &Request<'_>, held: &Held<H>) -> Option<Verdict<H>> {
        self.look(cluster, request, held, Look::IsCalled)
    }

    /// Decides a request that has been held for as long as the pool allows: it is sent, or answered with a 429.
    ///
    /// Whatever the host refuses on the way is counted, and the choice left to Envoy.
    pub fn overdue(&mut self, cluster: &[u8], request: &Request<'_>, held: &Held<H>) -> Verdict<H> {
        self.look(cluster, request, held, Look::Overdue).unwrap_or_else(|| {
            held.leave();
            Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new()))
        })
    }

    fn look(&mut self, cluster: &[u8], request: &Request<'_>, held: &Held<H>, look: Look) -> Option<Verdict<H>> {
        let decided = self.refresh(cluster).and_then(|()| self.try_look(cluster, request, held, look));
        decided.unwrap_or_else(|_| {
            self.count_error(ErrorKind::Host, 1);
            held.leave();
            Some(Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new())))
        })
    }

    fn try_look(
        &mut self,
        cluster: &[u8],
        request: &Request<'_>,
        held: &Held<H>,
        look: Look,
    ) -> Result<Option<Verdict<H>>, HostError> {
        let Some((_, admission)) = self.admitting(cluster) else { return Ok(None) };
        for _ in 0..MANY_TRIES {
            let Some((pool, _)) = self.admitting(cluster) else { return Ok(None) };
            let terms = pool.terms(self.now_ms);
            let mut set = pool.working_set.open(&self.host)?;
            terms.tidy(&mut set);
            set.leave(held.waiting.id);
            if look == Look::Overdue && admission.overflow == Overflow::Reject {
                held.leave();
                return self.overflows(cluster, request, &held.waiting);
            }
            let mut waiting = held.waiting;
            let Some(place) = self.enters(pool, &terms, &mut set, request, &mut waiting, look)? else { return Ok(None) };
            if pool.working_set.store(&self.host, &set)? {
                held.has_left.set(true);
                let event = if look == Look::Overdue { AdmissionEvent::Overdue } else { AdmissionEvent::Admitted };
                let counted = pool
                    .working_set
                    .set_held(&self.host, set.waiting.len())
                    .and_then(|()| pool.count_admission(&self.host, event))
                    .and_then(|()| pool.count_wait(&self.host, self.now_ms.saturating_sub(held.waiting.since_ms)));
                // With its ticket the place is given back, whatever the counts have come to.
                let verdict = self.admitted(cluster, request, &place)?;
                return counted.map(|()| Some(verdict));
            }
        }
        Ok(None)
    }

    fn admitting(&self, cluster: &[u8]) -> Option<(&Pool, Admission)> {
        let pool = self.pools.get(cluster)?;
        Some((pool, pool.policy.admission?))
    }

    /// What the request is as one in line.
    fn waiting(&self, pool: &Pool, request: &Request<'_>) -> Result<Waiting, HostError> {
        let home = request.conversation.map_or(Ok(None), |named| self.home_of(named.digest, super::seconds(self.now_ms)))?;
        let home = home.filter(|home| pool.member(*home).is_some_and(|home| pool.is_ready(home)));
        let number = self.next_held.get().wrapping_add(1);
        self.next_held.set(number);
        // Unlike any other of this Envoy: threads differ in their lanes, and one thread's requests of a moment in their numbers.
        let id = self.now_ms.wrapping_shl(24) ^ u64::from(self.lane_tag()).wrapping_shl(16) ^ (number & 0xFFFF);
        Ok(Waiting {
            id,
            digest: request.conversation.map_or(id, |named| named.digest.0 as u64),
            home,
            since_ms: self.now_ms,
            seen_ms: self.now_ms,
            order_ms: pool.terms(self.now_ms).order_ms(self.now_ms, home.is_some()),
            reason: Reason::NoRoom,
            tokens: pool.texts.tokens(request.bytes).saturating_add(GROWTH_TOKENS),
        })
    }

    /// Gives the request a place in the working set, if it may have one: where its conversation has one already, at home, or where a new
    /// conversation goes of the replicas that it fits. A place that it has lost is taken out.
    fn enters(
        &self,
        pool: &Pool,
        terms: &Terms<'_>,
        set: &mut WorkingSet,
        request: &Request<'_>,
        waiting: &mut Waiting,
        look: Look,
    ) -> Result<Option<Place>, HostError> {
        let turns_granted = pool.policy.admission.map_or(0, |admission| admission.turns);
        let known = set.place(waiting.digest).copied();
        let active = known.filter(|place| terms.is_active(place) && terms.rooms.room(place.replica).is_some());
        let lost =
            active.filter(|_| look != Look::Overdue).and_then(|place| lost(terms, set, turns_granted, &place, waiting.tokens));
        if known.is_some() {
            set.places.retain(|place| place.digest != waiting.digest);
        }
        let tokens = waiting.tokens;
        if let Some(place) = active.filter(|_| lost.is_none()) {
            // It keeps a place, but where it goes is decided as without admission, and its place goes along if it fits there.
            let replica = if waiting.home == Some(place.replica) {
                place.replica
            } else {
                let usage = Usage::of(terms, set);
                let fits = |replica: ReplicaId| usage.fits(replica, tokens);
                self.at_home_or_best(pool, request, waiting, fits)?.unwrap_or(place.replica)
            };
            let turns = if turns_granted > 0 && place.turns >= turns_granted { 0 } else { place.turns };
            let again = Place {
                replica,
                last_ms: self.now_ms,
                tokens,
                in_flight: place.in_flight.saturating_add(1),
                turns: turns.saturating_add(1),
                lane: self.lane_tag(),
                ..place
            };
            set.places.push(again);
            return Ok(Some(again));
        }
        if lost == Some(Reason::TurnsUsed) {
            // It waits with the new ones.
            waiting.order_ms = terms.order_ms(waiting.since_ms, false);
        }
        let is_room = |replica: ReplicaId| terms.rooms.room(replica).is_some();
        let replica = if look == Look::Overdue {
            self.at_home_or_best(pool, request, waiting, is_room)?
        } else {
            let usage = terms.usage_before(set, waiting);
            // While nobody waits and there is room somewhere, a conversation that is quiet and may have ended sends no other away from where
            // it would go.
            let is_usual = set.waiting.is_empty() && usage.fits_somewhere(tokens);
            let usual = if is_usual { self.at_home_or_best(pool, request, waiting, is_room)? } else { None };
            match usual.filter(|usual| Usage::of_running(terms, set).fits(*usual, tokens)) {
                Some(usual) => Some(usual),
                None => self.at_home_or_best(pool, request, waiting, |replica| usage.fits(replica, tokens))?,
            }
        };
        let Some(replica) = replica else {
            let has_room = || Usage::of(terms, set).fits_somewhere(tokens);
            waiting.reason = lost.unwrap_or_else(|| if has_room() { Reason::BehindOthers } else { Reason::NoRoom });
            return Ok(None);
        };
        let place = Place { lane: self.lane_tag(), ..waiting.place(replica, self.now_ms) };
        set.places.push(place);
        Ok(Some(place))
    }

    /// The home, or else where a new conversation goes, of the replicas that are allowed.
    fn at_home_or_best(
        &self,
        pool: &Pool,
        request: &Request<'_>,
        waiting: &Waiting,
        allowed: impl Fn(ReplicaId) -> bool,
    ) -> Result<Option<ReplicaId>, HostError> {
        match waiting.home.filter(|home| allowed(*home)) {
            Some(home) => Ok(Some(home)),
            None => self.best_of(pool, self.parent_home(request, waiting)?, request, allowed),
        }
    }

    /// The home of the conversation that a new one began in.
    fn parent_home(&self, request: &Request<'_>, waiting: &Waiting) -> Result<Option<ReplicaId>, HostError> {
        let now_s = super::seconds(self.now_ms);
        match request.conversation {
            Some(conversation) if waiting.home.is_none() && self.home_of(conversation.digest, now_s)?.is_none() => {
                conversation.parent.map_or(Ok(None), |parent| self.home_of(parent, now_s))
            }
            _ => Ok(None),
        }
    }

    fn lane_tag(&self) -> u8 {
        self.lane.get().and_then(|lane| u8::try_from(lane.number.saturating_add(1)).ok()).unwrap_or(0)
    }

    /// Routes a request that has its place.
    fn admitted(&mut self, cluster: &[u8], request: &Request<'_>, place: &Place) -> Result<Verdict<H>, HostError> {
        let Some(pool) = self.pools.get(cluster) else {
            return Ok(Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new())));
        };
        // From here on the place is given back whatever happens.
        let Place { digest, since_ms, replica, .. } = *place;
        let turn = Turn { host: self.host.clone(), set: Rc::clone(&pool.working_set), digest, since_ms };
        let taken = match request.conversation {
            Some(conversation) => self.turn(cluster, conversation, request, Some(replica))?,
            None => self.place_at(cluster, replica, Outcome::Unkeyed, request)?,
        };
        let (Some(taken), Some(pool)) = (taken, self.pools.get(cluster)) else {
            return Ok(Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new())));
        };
        let alternates = self.alternates(pool, taken.home, request.ignores_rank)?;
        let mut ticket = self.ticket(cluster, request, taken.outcome, Some(taken), alternates);
        ticket.turn = Some(turn);
        Ok(Verdict::Go(ticket))
    }

    /// Sends a request as without admission, with a place all the same: those that come after must know of it.
    fn forced(&mut self, cluster: &[u8], request: &Request<'_>, waiting: &Waiting) -> Result<Option<Verdict<H>>, HostError> {
        if self.admitting(cluster).is_none() {
            return Ok(None);
        }
        for _ in 0..TRIES {
            let Some((pool, _)) = self.admitting(cluster) else { return Ok(None) };
            let terms = pool.terms(self.now_ms);
            let mut set = pool.working_set.open(&self.host)?;
            let mut waiting = *waiting;
            let Some(place) = self.enters(pool, &terms, &mut set, request, &mut waiting, Look::Overdue)? else { break };
            if pool.working_set.store(&self.host, &set)? {
                return self.admitted(cluster, request, &place).map(Some);
            }
        }
        Ok(None)
    }

    /// What becomes of a request beyond the bounds of holding.
    fn overflows(&mut self, cluster: &[u8], request: &Request<'_>, waiting: &Waiting) -> Result<Option<Verdict<H>>, HostError> {
        let Some((pool, admission)) = self.admitting(cluster) else { return Ok(None) };
        match admission.overflow {
            Overflow::Reject => {
                pool.count_admission(&self.host, AdmissionEvent::Rejected)?;
                let after_s = u32::try_from(admission.max_wait_ms / 4_000).unwrap_or(u32::MAX).clamp(1, 30);
                Ok(Some(Verdict::Busy { after_s }))
            }
            Overflow::Send => {
                pool.count_admission(&self.host, AdmissionEvent::Overdue)?;
                self.forced(cluster, request, waiting)
            }
        }
    }

    /// Counts a pool's requests in line without those of dead threads.
    pub(crate) fn count_held(&self, pool: &Pool) -> Result<(), HostError> {
        if pool.policy.admission.is_none() {
            return Ok(());
        }
        let mut set = pool.working_set.open(&self.host)?;
        pool.terms(self.host.now_ms()).tidy(&mut set);
        pool.working_set.set_held(&self.host, set.waiting.len())
    }

    /// Gives back the places of a thread that died.
    pub(super) fn settle_places(&self, dead: usize) {
        let tag = u8::try_from(dead.saturating_add(1)).unwrap_or(0);
        let now_ms = self.host.now_ms();
        for pool in self.pools.values().filter(|pool| pool.policy.admission.is_some()) {
            pool.working_set.change(&self.host, |set| {
                let mut any = false;
                for place in set.places.iter_mut().filter(|place| place.lane == tag && place.in_flight > 0) {
                    (place.in_flight, place.last_ms) = (0, now_ms);
                    any = true;
                }
                any
            });
        }
    }
}

/// Why a conversation loses the place it has, if it does.
fn lost(terms: &Terms<'_>, set: &WorkingSet, turns_granted: u16, place: &Place, tokens: u32) -> Option<Reason> {
    if place.in_flight > 0 {
        return None;
    }
    let is_due = turns_granted > 0 && place.turns >= turns_granted;
    if is_due && terms.is_wanted(set, place) {
        return Some(Reason::TurnsUsed);
    }
    terms.yields(set, place, tokens).then_some(Reason::Outgrown)
}

// === impl Held ===

impl<H: Host> Held<H> {
    /// Names it among those in line.
    pub fn id(&self) -> u64 {
        self.waiting.id
    }

    /// Since when it is held, in milliseconds since 1970.
    pub fn since_ms(&self) -> u64 {
        self.waiting.since_ms
    }

    fn leave(&self) {
        if self.has_left.replace(true) {
            return;
        }
        let in_line = Cell::new(0);
        self.set.change(&self.host, |set| {
            let left = set.leave(self.waiting.id);
            in_line.set(set.waiting.len());
            left
        });
        // A count that is refused here is set again by the next walk.
        let _ = self.set.set_held(&self.host, in_line.get());
    }
}

impl<H: Host> Drop for Held<H> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl<H: Host> Drop for Turn<H> {
    fn drop(&mut self) {
        let now_ms = self.host.now_ms();
        self.set.change(&self.host, |set| {
            let Some(place) = set.place(self.digest).filter(|place| place.since_ms == self.since_ms) else { return false };
            place.in_flight = place.in_flight.saturating_sub(1);
            place.last_ms = now_ms;
            set.places.retain(|place| place.digest != self.digest || place.is_conversation || place.in_flight > 0);
            true
        });
    }
}
