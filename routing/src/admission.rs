//! Working-set admission: as many conversations at once as the caches hold.
//!
//! With more conversations than fit a replica's KV cache, the engine evicts each prefix just before its next turn, and every turn is read
//! again from the start. So a conversation gets a place at a replica for as long as it goes on, and new work is admitted only while the
//! contexts of those with a place fit the cache. What does not fit waits in line at the gateway.
//!
//! [`WorkingSet`] is what all threads share: who has a place, and who waits. [`Terms`] are the rules at one moment: who is active, and whose
//! turn it is. [`Usage`] is what of each cache is in use. [`Occupancy`] tells others of it.

mod occupancy;
mod terms;
mod think;
mod usage;
mod working_set;

pub use occupancy::{HeldRequest, Occupancy, ReplicaUse, occupancy};
pub(crate) use terms::{Room, Rooms, Terms};
pub(crate) use think::ThinkTimes;
pub(crate) use usage::Usage;
pub use working_set::{MAX_WAITING, Reason};
pub(crate) use working_set::{Place, SharedSet, Waiting, WorkingSet};

/// How a pool admits work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Requests held at once, at most.
    pub max_held: u32,
    /// Milliseconds a request is held, at most.
    pub max_wait_ms: u64,
    /// What becomes of a request beyond either.
    pub overflow: Overflow,
    /// Turns for which a conversation keeps its place while others wait; 0 is until it ends.
    pub turns: u16,
    /// Milliseconds for which a quiet conversation keeps its place, at least: so long that a client far away gets its next turn in.
    pub min_grace_ms: u64,
    /// The same, at most: the places of conversations that have ended without notice stand empty for as long.
    pub max_grace_ms: u64,
}

impl Default for Admission {
    fn default() -> Self {
        Self { max_held: 256, max_wait_ms: 120_000, overflow: Overflow::Send, turns: 0, min_grace_ms: 2_000, max_grace_ms: 20_000 }
    }
}

impl Admission {
    /// For how long a request in line lets others go before it that came later: returning ones before a new one, and those that fit before
    /// one that does not.
    pub(crate) fn patience_ms(&self) -> u64 {
        self.max_grace_ms / 2
    }
}

/// What becomes of a request that cannot be held, or has been held for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// It is sent as without admission.
    Send,
    /// It is answered with a 429.
    Reject,
}

/// What is known of a pool's texts, from its engines' counters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Texts {
    /// Bytes of a request's body that make one prompt token.
    pub bytes_per_token: f32,
    /// Tokens that all conversations begin with, cached once for all of them.
    pub shared_tokens: u32,
}

impl Default for Texts {
    /// About what English and code are with the tokenizers of today, and nothing shared.
    fn default() -> Self {
        Self { bytes_per_token: 4.0, shared_tokens: 0 }
    }
}

impl Texts {
    /// About how many tokens a request of this size has.
    pub fn tokens(&self, bytes: u32) -> u32 {
        // As a conversion of floats, this saturates.
        (bytes as f32 / self.bytes_per_token.max(0.25)) as u32
    }
}

/// Prompts of fewer tokens are not held and take no place: what they evict is not worth a wait.
pub(crate) const SMALL_TOKENS: u32 = 1_024;

/// Tokens that a context is given to grow: an answer, and what it adds.
pub(crate) const GROWTH_TOKENS: u32 = 512;
