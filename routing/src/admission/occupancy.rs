//! What others are told of a pool's working set: who waits, since when and why, and what is active where.

use hashbrown::HashMap;

use super::terms::{Room, Rooms, Terms};
use super::usage::Usage;
use super::working_set::{Reason, WorkingSet};
use crate::host::{Host, HostError};
use crate::pool::snapshot_key;
use crate::replica::{ReplicaId, ReplicaName};
use crate::snapshot::{Figures, Snapshot};
use crate::sync::{AdmissionAnswer, HeldCounts, ReplicaAnswer};

/// A pool's working set at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// The requests in line, in the order in which they go if all fit.
    pub held: Vec<HeldRequest>,
    /// The replicas of the newest snapshot.
    pub replicas: Vec<ReplicaUse>,
    /// Tokens that all conversations share, which count once at each replica with an active one.
    pub shared_tokens: u32,
}

/// A request in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRequest {
    /// Since when it waits, in milliseconds since 1970.
    pub since_ms: u64,
    /// Its context in tokens, with room to grow.
    pub tokens: u32,
    /// Why it was held when it came.
    pub reason: Reason,
}

/// What of one replica's cache active conversations need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaUse {
    /// The replica.
    pub replica: ReplicaId,
    /// Tokens of their contexts together, what all share counted once; each context counts at most as much as the cache holds.
    pub active_tokens: u64,
    /// Active conversations: a turn is in flight, or the next may still come.
    pub active_places: u32,
}

impl Occupancy {
    /// Since when the first in line waits, in milliseconds since 1970; `None` if nobody does.
    pub fn first_since_ms(&self) -> Option<u64> {
        self.held.iter().map(|held| held.since_ms).min()
    }

    /// As the exchange tells it at `now_ms`: the pool's part, and each replica's, which is put into its answer.
    pub(crate) fn tell(&self, now_ms: u64, replicas: &mut [ReplicaAnswer]) -> AdmissionAnswer {
        let uses: HashMap<ReplicaId, &ReplicaUse> = self.replicas.iter().map(|at| (at.replica, at)).collect();
        for answer in replicas {
            let at = uses.get(&answer.replica.id());
            answer.active_conversations = at.map(|at| at.active_places.into());
            answer.active_context_tokens = at.map(|at| at.active_tokens);
        }
        AdmissionAnswer {
            held: self.held.len() as u64,
            oldest_held_ms: self.first_since_ms().map(|since_ms| now_ms.saturating_sub(since_ms)),
            by_reason: self.held.iter().map(|held| held.reason).collect::<HeldCounts>(),
            shared_tokens: self.shared_tokens,
        }
    }
}

/// A pool's working set, as its routing threads last wrote it. Empty where no pool of this name admits by working set. It needs no router: the
/// control role can ask for it.
///
/// # Errors
/// When the host refuses.
pub fn occupancy(host: &impl Host, pool: &str) -> Result<Occupancy, HostError> {
    let Some(snapshot) = host.read(&snapshot_key(pool))?.and_then(|stored| Snapshot::decode(&stored.bytes)) else {
        return Ok(Occupancy::default());
    };
    let mut set = WorkingSet::of(host, pool)?;
    let room = |(name, figures): &(ReplicaName, Figures)| Room { replica: name.id(), cache_tokens: figures.cache_tokens };
    let rooms: Rooms = snapshot.replicas.iter().map(room).collect();
    let terms = Terms {
        now_ms: host.now_ms(),
        grace_ms: set.grace_ms,
        patience_ms: 0,
        shared_tokens: snapshot.texts.shared_tokens,
        rooms: &rooms,
    };
    terms.tidy(&mut set);
    let held = set.waiting.iter().map(|waiting| HeldRequest {
        since_ms: waiting.since_ms,
        tokens: waiting.tokens,
        reason: waiting.reason,
    });
    Ok(Occupancy {
        held: held.collect(),
        replicas: Usage::of(&terms, &set).by_replica().collect(),
        shared_tokens: terms.shared_tokens,
    })
}
