//! Learning from where a request really went, and counting it.

use std::rc::Rc;

use super::Router;
use super::ticket::{Served, Ticket};
use crate::host::{Host, HostError, TRIES};
use crate::metric::ErrorKind;
use crate::outcome::Outcome;
use crate::pool::{Member, Replica};
use crate::replica::{ReplicaId, ReplicaName};
use crate::table::Entry;

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The engine has read it.
    Served,
    /// It was refused, unread.
    Refused,
    /// The replica fails.
    Failed,
}

impl Answer {
    /// What a response's status says, given as its three digits. Of a request that the client pinned, only a gateway's status is the
    /// replica's failure: an engine may answer 500 to what the client made up, and clients must not choose whom that counts against.
    pub fn of(status: &[u8], planned: Outcome) -> Self {
        match status {
            b"502" | b"503" | b"504" => Self::Failed,
            [b'5', ..] if planned != Outcome::Pinned => Self::Failed,
            [b'4' | b'5', ..] => Self::Refused,
            _ => Self::Served,
        }
    }
}

impl<H: Host> Router<H> {
    /// Learns where a request is served: `address` answered it. Rebinds the conversation if a retry moved it.
    pub fn served(&mut self, ticket: &mut Ticket<H>, address: &str, answer: Answer) {
        let failed = answer == Answer::Failed;
        let moved = ticket.chosen.as_ref().is_some_and(|chosen| chosen.address != address);
        let stays = !moved && ticket.chosen.is_some();
        let found = if stays { None } else { self.find(ticket, address).or_else(|| self.newcomer(ticket, address)) };
        let (home, replica) =
            found.map_or((None, ticket.chosen.clone().filter(|_| stays)), |(home, replica)| (Some(home), Some(replica)));
        let outcome = match (&replica, ticket.planned) {
            (_, planned) if stays => planned,
            (None, _) | (_, Outcome::Pinned) => Outcome::Passed,
            (Some(_), Outcome::Sticky) => Outcome::Rehomed,
            (Some(_), planned) => planned,
        };
        if let Some(left) = ticket.chosen.as_ref().filter(|_| moved) {
            left.note(&self.host, true);
        }
        // What the client pinned says nothing good of a replica: one answer forgives every failure before it.
        if let Some(replica) = replica.as_ref().filter(|_| failed || ticket.planned != Outcome::Pinned) {
            replica.note(&self.host, failed);
        }
        let mut served = Served { outcome, replica, moved, is_read: answer == Answer::Served };
        if moved && served.replica.is_none() {
            ticket.in_flight = None;
        }
        if let Some(home) = home
            && self.moved(ticket, home, &mut served).is_err()
        {
            self.count_error(ErrorKind::Host, 1);
        }
        ticket.served = Some(served);
    }

    /// Learns that no replica answered and Envoy did in their place.
    pub fn not_served(&self, ticket: &Ticket<H>) {
        if let Some(chosen) = &ticket.chosen {
            chosen.note(&self.host, true);
        }
    }

    /// Moves what was reserved and remembered to the replica that really serves the request.
    fn moved(&mut self, ticket: &mut Ticket<H>, home: ReplicaId, served: &mut Served) -> Result<(), HostError> {
        if let (Some(pool), Some(replica)) = (self.pools.get(ticket.cluster.as_bytes()), &served.replica) {
            ticket.in_flight = Some(self.reserve(pool, replica)?);
        }
        let is_home = matches!(ticket.planned, Outcome::Sticky | Outcome::Placed | Outcome::Rehomed);
        if !ticket.generates {
            return Ok(());
        }
        let Some(digest) = ticket.conversation.filter(|_| is_home || ticket.planned == Outcome::Spilled) else { return Ok(()) };
        self.now_ms = self.host.now_ms();
        let Some(moment) = self.pools.get(ticket.cluster.as_bytes()).map(|pool| self.moment(pool)) else { return Ok(()) };
        for _ in 0..TRIES {
            let bucket = self.table.open(&self.host, digest)?;
            let Some(mut entry) = self.table.entry(&bucket, moment.now_s) else { return Ok(()) };
            // Also where a turn that spilled was to make its new home.
            let binds = is_home || ticket.chosen.as_ref().is_some_and(|chosen| chosen.id == entry.home);
            if binds {
                entry = Entry { home, home_bytes: ticket.bytes, bound_at_ms: moment.binds(Some(&entry)), ..entry };
            } else if entry.home == home {
                served.outcome = Outcome::Sticky;
                return Ok(());
            } else {
                entry = Entry { second: Some(home), second_bytes: ticket.bytes, ..entry };
            }
            if self.table.store(&self.host, bucket, &entry)? {
                return if binds { self.journal(ticket.cluster.as_bytes(), &entry) } else { Ok(()) };
            }
        }
        self.count_error(ErrorKind::Contended, 1);
        Ok(())
    }

