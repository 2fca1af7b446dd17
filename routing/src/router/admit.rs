//! Admission: a turn is decided when its conversation has a place, and waits in line until then.

use core::cell::Cell;
use std::rc::Rc;

use hashbrown::HashMap;

use super::{Request, Router, TRIES, Verdict};
use crate::admission::{Admission, GROWTH_TOKENS, Overflow, Place, Room, SMALL_TOKENS, Terms, Waiting, WorkingSet};
use crate::host::{Host, HostError, MetricId};
use crate::metric::{AdmissionEvent, ErrorKind};
use crate::outcome::Outcome;
use crate::pool::Pool;
use crate::replica::ReplicaId;

/// How often a value is tried that must be written: a place that is not given back is lost until its lease ends.
const MANY_TRIES: usize = 32;

/// A request in line. Dropping it takes it out.
#[derive(Debug)]
pub struct Held<H: Host> {
    host: H,
    key: Rc<str>,
    /// The gauge of the pool's requests in line.
    gauge: MetricId,
    waiting: Waiting,
    /// Whether it has left the line already.
    has_left: Cell<bool>,
}

/// A turn's place, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<H: Host> {
    host: H,
    key: Rc<str>,
    digest: u64,
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
        for _ in 0..MANY_TRIES {
            let Some((pool, _)) = self.admitting(cluster) else { return Ok(None) };
            let terms = pool.terms(self.now_ms);
            let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
            terms.tidy(&mut set);
            if let Some(replica) = self.enters(pool, &terms, &mut set, &admission, &mut waiting, Look::IsCalled)? {
                if set.store(&self.host, &pool.working_set_key)? {
                    return self.admitted(cluster, request, &waiting, replica).map(Some);
                }
                continue;
            }
            if set.waiting.len() >= admission.max_held as usize {
                return self.overflows(cluster, request, &waiting);
            }
            set.waiting.push(waiting);
            if set.store(&self.host, &pool.working_set_key)? {
                self.host.set(pool.held_requests, set.waiting.len() as u64)?;
                pool.count_admission(&self.host, AdmissionEvent::Held)?;
                let (host, key, gauge) = (self.host.clone(), Rc::clone(&pool.working_set_key), pool.held_requests);
                return Ok(Some(Verdict::Hold(Held { host, key, gauge, waiting, has_left: Cell::new(false) })));
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
        let terms = pool.terms(self.now_ms);
        let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
        terms.tidy(&mut set);
        Ok(terms.called(&set))
    }

    /// Says that this thread's requests in line still wait. Call it every second.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn still_waiting<'a>(&mut self, held: impl Iterator<Item = &'a Held<H>>) -> Result<(), HostError>
    where
        H: 'a,
    {
        let mut by_pool: HashMap<&str, Vec<&Waiting>> = HashMap::new();
        for held in held {
            by_pool.entry(&held.key).or_default().push(&held.waiting);
        }
        let seen_ms = self.host.now_ms();
        for (key, held) in by_pool {
            for _ in 0..MANY_TRIES {
                let mut set = WorkingSet::open(&self.host, key)?;
                for own in &held {
                    match set.waiting.iter_mut().find(|waiting| waiting.id == own.id) {
                        Some(waiting) => waiting.seen_ms = seen_ms,
                        // It was taken for a dead thread's: it goes back to where it was.
                        None => set.waiting.push(Waiting { seen_ms, ..**own }),
                    }
                }
                if set.store(&self.host, key)? {
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
        let decided = self.look(cluster, request, held, Look::Overdue);
        decided.unwrap_or_else(|| Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new())))
    }

    fn look(&mut self, cluster: &[u8], request: &Request<'_>, held: &Held<H>, look: Look) -> Option<Verdict<H>> {
        let decided = self.refresh(cluster).and_then(|()| self.try_look(cluster, request, held, look));
        decided.unwrap_or_else(|_| {
            self.count_error(ErrorKind::Host, 1);
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
            let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
            terms.tidy(&mut set);
            set.leave(held.waiting.id);
            if look == Look::Overdue && admission.overflow == Overflow::Reject {
                held.leave();
                return self.overflows(cluster, request, &held.waiting);
            }
            let mut waiting = held.waiting;
            let Some(replica) = self.enters(pool, &terms, &mut set, &admission, &mut waiting, look)? else { return Ok(None) };
            if set.store(&self.host, &pool.working_set_key)? {
                held.has_left.set(true);
                self.host.set(pool.held_requests, set.waiting.len() as u64)?;
                let event = if look == Look::Overdue { AdmissionEvent::Overdue } else { AdmissionEvent::Admitted };
                pool.count_admission(&self.host, event)?;
                pool.count_wait(&self.host, self.now_ms.saturating_sub(held.waiting.since_ms))?;
                return self.admitted(cluster, request, &held.waiting, replica).map(Some);
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
        // Unlike any other of this Envoy: threads differ in their lanes, and one thread's requests in their numbers.
        let lane = self.lane.get().map_or(0, |lane| lane.number as u64);
        let id = self.now_ms.wrapping_shl(24) ^ lane.wrapping_shl(16) ^ number;
        Ok(Waiting {
            id,
            digest: request.conversation.map_or(id, |named| named.digest.0 as u64),
            home,
            returns: home.is_some(),
            since_ms: self.now_ms,
            seen_ms: self.now_ms,
            tokens: pool.texts.tokens(request.bytes).saturating_add(GROWTH_TOKENS),
        })
    }

    /// Gives the request a place in the working set, if it may have one: where its conversation has one already, at home, or where a new
    /// conversation goes of the replicas that it fits.
    fn enters(
        &self,
        pool: &Pool,
        terms: &Terms<'_>,
        set: &mut WorkingSet,
        admission: &Admission,
        waiting: &mut Waiting,
        look: Look,
    ) -> Result<Option<ReplicaId>, HostError> {
        let ready = |replica: ReplicaId| terms.rooms.iter().any(|room| room.replica == replica);
        let known = set.place(waiting.digest).copied();
        if let Some(place) = known.filter(|place| place.in_flight == 0)
            && let Ok(mut think) = pool.think.try_borrow_mut()
        {
            think.heard(self.now_ms.saturating_sub(place.last_ms));
        }
        let active = known.filter(|place| terms.is_active(place) && ready(place.replica));
        let keeps = active.filter(|place| {
            let is_due = admission.turns > 0 && place.turns >= admission.turns && place.in_flight == 0;
            if is_due && terms.is_wanted(set, waiting.digest) {
                // It has had its turns: it waits with the new ones.
                waiting.returns = false;
                return look == Look::Overdue;
            }
            look == Look::Overdue || place.in_flight > 0 || !terms.yields(set, place, waiting.tokens)
        });
        if keeps.is_none() {
            // A place that is due, or was left, is no hindrance.
            set.places.retain(|place| place.digest != waiting.digest);
        }
        if let Some(place) = keeps {
            let turns = if admission.turns > 0 && place.turns >= admission.turns { 0 } else { place.turns };
            let again = Place {
                last_ms: self.now_ms,
                tokens: waiting.tokens,
                in_flight: place.in_flight.saturating_add(1),
                turns: turns.saturating_add(1),
                lane: self.lane_tag(),
                ..place
            };
            set.places.retain(|place| place.digest != waiting.digest);
            set.places.push(again);
            return Ok(Some(place.replica));
        }
        if look == Look::IsCalled && !terms.may_pass(set, waiting) {
            return Ok(None);
        }
        let fits = |room: &Room| look == Look::Overdue || terms.left(set, room, waiting.tokens).is_some();
        let at_home = waiting.home.filter(|home| terms.rooms.iter().any(|room| room.replica == *home && fits(room)));
        let replica = match at_home {
            Some(home) => Some(home),
            None => self.best_of(pool, |replica| terms.rooms.iter().any(|room| room.replica == replica && fits(room)))?,
        };
        let Some(replica) = replica else { return Ok(None) };
        let place = waiting.place(replica, self.now_ms);
        set.places.push(Place { lane: self.lane_tag(), is_conversation: waiting.digest != waiting.id, ..place });
        Ok(Some(replica))
    }

    fn lane_tag(&self) -> u8 {
        self.lane.get().and_then(|lane| u8::try_from(lane.number.saturating_add(1)).ok()).unwrap_or(0)
    }

    /// Routes a request that has its place.
    fn admitted(
        &mut self,
        cluster: &[u8],
        request: &Request<'_>,
        waiting: &Waiting,
        replica: ReplicaId,
    ) -> Result<Verdict<H>, HostError> {
        let key = self.pools.get(cluster).map_or_else(|| Rc::from(""), |pool| Rc::clone(&pool.working_set_key));
        // From here on the place is given back whatever happens.
        let turn = Turn { host: self.host.clone(), key, digest: waiting.digest };
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
        let Some((_, admission)) = self.admitting(cluster) else { return Ok(None) };
        for _ in 0..TRIES {
            let Some((pool, _)) = self.admitting(cluster) else { return Ok(None) };
            let terms = pool.terms(self.now_ms);
            let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
            let mut waiting = *waiting;
            let Some(replica) = self.enters(pool, &terms, &mut set, &admission, &mut waiting, Look::Overdue)? else { break };
            if set.store(&self.host, &pool.working_set_key)? {
                return self.admitted(cluster, request, &waiting, replica).map(Some);
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
        let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
        pool.terms(self.host.now_ms()).tidy(&mut set);
        self.host.set(pool.held_requests, set.waiting.len() as u64)
    }

    /// Gives back the places of a thread that died.
    pub(super) fn settle_places(&self, dead: usize) -> Result<(), HostError> {
        let tag = u8::try_from(dead.saturating_add(1)).unwrap_or(0);
        let now_ms = self.host.now_ms();
        for pool in self.pools.values().filter(|pool| pool.policy.admission.is_some()) {
            for _ in 0..MANY_TRIES {
                let mut set = WorkingSet::open(&self.host, &pool.working_set_key)?;
                let lost = |place: &&mut Place| place.lane == tag && place.in_flight > 0;
                let mut any = false;
                for place in set.places.iter_mut().filter(lost) {
                    (place.in_flight, place.last_ms) = (0, now_ms);
                    any = true;
                }
                if !any || set.store(&self.host, &pool.working_set_key)? {
                    break;
                }
            }
        }
        Ok(())
    }
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
        change(&self.host, &self.key, |set| {
            let left = set.leave(self.waiting.id);
            in_line.set(set.waiting.len() as u64);
            left
        });
        // A count that is refused here is set again by the next walk.
        let _ = self.host.set(self.gauge, in_line.get());
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
        change(&self.host, &self.key, |set| {
            let Some(place) = set.place(self.digest) else { return false };
            place.in_flight = place.in_flight.saturating_sub(1);
            place.last_ms = now_ms;
            set.places.retain(|place| place.digest != self.digest || place.is_conversation || place.in_flight > 0);
            true
        });
    }
}

/// Changes a working set, unless `with` says that there is nothing to change. What the host refuses is lost: a lease ends it.
fn change<H: Host>(host: &H, key: &str, with: impl Fn(&mut WorkingSet) -> bool) {
    for _ in 0..MANY_TRIES {
        let Ok(mut set) = WorkingSet::open(host, key) else { return };
        if !with(&mut set) || set.store(host, key) != Ok(false) {
            return;
        }
    }
}
