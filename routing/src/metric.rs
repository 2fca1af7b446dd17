//! The statistics Homing keeps in Envoy, and how their names are written.
//!
//! Envoy's custom statistics have no labels, so a name carries them as `;key=value` and the `stats_tags` of the shipped
//! configurations turn them into labels again: `homing_in_flight;pool=a;replica=10.0.0.1:80` becomes
//! `homing_in_flight{pool="a",replica="10.0.0.1:80"}`.

use core::fmt;

use hashbrown::HashMap;

use crate::admission::Reason;
use crate::host::{Host, HostError, MetricId};
use crate::outcome::Outcome;

/// One statistic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric<'a> {
    /// Requests that ended, by where they were served; those that nobody answered, by where they were sent. A counter.
    Requests {
        /// The pool's cluster.
        pool: &'a str,
        /// The replica, [`NO_REPLICA`] or [`OTHER_REPLICA`].
        replica: &'a str,
        /// How it came there.
        outcome: Outcome,
    },
    /// Requests sent to a replica that have not ended. A gauge.
    InFlight {
        /// The pool's cluster.
        pool: &'a str,
        /// The replica.
        replica: &'a str,
    },
    /// Those of them that one thread sent, so that they can be given back for it if it dies. A gauge.
    LaneInFlight {
        /// The thread's lane.
        lane: usize,
        /// The pool's cluster.
        pool: &'a str,
        /// The replica.
        replica: &'a str,
    },
    /// Conversations at home on a replica and active within the idle time. A gauge.
    AtHome {
        /// The pool's cluster.
        pool: &'a str,
        /// The replica.
        replica: &'a str,
    },
    /// Those of them that were active of late, and so will likely go on. A gauge.
    Recent {
        /// The pool's cluster.
        pool: &'a str,
        /// The replica.
        replica: &'a str,
    },
    /// Bytes of the last request of each of these, together. A gauge.
    RecentContext {
        /// The pool's cluster.
        pool: &'a str,
        /// The replica.
        replica: &'a str,
    },
    /// Seconds since the collector's last snapshot arrived. A gauge.
    SnapshotAge {
        /// The pool's cluster.
        pool: &'a str,
    },
    /// Changes whenever a new snapshot is in shared data. A gauge, since reading one copies nothing.
    SnapshotVersion {
        /// The pool's cluster.
        pool: &'a str,
    },
    /// Requests held at the gateway. A gauge.
    HeldRequests {
        /// The pool's cluster.
        pool: &'a str,
    },
    /// Changes whenever a place or the line does. A gauge, since reading one copies nothing.
    WorkingSetVersion {
        /// The pool's cluster.
        pool: &'a str,
    },
    /// What admission did. A counter.
    Admission {
        /// The pool's cluster.
        pool: &'a str,
        /// What happened.
        event: AdmissionEvent,
    },
    /// Milliseconds that requests were held before they were sent, all together. A counter.
    AdmissionWait {
        /// The pool's cluster.
        pool: &'a str,
    },
    /// Of the requests that were served: their bodies' bytes; those of them that the replica had read before; and requests of which it had
    /// read nothing. Counters.
    Prompts {
        /// The pool's cluster.
        pool: &'a str,
        /// Which of the three.
        part: PromptPart,
    },
    /// Things that should not happen. A counter.
    Errors {
        /// What happened.
        kind: ErrorKind,
    },
}

/// The `replica` of a request that was sent to none.
pub const NO_REPLICA: &str = "none";

/// The `replica` of a request that was served by an endpoint no snapshot names.
pub const OTHER_REPLICA: &str = "other";

/// Whether a statistic counts up or is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// What is counted of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptPart {
    /// Bytes.
    Bytes,
    /// Bytes that the replica had read before.
    RepeatedBytes,
    /// Requests of which the replica had read nothing.
    FirstTurns,
}

impl PromptPart {
    /// Every part.
    pub const ALL: [Self; 3] = [Self::Bytes, Self::RepeatedBytes, Self::FirstTurns];

    fn as_str(self) -> &'static str {
        match self {
            Self::Bytes => "prompt_bytes",
            Self::RepeatedBytes => "repeated_prompt_bytes",
            Self::FirstTurns => "first_turns",
        }
    }
}

/// What admission did with a request, each counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionEvent {
    /// It was held, and why.
    Held(Reason),
    /// It was sent after having been held.
    Admitted,
    /// It was sent although it did not fit: the line was full, or it had waited for too long.
    Overdue,
    /// It was answered with a 429 for the same reasons.
    Rejected,
}

