//! The exchange between the collector and an Envoy's control listener, as JSON.
//!
//! The collector opens it: `POST /homing/v1/sync` with a [`SyncRequest`] carries what every replica last reported; the
//! [`SyncAnswer`] carries back what this Envoy has in flight and has counted.

use serde::{Deserialize, Serialize};

use crate::admission::Reason;
use crate::binding::Bindings;
use crate::outcome::Outcome;
use crate::replica::ReplicaName;

/// The path of the exchange on the control listener.
pub const SYNC_PATH: &str = "/homing/v1/sync";

/// The path on the control listener that says whether this Envoy knows the conversations of the fleet.
pub const READY_PATH: &str = "/homing/v1/ready";

/// The version of this exchange. A side that sees another one refuses it.
pub const SYNC_VERSION: u32 = 2;

/// The most bindings that one request carries, and that one answer carries of the journal: 221,184 characters.
pub const MAX_BINDINGS: usize = 4_096;

/// The largest request body the control listener reads, in bytes.
pub const MAX_SYNC_BYTES: usize = 4 << 20;

/// The most replicas one pool may have.
pub const MAX_REPLICAS: usize = 1024;

/// What the collector sends: one snapshot a pool, and what other Envoys have told of conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyncRequest {
    /// [`SYNC_VERSION`].
    pub version: u32,
    /// When this collector started, in milliseconds since 1970. A later generation wins over an earlier one.
    pub generation: u64,
    /// Counts up within a generation; an older one never replaces a newer.
    pub sequence: u64,
    /// The fleet's clock, which is the collector's: milliseconds since 1970; 0 when it is not told.
    pub now_ms: u64,
    /// The longest time until this collector's next exchange, in milliseconds: another one is heard when this one is silent for
    /// longer.
    pub pause_ms: u64,
    /// One snapshot for each pool the collector polls; none in an exchange that only carries bindings.
    pub pools: Vec<PoolReport>,
    /// Homes that other Envoys told, at most [`MAX_BINDINGS`].
    #[serde(default, skip_serializing_if = "Bindings::is_empty")]
    pub bindings: Bindings,
    /// Set once the Envoy that began to count then ([`SyncAnswer::counting_since_ms`]) has been sent, with this request, every home the
    /// collector knew when it first saw it. One that has restarted since finds another time here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handed_over: Option<u64>,
    /// Up to where this collector has read the journal of this Envoy: [`SyncAnswer::journal`]; empty before the first answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub journal: Vec<u64>,
    /// Asks for every home in the affinity table, from this bucket on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<u32>,
}

/// The version of a request or an answer that cannot be read otherwise.
pub fn version_of(body: &[u8]) -> Option<u32> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    serde_json::from_slice(body).ok().map(|Versioned { version }| version)
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// What the collector last saw of one pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolReport {
    /// The Envoy cluster whose endpoints these replicas are.
    pub cluster: String,
    /// Bytes of a request's body that make one prompt token, as the engines' counters tell; absent when unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<f32>,
    /// Tokens that all conversations of the pool begin with; absent when unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_tokens: Option<u32>,
    /// Every replica of the pool, whether it answers or not; at most [`MAX_REPLICAS`].
    pub replicas: Vec<ReplicaReport>,
}

/// Whether a replica takes turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaState {
    /// It takes turns.
    #[default]
    Ready,
    /// It does not answer.
    Down,
    /// An operator drains it: what is in flight finishes, nothing new arrives.
    Draining,
    /// The engine sleeps; it would hold a request for ever.
    Asleep,
}

/// What one replica last reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaReport {
    /// The replica, as `ip:port` or `ip:port#rank`.
    pub replica: ReplicaName,
    /// Whether it takes turns.
    pub state: ReplicaState,
    /// Requests the engine runs.
    pub running: u32,
    /// Requests that wait inside the engine.
    pub waiting: u32,
    /// The share of the KV cache that running requests hold, 0 to 1.
    pub kv_usage: f32,
    /// The size of the KV cache in tokens; 0 when unknown.
    pub cache_tokens: u64,
    /// The most sequences the engine runs at once; 0 when unknown (no engine reports it, so it comes from the configuration).
    pub max_num_seqs: u32,
    /// The share of prompt tokens served from the cache over the last minute, 0 to 1; absent when no prompt was read.
    pub prefix_hit_rate: Option<f32>,
    /// Milliseconds since these figures were read; absent when none were.
    pub age_ms: Option<u64>,
    /// What the other Envoys have there.
    #[serde(default, skip_serializing_if = "is_default")]
    pub peers: Peers,
}

/// Requests of the other Envoys at one replica, by their last answers; those of an Envoy that is silent are not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    /// Requests they have in flight there.
    pub in_flight: u32,
    /// How many of the engine's requests may be theirs: the sum of [`ReplicaAnswer::own`].
    pub own: u32,
}