    /// The replica at an address that a request may have been moved to, and where the request then counts.
    fn find(&self, ticket: &Ticket<H>, address: &str) -> Option<(ReplicaId, Rc<Replica>)> {
        let rank = ticket.chosen.as_ref().and_then(|chosen| chosen.name.rank);
        // Where Envoy chose, or the engine does, only the endpoint is known.
        let any_rank = ticket.ignores_rank || ticket.chosen.is_none();
        let pool = self.pools.get(ticket.cluster.as_bytes())?;
        let fits = |member: &&Member| member.replica.address == address && (any_rank || member.replica.name.rank == rank);
        let member = pool.members.iter().find(fits)?;
        Some((member.replica.id, Rc::clone(member.counted_at(any_rank))))
    }

    /// Whatever answers before the first snapshot is taken for a replica: the snapshot will name it, and what is in flight there then
    /// and has ended before is known.
    fn newcomer(&mut self, ticket: &Ticket<H>, address: &str) -> Option<(ReplicaId, Rc<Replica>)> {
        let name = ReplicaName::endpoint(address.parse().ok()?);
        let pool = self.pools.get_mut(ticket.cluster.as_bytes()).filter(|pool| pool.members.is_empty())?;
        let replica = pool.registry.replica(&self.host, &pool.policy.cluster, &name).ok()?;
        Some((replica.id, replica))
    }

    /// Counts a request whose stream has ended and gives its in-flight back.
    #[expect(clippy::needless_pass_by_value, reason = "an ended request is no more")]
    pub fn ended(&mut self, ticket: Ticket<H>) {
        let Some(pool) = self.pools.get(ticket.cluster.as_bytes()) else { return };
        let (requests, outcome) = match (&ticket.served, &ticket.chosen) {
            (Some(Served { replica: Some(replica), outcome, .. }), _) => (&replica.requests, *outcome),
            (Some(Served { replica: None, outcome, .. }), _) => (&pool.strangers, *outcome),
            (None, Some(chosen)) => (&chosen.requests, Outcome::Unserved),
            (None, None) => (&pool.unserved, Outcome::Unserved),
        };
        let counted = requests.count(&self.host, &pool.policy.cluster, outcome);
        // One that a retry moved found nothing there; engines do not count what they refuse to read.
        let read = ticket.served.as_ref().filter(|served| served.is_read);
        let repeated = read.map(|served| if served.moved { 0 } else { ticket.repeated });
        let prompt = repeated.filter(|_| ticket.generates).map(|repeated| pool.count_prompt(&self.host, ticket.bytes, repeated));
        if counted.and(prompt.unwrap_or(Ok(()))).is_err() {
            self.count_error(ErrorKind::Host, 1);
        }
    }

    /// Counts a request that ended before it was decided: refused, or cut off while its body was read.
    pub fn ended_undecided(&mut self, cluster: &[u8]) {
        let Some(pool) = self.pools.get(cluster) else { return };
        if pool.unserved.count(&self.host, &pool.policy.cluster, Outcome::Unserved).is_err() {
            self.count_error(ErrorKind::Host, 1);
        }
    }
}
