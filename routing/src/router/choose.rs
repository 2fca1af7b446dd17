//! Choosing a replica: staying, spilling, placing, and where a retry goes.

use std::rc::Rc;

use super::ticket::Taken;
use super::{Request, Router};
use crate::host::{Host, HostError, TRIES};
use crate::ledger::Ledger;
use crate::outcome::Outcome;
use crate::pool::{Member, Pool, Replica};
use crate::replica::ReplicaId;
use crate::sweep::context_kib;

/// Addresses a retry may go to, behind the chosen one.
const ALTERNATES: usize = 2;

/// Replicas looked at to find the alternates.
const ALTERNATES_SAMPLED: usize = 4;

/// Steps in which KV usage breaks ties: finer differences are noise of the moment.
const KV_STEPS: f32 = 16.0;

/// The finaliser of SplitMix64: every bit of the number changes half of the result's.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

impl<H: Host> Router<H> {
    /// A turn of a conversation whose home is ready.
    pub(super) fn turn_at_home(
        &self,
        pool: &Pool,
        home: &Member,
        second: Option<ReplicaId>,
        request: &Request<'_>,
    ) -> Result<Taken<H>, HostError> {
        let load = self.load(pool, home)?;
        let full = load > pool.policy.threshold(&home.figures);
        let elsewhere = if full { self.elsewhere(pool, home, load, second)? } else { None };
        let (member, outcome) = elsewhere.map_or((home, Outcome::Sticky), |member| (member, Outcome::Spilled));
        self.take(pool, member, outcome, request)
    }