/// What an Envoy answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SyncAnswer {
    /// [`SYNC_VERSION`].
    pub version: u32,
    /// The generation of the snapshot now in force.
    pub generation: u64,
    /// The sequence number of the snapshot now in force.
    pub sequence: u64,
    /// Whether another collector of a later generation is heard instead: nothing of this request was taken.
    pub standby: bool,
    /// One entry for each pool that both sides know.
    pub pools: Vec<PoolAnswer>,
    /// Homes this Envoy made or renewed since [`SyncRequest::journal`], and those it was asked to recall.
    pub bindings: Bindings,
    /// Up to where its journal has been read with this answer.
    pub journal: Vec<u64>,
    /// Whether its journal has more.
    #[serde(default, skip_serializing_if = "is_default")]
    pub more: bool,
    /// Whether some of the journal was overwritten before it was read; a recall has it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub missed: bool,
    /// The bucket to go on recalling from; absent at the end, or when no recall was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<u32>,
    /// Homes that could not be noted in the journal, or of another Envoy's not in the table, since other threads wrote at every try.
    pub bindings_dropped: u64,
    /// Requests that went to an address other than the chosen one at their first attempt: Envoy's cluster does not have it.
    #[serde(default)]
    pub mismatches: u64,
    /// Conversations are no longer held this many seconds after their last turn; absent before the filter routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<u32>,
    /// The same on every Envoy that has the same `hash_key`: 16 hex digits; absent before the filter routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_check: Option<String>,
    /// The filter's version.
    pub filter_version: String,
    /// Since when this Envoy counts requests, in milliseconds since 1970; absent when it does not say.
    #[serde(default)]
    pub counting_since_ms: Option<u64>,
}

/// One pool as an Envoy sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolAnswer {
    /// The pool's Envoy cluster.
    pub cluster: String,
    /// Whether conversations keep their homes.
    pub affinity: bool,
    /// Whether the spill threshold follows the engine's size; absent when an older filter answers, as are the two below.
    #[serde(default)]
    pub spill_threshold_auto: Option<bool>,
    /// Whether the spill margin follows the threshold.
    #[serde(default)]
    pub spill_margin_auto: Option<bool>,
    /// How old the snapshot had become that this exchange replaced, in milliseconds; absent for the first one too.
    #[serde(default)]
    pub snapshot_age_ms: Option<u64>,
    /// Bytes of the requests that were served, since Envoy started.
    #[serde(default)]
    pub prompt_bytes: u64,
    /// Those of them that the replica had read before.
    #[serde(default)]
    pub repeated_bytes: u64,
    /// Requests of which the replica had read nothing before.
    #[serde(default)]
    pub first_turns: u64,
    /// What admission does; absent in a pool that admits everything, and when an older filter answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<AdmissionAnswer>,
    /// One entry a replica of the snapshot in force, and behind them one for each endpoint that has ranks: what was sent there without one.
    pub replicas: Vec<ReplicaAnswer>,
}

/// One replica as an Envoy sees it; counts are since Envoy started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaAnswer {
    /// The replica.
    pub replica: ReplicaName,
    /// Requests sent there that have not ended.
    pub in_flight: u64,
    /// How many of the engine's requests may be this Envoy's: those in flight and those that ended since the exchange before the last.
    pub own: u64,
    /// The load above which a conversation may be served elsewhere.
    pub spill_threshold: u32,
    /// How much lower another replica's load must be then; absent when an older filter answers, as are the three below.
    #[serde(default)]
    pub spill_margin: Option<u32>,
    /// Conversations at home there and active within the idle time.
    #[serde(default)]
    pub held_conversations: Option<u64>,
    /// Those of them that were active in the last two minutes: the others have likely ended.
    #[serde(default)]
    pub recent_conversations: Option<u64>,
    /// Bytes of the last request of each of these, together.
    #[serde(default)]
    pub recent_context_bytes: Option<u64>,
    /// Conversations with a place there: a turn is in flight, or the next may still come. Absent, as the one below, in a pool that admits
    /// everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_conversations: Option<u64>,
    /// Tokens of their contexts together, [`AdmissionAnswer::shared_tokens`] counted once; an estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_context_tokens: Option<u64>,
    /// Requests by outcome.
    pub requests: OutcomeCounts,
}

/// The line of a pool that admits by working set, in one Envoy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionAnswer {
    /// Requests held now.
    pub held: u64,
    /// For how long the first of them has been, in milliseconds; absent when none is.
    pub oldest_held_ms: Option<u64>,
    /// Those held now, by why they were held when they came.
    pub by_reason: HeldCounts,
    /// Tokens that all conversations share, which count once at each replica with an active one.
    pub shared_tokens: u32,
}