impl AdmissionEvent {
    /// Every event.
    pub const ALL: [Self; 7] = [
        Self::Held(Reason::NoRoom),
        Self::Held(Reason::BehindOthers),
        Self::Held(Reason::TurnsUsed),
        Self::Held(Reason::Outgrown),
        Self::Admitted,
        Self::Overdue,
        Self::Rejected,
    ];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held(Reason::NoRoom) => "held_no_room",
            Self::Held(Reason::BehindOthers) => "held_behind_others",
            Self::Held(Reason::TurnsUsed) => "held_turns_used",
            Self::Held(Reason::Outgrown) => "held_outgrown",
            Self::Admitted => "admitted",
            Self::Overdue => "overdue",
            Self::Rejected => "rejected",
        }
    }
}

/// Things that should not happen, each counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Envoy refused a host call.
    Host,
    /// Other threads changed a bucket of the affinity table at every try; the turn was routed but not remembered.
    Contended,
    /// A binding was not noted in the journal, or another Envoy's not in the table: other threads wrote at every try.
    BindingDropped,
    /// Envoy sent a request elsewhere than the filter chose, without a retry.
    Mismatch,
    /// A thread died with requests in flight, which were given back for it.
    Leak,
    /// The control listener refused a snapshot.
    Refused,
    /// The control listener was called without the right token.
    Unauthorized,
    /// A request body was larger than the filter reads; the turn was routed without it.
    BodyTooLarge,
}

impl ErrorKind {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Contended => "contended",
            Self::BindingDropped => "binding_dropped",
            Self::Mismatch => "mismatch",
            Self::Leak => "leak",
            Self::Refused => "refused",
            Self::Unauthorized => "unauthorized",
            Self::BodyTooLarge => "body_too_large",
        }
    }
}

/// The counters of errors, each defined when it is first used, and once: the host keeps every definition.
#[derive(Debug, Default)]
pub(crate) struct Errors(HashMap<ErrorKind, MetricId>);

impl Errors {
    pub(crate) fn counter(&mut self, host: &impl Host, kind: ErrorKind) -> Result<MetricId, HostError> {
        if let Some(known) = self.0.get(&kind) {
            return Ok(*known);
        }
        let counter = host.define(&Metric::Errors { kind })?;
        self.0.insert(kind, counter);
        Ok(counter)
    }

    pub(crate) fn count(&mut self, host: &impl Host, kind: ErrorKind, amount: u64) -> Result<(), HostError> {
        host.add(self.counter(host, kind)?, i64::try_from(amount).unwrap_or(i64::MAX))
    }
}

impl Metric<'_> {
    /// Whether it counts up or is set.
    pub fn kind(&self) -> MetricKind {
        match self {
            Self::Requests { .. }
            | Self::Errors { .. }
            | Self::Admission { .. }
            | Self::AdmissionWait { .. }
            | Self::Prompts { .. } => MetricKind::Counter,
            Self::InFlight { .. }
            | Self::LaneInFlight { .. }
            | Self::AtHome { .. }
            | Self::Recent { .. }
            | Self::RecentContext { .. }
            | Self::HeldRequests { .. }
            | Self::WorkingSetVersion { .. }
            | Self::SnapshotAge { .. }
            | Self::SnapshotVersion { .. } => MetricKind::Gauge,
        }
    }
}

impl fmt::Display for Metric<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requests { pool, replica, outcome } => {
                write!(f, "homing_requests_total;pool={pool};replica={replica};outcome={}", outcome.as_str())
            }
            Self::InFlight { pool, replica } => write!(f, "homing_in_flight;pool={pool};replica={replica}"),
            Self::LaneInFlight { lane, pool, replica } => {
                write!(f, "homing_lane_in_flight;pool={pool};replica={replica};lane={lane}")
            }
            Self::AtHome { pool, replica } => write!(f, "homing_held_conversations;pool={pool};replica={replica}"),
            Self::Recent { pool, replica } => write!(f, "homing_recent_conversations;pool={pool};replica={replica}"),
            Self::RecentContext { pool, replica } => write!(f, "homing_recent_context_bytes;pool={pool};replica={replica}"),
            Self::SnapshotAge { pool } => write!(f, "homing_snapshot_age_seconds;pool={pool}"),
            Self::SnapshotVersion { pool } => write!(f, "homing_snapshot_version;pool={pool}"),
            Self::HeldRequests { pool } => write!(f, "homing_held_requests;pool={pool}"),
            Self::WorkingSetVersion { pool } => write!(f, "homing_working_set_version;pool={pool}"),
            Self::Admission { pool, event } => write!(f, "homing_admission_total;pool={pool};event={}", event.as_str()),
            Self::AdmissionWait { pool } => write!(f, "homing_admission_wait_ms_total;pool={pool}"),
            Self::Prompts { pool, part } => write!(f, "homing_{}_total;pool={pool}", part.as_str()),
            Self::Errors { kind } => write!(f, "homing_errors_total;kind={}", kind.as_str()),
        }
    }
}