    /// Where a turn goes whose home is full: the replica of the lowest load that is not full itself and lower by the margin.
    /// The conversation's second home, which has part of it cached, is taken before a replica that is no better by the margin.
    fn elsewhere<'p>(
        &self,
        pool: &'p Pool,
        home: &Member,
        home_load: u32,
        second: Option<ReplicaId>,
    ) -> Result<Option<&'p Member>, HostError> {
        let margin = pool.policy.margin(&home.figures);
        let mut best: Option<(u32, &Member)> = None;
        for member in pool.members.iter().filter(|member| pool.is_ready(member) && member.replica.id != home.replica.id) {
            let load = self.load(pool, member)?;
            let pays = load <= pool.policy.threshold(&member.figures) && load.saturating_add(margin) <= home_load;
            let cost = if Some(member.replica.id) == second { load.saturating_sub(margin) } else { load };
            if pays && best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, member));
            }
        }
        Ok(best.map(|(_, member)| member))
    }

    /// The least loaded replica; ties go to the one that holds the least context, then the least KV cache in use, then the one
    /// chosen the longest ago. A replica that is `preferred` is taken if its load is higher by at most the margin. `None` if no
    /// replica is ready.
    pub(super) fn place(
        &self,
        pool: &Pool,
        outcome: Outcome,
        preferred: Option<ReplicaId>,
        request: &Request<'_>,
    ) -> Result<Option<Taken<H>>, HostError> {
        let pair = self.pair(pool, request, |_| true);
        let mut last = None;
        for _ in 0..TRIES {
            // A try that lost the race gives back what it had reserved.
            drop(last.take());
            let mut ledger = pool.open_ledger(&self.host)?;
            let allowed = |replica| pair.is_none_or(|pair| pair.contains(&replica)) || Some(replica) == preferred;
            let Some((index, member)) = self.best(pool, &ledger, preferred, allowed)? else { return Ok(None) };
            // Reserved before the ledger is swapped: a thread that finds the ledger changed finds this in flight too.
            let taken = self.take(pool, member, outcome, request)?;
            ledger.choose(index, (outcome != Outcome::Unkeyed).then(|| context_kib(request.bytes)));
            if ledger.store(&self.host, &pool.ledger_key)? {
                return Ok(Some(taken));
            }
            last = Some(taken);
        }
        Ok(last)
    }

    /// The two replicas, of those that are allowed, one of which a conversation goes to where other Envoys place too; `None` where nobody
    /// else does, or where there are not more than two.
    ///
    /// What the others place is seen half a second later. If all took the least loaded replica, all would take the same one until
    /// then; the better of two that the conversation's digest draws spreads them (Mitzenmacher, "How useful is old information?",
    /// 2000). And two Envoys that see the same new conversation at the same moment mostly choose the same.
    fn pair(&self, pool: &Pool, request: &Request<'_>, allowed: impl Fn(ReplicaId) -> bool) -> Option<[ReplicaId; 2]> {
        if !pool.has_peers {
            return None;
        }
        let seed = request.conversation.map_or(self.now_ms, |conversation| conversation.digest.0 as u64);
        let fits = |m: &&Member| pool.is_ready(m) && m.penalty(self.now_ms) == 0 && allowed(m.replica.id);
        let drawn = pool.members.iter().filter(fits).map(|m| (mixed(seed ^ m.replica.id.0), m.replica.id));
        // The two that draw least, in one pass: placing is work for every replica already.
        let (mut least, mut count) = ([(u64::MAX, ReplicaId(0)); 2], 0_usize);
        for draw in drawn {
            let [first, second] = least;
            if draw < first {
                least = [draw, first];
            } else if draw < second {
                least = [first, draw];
            }
            count = count.saturating_add(1);
        }
        (count > 2).then(|| least.map(|(_, replica)| replica))
    }

    /// The replica a new conversation goes to, of those that are allowed.
    fn best<'p>(
        &self,
        pool: &'p Pool,
        ledger: &Ledger,
        preferred: Option<ReplicaId>,
        allowed: impl Fn(ReplicaId) -> bool,
    ) -> Result<Option<(usize, &'p Member)>, HostError> {
        let mut best = None;
        let ready = |member: &Member| pool.is_ready(member) && allowed(member.replica.id);
        for (index, member) in pool.members.iter().enumerate().filter(|(_, member)| ready(member)) {
            let Some(line) = ledger.line(index) else { continue };
            let mut load = self.load(pool, member)?;
            if Some(member.replica.id) == preferred {
                load = load.saturating_sub(pool.policy.margin(&member.figures));
            }
            let kv_usage = (member.figures.kv_usage * KV_STEPS) as u32;
            let rank = (load, Some(member.replica.id) != preferred, line.context_kib, kv_usage, line.last_chosen);
            if best.as_ref().is_none_or(|(least, _, _)| rank < *least) {
                best = Some((rank, index, member));
            }
        }
        Ok(best.map(|(_, index, member)| (index, member)))
    }

    /// The replica a new conversation goes to, of those that are allowed, without taking it.
    pub(super) fn best_of(
        &self,
        pool: &Pool,
        preferred: Option<ReplicaId>,
        request: &Request<'_>,
        allowed: impl Fn(ReplicaId) -> bool,
    ) -> Result<Option<ReplicaId>, HostError> {
        let ledger = pool.open_ledger(&self.host)?;
        let preferred = preferred.filter(|preferred| allowed(*preferred));
        let pair = self.pair(pool, request, &allowed);
        let allowed = |id| allowed(id) && (pair.is_none_or(|pair| pair.contains(&id)) || Some(id) == preferred);
        Ok(self.best(pool, &ledger, preferred, allowed)?.map(|(_, member)| member.replica.id))
    }

    /// Takes a replica that was chosen already, and writes it into the ledger.
    pub(super) fn place_at(
        &self,
        cluster: &[u8],
        replica: ReplicaId,
        outcome: Outcome,
        request: &Request<'_>,
    ) -> Result<Option<Taken<H>>, HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        let (Some(index), Some(member)) = (pool.index_of(replica), pool.member(replica)) else { return Ok(None) };
        let taken = self.take(pool, member, outcome, request)?;
        for _ in 0..TRIES {
            let mut ledger = pool.open_ledger(&self.host)?;
            ledger.choose(index, (outcome != Outcome::Unkeyed).then(|| context_kib(request.bytes)));
            if ledger.store(&self.host, &pool.ledger_key)? {
                break;
            }
        }
        Ok(Some(taken))
    }

    /// The least loaded ready replica of a rank; the conversation's home before others of the same load. `None` if there is none.
    pub(super) fn place_at_rank(
        &self,
        pool: &Pool,
        rank: u16,
        home: Option<ReplicaId>,
        request: &Request<'_>,
    ) -> Result<Option<Taken<H>>, HostError> {
        let mut best = None;
        for member in pool.members.iter().filter(|member| pool.is_ready(member) && member.replica.name.rank == Some(rank)) {
            let cost = (self.load(pool, member)?, Some(member.replica.id) != home);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, member));
            }
        }
        best.map(|(_, member)| self.take(pool, member, Outcome::Pinned, request)).transpose()
    }

    pub(super) fn take(
        &self,
        pool: &Pool,
        member: &Member,
        outcome: Outcome,
        request: &Request<'_>,
    ) -> Result<Taken<H>, HostError> {
        let replica = member.counted_at(request.ignores_rank);
        let in_flight = self.reserve(pool, replica)?;
        Ok(Taken { home: member.replica.id, replica: Rc::clone(replica), in_flight, outcome, read: 0 })
    }

    fn load(&self, pool: &Pool, member: &Member) -> Result<u32, HostError> {
        let load = pool.load(&self.host, member, self.now_ms, self.settings.snapshot_max_age_ms)?;
        Ok(load.saturating_add(member.penalty(self.now_ms)))
    }

    /// Where a retry may go: the least loaded of a few ready replicas at other addresses. A rank is sent once for every attempt,
    /// so only replicas of the same rank will do, unless none is sent.
    pub(super) fn alternates(&self, pool: &Pool, chosen: ReplicaId, ignores_rank: bool) -> Result<Vec<Rc<Replica>>, HostError> {
        let Some(at) = pool.index_of(chosen) else { return Ok(Vec::new()) };
        let Some(chosen) = pool.members.get(at).map(|member| member.replica.name) else { return Ok(Vec::new()) };
        // Starts behind the chosen one, so that the retries of one replica's failure spread.
        let others = pool.members.iter().cycle().skip(at.saturating_add(1)).take(pool.members.len());
        let fits = |member: &&Member| {
            let name = member.replica.name;
            pool.is_ready(member) && name.address != chosen.address && (name.rank == chosen.rank || ignores_rank)
        };
        let mut ranked: Vec<(u32, &Member)> = Vec::with_capacity(ALTERNATES_SAMPLED);
        for member in others.filter(fits) {
            if ranked.len() == ALTERNATES_SAMPLED {
                break;
            }
            if ranked.iter().all(|(_, other)| other.replica.name.address != member.replica.name.address) {
                ranked.push((self.load(pool, member)?, member));
            }
        }
        ranked.sort_by_key(|(load, _)| *load);
        Ok(ranked.into_iter().take(ALTERNATES).map(|(_, member)| Rc::clone(&member.replica)).collect())
    }
}