/// Held requests by why they were held when they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each field is the reason of the same name in `Reason`")]
pub struct HeldCounts {
    pub no_room: u64,
    pub behind_others: u64,
    pub turns_used: u64,
    pub outgrown: u64,
}

impl HeldCounts {
    /// Each reason's name, as the statistics write it, and its count.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        [
            (Reason::NoRoom.as_str(), self.no_room),
            (Reason::BehindOthers.as_str(), self.behind_others),
            (Reason::TurnsUsed.as_str(), self.turns_used),
            (Reason::Outgrown.as_str(), self.outgrown),
        ]
    }

    /// These and those of another.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            no_room: self.no_room.saturating_add(other.no_room),
            behind_others: self.behind_others.saturating_add(other.behind_others),
            turns_used: self.turns_used.saturating_add(other.turns_used),
            outgrown: self.outgrown.saturating_add(other.outgrown),
        }
    }
}

impl FromIterator<Reason> for HeldCounts {
    fn from_iter<I: IntoIterator<Item = Reason>>(reasons: I) -> Self {
        let mut counts = Self::default();
        for reason in reasons {
            let count = match reason {
                Reason::NoRoom => &mut counts.no_room,
                Reason::BehindOthers => &mut counts.behind_others,
                Reason::TurnsUsed => &mut counts.turns_used,
                Reason::Outgrown => &mut counts.outgrown,
            };
            *count = count.saturating_add(1);
        }
        counts
    }
}

/// Requests by outcome, counted where they were served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each field is the outcome of the same name in `Outcome`")]
pub struct OutcomeCounts {
    pub sticky: u64,
    pub placed: u64,
    pub spilled: u64,
    pub pinned: u64,
    pub unkeyed: u64,
    pub rehomed: u64,
    pub passed: u64,
}

impl OutcomeCounts {
    /// Each outcome's name, as the statistics write it, and its count.
    pub fn named(&self) -> [(&'static str, u64); 7] {
        [
            (Outcome::Sticky.as_str(), self.sticky),
            (Outcome::Placed.as_str(), self.placed),
            (Outcome::Spilled.as_str(), self.spilled),
            (Outcome::Pinned.as_str(), self.pinned),
            (Outcome::Unkeyed.as_str(), self.unkeyed),
            (Outcome::Rehomed.as_str(), self.rehomed),
            (Outcome::Passed.as_str(), self.passed),
        ]
    }

    /// Requests of every outcome.
    pub fn total(&self) -> u64 {
        self.named().iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// These and those of another.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            sticky: self.sticky.saturating_add(other.sticky),
            placed: self.placed.saturating_add(other.placed),
            spilled: self.spilled.saturating_add(other.spilled),
            pinned: self.pinned.saturating_add(other.pinned),
            unkeyed: self.unkeyed.saturating_add(other.unkeyed),
            rehomed: self.rehomed.saturating_add(other.rehomed),
            passed: self.passed.saturating_add(other.passed),
        }
    }
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    /// What can be read reads back as it is written.
    fn reads_back<T: Serialize + for<'a> Deserialize<'a> + PartialEq + core::fmt::Debug>(body: &[u8]) -> Result<(), TestCaseError> {
        if let Ok(read) = serde_json::from_slice::<T>(body) {
            let written = serde_json::to_vec(&read).expect("JSON");
            let again = serde_json::from_slice::<T>(&written);
            prop_assert_eq!(again.ok(), Some(read), "{}", written.escape_ascii());
        }
        Ok(())
    }

    #[test]
    fn the_corpus_has_requests_and_answers_of_this_version() {
        assert!(seeds("exchange").into_iter().filter(|seed| serde_json::from_slice::<SyncRequest>(seed).is_ok()).count() >= 4);
        assert!(seeds("answer").into_iter().filter(|seed| serde_json::from_slice::<SyncAnswer>(seed).is_ok()).count() >= 3);
    }

    proptest! {
        #[test]
        fn any_request_reads_back(body in mutated(seeds("exchange"))) {
            reads_back::<SyncRequest>(&body)?;
        }

        #[test]
        fn any_answer_reads_back(body in mutated(seeds("answer"))) {
            reads_back::<SyncAnswer>(&body)?;
        }

        #[test]
        fn any_body_has_the_version_that_serde_json_reads_or_none(body in mutated(seeds("exchange"))) {
            if let Ok(value) = serde_json::from_slice::<serde_json::Value>(&body) {
                let version = value.get("version").and_then(serde_json::Value::as_u64);
                // A version that is given twice is none.
                if let Some(found) = version_of(&body) {
                    prop_assert_eq!(Some(u64::from(found)), version.or(value.get(0).and_then(serde_json::Value::as_u64)));
                }
            }
        }
    }
}
