//! A decided request and what it holds until its stream ends.

use std::rc::Rc;

use super::admit::Turn;
use crate::host::{Host, HostError};
use crate::identity::Digest;
use crate::outcome::Outcome;
use crate::pool::Replica;
use crate::replica::ReplicaId;

/// Attempts that are given an address, as many as the shipped configurations make.
const ATTEMPTS: usize = 3;

/// A decided request, until its stream ends. Dropping it gives its in-flight back.
#[derive(Debug)]
pub struct Ticket<H: Host> {
    pub(super) cluster: Rc<str>,
    pub(super) planned: Outcome,
    pub(super) conversation: Option<Digest>,
    pub(super) bytes: u32,
    /// Of these, what the chosen replica had read with the conversation's turn before.
    pub(super) repeated: u32,
    pub(super) generates: bool,
    pub(super) ignores_rank: bool,
    pub(super) chosen: Option<Rc<Replica>>,
    pub(super) alternates: Vec<Rc<Replica>>,
    pub(super) in_flight: Option<InFlight<H>>,
    /// Its place in the working set, where the pool admits by places.
    pub(super) turn: Option<Turn<H>>,
    pub(super) served: Option<Served>,
}

/// Where a request was served and how it came there.
#[derive(Clone, Debug)]
pub struct Served {
    /// How it came there.
    pub outcome: Outcome,
    /// The replica, if the snapshot names it.
    pub replica: Option<Rc<Replica>>,
    /// Whether it went elsewhere than chosen.
    pub moved: bool,
    /// Whether the engine has read it.
    pub(super) is_read: bool,
}

impl<H: Host> Ticket<H> {
    /// The chosen replica.
    pub fn chosen(&self) -> Option<&Replica> {
        self.chosen.as_deref()
    }

    /// The address of each attempt, the chosen one first. Where there are fewer replicas than attempts they come again: an attempt
    /// beyond the list would go anywhere.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.chosen.iter().chain(&self.alternates).cycle().take(ATTEMPTS).map(|replica| replica.address.as_str())
    }

    /// Where it was served, once that is known.
    pub fn served(&self) -> Option<&Served> {
        self.served.as_ref()
    }

    /// The conversation, if one was named.
    pub fn conversation(&self) -> Option<Digest> {
        self.conversation
    }

    /// How it is to come to its replica, if it goes where it was sent.
    pub fn planned(&self) -> Outcome {
        self.planned
    }
}

/// One request in flight at a replica, given back when it is dropped.
#[derive(Debug)]
pub(super) struct InFlight<H: Host> {
    host: H,
    replica: Rc<Replica>,
}

impl<H: Host> InFlight<H> {
    /// Counts a request in the replica's total and in the lane of this thread.
    pub(super) fn reserve(host: &H, replica: &Rc<Replica>) -> Result<Self, HostError> {
        host.add(replica.in_flight, 1)?;
        let reserved = Self { host: host.clone(), replica: Rc::clone(replica) };
        replica.own.set(replica.own.get().saturating_add(1));
        if let Some(lane) = replica.lane.get() {
            host.add(lane, 1)?;
        }
        Ok(reserved)
    }
}

impl<H: Host> Drop for InFlight<H> {
    fn drop(&mut self) {
        self.replica.own.set(self.replica.own.get().saturating_sub(1));
        // The gauges were there when this was made and Envoy forgets none, so neither can be refused.
        let _ = self.host.add(self.replica.in_flight, -1);
        if let Some(lane) = self.replica.lane.get() {
            let _ = self.host.add(lane, -1);
        }
    }
}

/// A replica taken for a request.
pub(super) struct Taken<H: Host> {
    /// Where the conversation is then at home.
    pub(super) home: ReplicaId,
    /// Where the request counts: the replica, or its endpoint.
    pub(super) replica: Rc<Replica>,
    pub(super) in_flight: InFlight<H>,
    pub(super) outcome: Outcome,
    /// Bytes of the conversation that the replica has read.
    pub(super) read: u32,
}
