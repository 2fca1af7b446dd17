//! The control role: takes the collector's snapshots into shared data and answers with what this Envoy has counted.

use core::fmt;

use hashbrown::{HashMap, HashSet};

use crate::admission::{Texts, occupancy};
use crate::bindings;
use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, MetricId};
use crate::metric::{ErrorKind, Metric, PromptPart};
use crate::outcome::Outcome;
use crate::policy::Terms;
use crate::pool::{Registry, define_prompts, in_flight, snapshot_key};
use crate::replica::{ReplicaId, ReplicaName};
use crate::since;
use crate::snapshot::{Figures, Snapshot};
use crate::sync::{
    Binding, MAX_REPLICAS, MAX_SYNC_BYTES, OutcomeCounts, PoolAnswer, PoolReport, ReplicaAnswer, ReplicaReport, SYNC_VERSION,
    SyncAnswer, SyncRequest,
};

/// How long the last exchange must be ago before a collector of an earlier generation is heard again: its clock may have been
/// set back, or the later one may be gone for good.
const FORGET_GENERATION_MS: u64 = 10_000;

const POSITION_KEY: &str = "homing/sync";
const POSITION_LAYOUT: u8 = 1;
const TRIES: usize = 3;

/// Why an exchange was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq)]
pub enum SyncError {
    /// The body is longer than [`MAX_SYNC_BYTES`].
    TooLarge,
    /// The body is not the exchange's JSON.
    Malformed(String),
    /// The body is of another version of the exchange.
    Version(u32),
    /// A value is out of its range.
    Invalid(String),
    /// A newer snapshot has been taken already.
    Older {
        /// The generation and sequence number in force.
        newest: (u64, u64),
    },
    /// The host refused shared data or metrics.
    Host(HostError),
}

impl fmt::Display for SyncError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => {
                write!(f, "the snapshot is larger than {MAX_SYNC_BYTES} bytes: poll fewer replicas with one collector")
            }
            Self::Malformed(why) => write!(f, "the snapshot cannot be read: {why}"),
            Self::Version(version) => {
                write!(
                    f,
                    "the snapshot is of version {version}, this filter speaks {SYNC_VERSION}: run a collector of the same release"
                )
            }
            Self::Invalid(why) => write!(f, "the snapshot is not valid: {why}"),
            Self::Older { newest: (generation, sequence) } => {
                write!(f, "the snapshot is older than the last one, which has generation {generation} and sequence {sequence}")
            }
            Self::Host(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for SyncError {}

impl From<HostError> for SyncError {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

/// The control role of one thread.
#[derive(Debug)]
pub struct Control<H: Host> {
    host: H,
    pools: HashMap<String, KnownPool>,
    errors: HashMap<ErrorKind, MetricId>,
}

#[derive(Debug)]
struct KnownPool {
    version: MetricId,
    prompts: [MetricId; PromptPart::ALL.len()],
    registry: Registry,
}

impl<H: Host> Control<H> {
    /// A control role on this host.
    pub fn new(host: H) -> Self {
        Self { host, pools: HashMap::new(), errors: HashMap::new() }
    }

    /// Takes one snapshot and answers it.
    ///
    /// # Errors
    /// [`SyncError`] says why the snapshot was refused; then nothing was changed.
    pub fn exchange(&mut self, body: &[u8]) -> Result<SyncAnswer, SyncError> {
        let request = read(body)?;
        self.advance(request.generation, request.sequence)?;
        let mut pools = Vec::with_capacity(request.pools.len());
        let mut names = HashMap::new();
        for report in &request.pools {
            names.extend(report.replicas.iter().map(|replica| (replica.replica.id(), replica.replica)));
            // A pool this Envoy does not route needs no key in shared data.
            if let Some(terms) = Terms::published(&self.host, &report.cluster)? {
                pools.push(self.take(report, terms)?);
            }
        }
        Ok(SyncAnswer {
            version: SYNC_VERSION,
            generation: request.generation,
            sequence: request.sequence,
            pools,
            bindings: self.bindings(&names)?,
            bindings_dropped: self.bindings_dropped()?,
            filter_version: env!("CARGO_PKG_VERSION").to_owned(),
            counting_since_ms: since::noted(&self.host)?,
        })
    }

    /// Moves on to a snapshot's place in the order, if it is not behind.
    fn advance(&self, generation: u64, sequence: u64) -> Result<(), SyncError> {
        let now_ms = self.host.now_ms();
        for _ in 0..TRIES {
            let stored = self.host.read(POSITION_KEY)?;
            if let Some((newest, at_ms)) = stored.as_ref().and_then(|stored| read_position(&stored.bytes)) {
                // A time to come was written by a clock that has been set back since.
                let long_ago = now_ms.checked_sub(at_ms).is_none_or(|ago| ago > FORGET_GENERATION_MS);
                let gone = generation < newest.0 && long_ago;
                if (generation, sequence) < newest && !gone {
                    return Err(SyncError::Older { newest });
                }
            }
            let position = write_position((generation, sequence), now_ms);
            if self.host.write(POSITION_KEY, &position, Expected::unchanged(stored.as_ref()))? {
                return Ok(());
            }
        }
        // Other threads took three snapshots meanwhile; theirs are as new.
        Ok(())
    }

    fn take(&mut self, report: &PoolReport, terms: Terms) -> Result<PoolAnswer, HostError> {
        let Self { host, pools, .. } = self;
        if !pools.contains_key(&report.cluster) {
            let version = host.define(&Metric::SnapshotVersion { pool: &report.cluster })?;
            pools.insert(
                report.cluster.clone(),
                KnownPool { version, prompts: define_prompts(host, &report.cluster)?, registry: Registry::default() },
            );
        }
        let Some(pool) = pools.get_mut(&report.cluster) else {
            return Err(HostError { call: "pool", status: 0 });
        };
        let key = snapshot_key(&report.cluster);
        let before = host.read(&key)?.and_then(|stored| Snapshot::decode(&stored.bytes));
        let snapshot_age_ms = before.as_ref().map(|snapshot| host.now_ms().saturating_sub(snapshot.received_ms));
        let before = before.unwrap_or_default();
        let before: HashMap<ReplicaName, Figures> = before.replicas.into_iter().collect();

        let known = Texts::default();
        let texts = Texts {
            bytes_per_token: report.bytes_per_token.unwrap_or(known.bytes_per_token),
            shared_tokens: report.shared_tokens.unwrap_or(known.shared_tokens),
        };
        let mut snapshot = Snapshot { received_ms: host.now_ms(), texts, replicas: Vec::with_capacity(report.replicas.len()) };
        let mut answers = Vec::with_capacity(report.replicas.len());
        for reported in &report.replicas {
            let replica = pool.registry.replica(host, &report.cluster, &reported.replica)?;
            let in_flight = in_flight(host, replica.in_flight)?;
            let ended = replica.requests.total(host, &report.cluster)?;
            let [ended_last, ended_before] = before.get(&reported.replica).map_or([ended; 2], |figures| figures.ended);
            let own = in_flight.saturating_add(ended.saturating_sub(ended_before));
            let figures = figures(reported, own, [ended, ended_last]);
            snapshot.replicas.push((reported.replica, figures));
            let count = |outcome| replica.requests.value(host, &report.cluster, outcome);
            answers.push(ReplicaAnswer {
                replica: reported.replica,
                in_flight,
                spill_threshold: terms.threshold(&figures),
                spill_margin: Some(terms.margin(&figures)),
                held_conversations: Some(host.value(replica.held)?),
                recent_conversations: Some(host.value(replica.recent)?),
                recent_context_bytes: Some(host.value(replica.recent_context)?),
                active_conversations: None,
                active_context_tokens: None,
                requests: OutcomeCounts {
                    sticky: count(Outcome::Sticky)?,
                    placed: count(Outcome::Placed)?,
                    spilled: count(Outcome::Spilled)?,
                    pinned: count(Outcome::Pinned)?,
                    unkeyed: count(Outcome::Unkeyed)?,
                    rehomed: count(Outcome::Rehomed)?,
                    passed: count(Outcome::Passed)?,
                },
            });
        }
        host.write(&key, &snapshot.encode(), Expected::Anything)?;
        host.add(pool.version, 1)?;
        let admission = match terms.admits {
            true => Some(occupancy(host, &report.cluster)?.tell(host.now_ms(), &mut answers)),
            false => None,
        };
        let [prompt_bytes, repeated_bytes, first_turns] = pool.prompts;
        Ok(PoolAnswer {
            cluster: report.cluster.clone(),
            affinity: terms.affinity,
            spill_threshold_auto: Some(terms.threshold_is_auto()),
            spill_margin_auto: Some(terms.margin_is_auto()),
            snapshot_age_ms,
            prompt_bytes: host.value(prompt_bytes)?,
            repeated_bytes: host.value(repeated_bytes)?,
            first_turns: host.value(first_turns)?,
            admission,
            replicas: answers,
        })
    }

    fn bindings(&self, names: &HashMap<ReplicaId, ReplicaName>) -> Result<Vec<Binding>, HostError> {
        let named = |bound: bindings::Bound| {
            let home = *names.get(&bound.home)?;
            Some(Binding { conversation: bound.digest.to_string(), home, last_turn: bound.last_turn })
        };
        Ok(bindings::take(&self.host)?.into_iter().filter_map(named).collect())
    }

    fn bindings_dropped(&mut self) -> Result<u64, HostError> {
        let dropped = self.counter(ErrorKind::BindingDropped)?;
        self.host.value(dropped)
    }

    /// Counts an exchange that came to nothing.
    pub fn count_error(&mut self, kind: ErrorKind) {
        // Nothing is left to tell of a refused error count.
        let _ = self.counter(kind).and_then(|counter| self.host.add(counter, 1));
    }

    /// An error's counter, defined once: the host keeps every definition.
    fn counter(&mut self, kind: ErrorKind) -> Result<MetricId, HostError> {
        if let Some(known) = self.errors.get(&kind) {
            return Ok(*known);
        }
        let counter = self.host.define(&Metric::Errors { kind })?;
        self.errors.insert(kind, counter);
        Ok(counter)
    }
}

/// What is stored of one replica.
///
/// `own` is the most of this Envoy's requests that the engine can have counted: those in flight and those that have ended since
/// the exchange before the last, since an engine's figures are as old as its last step and the scrape. What is above that was
/// sent by others.
fn figures(reported: &ReplicaReport, own: u64, ended: [u64; 2]) -> Figures {
    let own = u32::try_from(own).unwrap_or(u32::MAX);
    Figures {
        state: reported.state,
        running: reported.running,
        waiting: reported.waiting,
        others: reported.running.saturating_add(reported.waiting).saturating_sub(own),
        kv_usage: reported.kv_usage,
        cache_tokens: reported.cache_tokens,
        max_num_seqs: reported.max_num_seqs,
        age_ms: reported.age_ms.unwrap_or(u64::MAX),
        ended,
    }
}

/// Reads and checks a request's body.
fn read(body: &[u8]) -> Result<SyncRequest, SyncError> {
    if body.len() > MAX_SYNC_BYTES {
        return Err(SyncError::TooLarge);
    }
    let request: SyncRequest = serde_json::from_slice(body).map_err(|error| SyncError::Malformed(error.to_string()))?;
    if request.version != SYNC_VERSION {
        return Err(SyncError::Version(request.version));
    }
    check(&request)?;
    Ok(request)
}

fn check(request: &SyncRequest) -> Result<(), SyncError> {
    let mut clusters = HashSet::new();
    for pool in &request.pools {
        let cluster = &pool.cluster;
        if !clusters.insert(cluster) {
            return Err(SyncError::Invalid(format!("the pool `{cluster}` stands twice")));
        }
        if pool.replicas.len() > MAX_REPLICAS {
            return Err(SyncError::Invalid(format!("the pool `{cluster}` has more than {MAX_REPLICAS} replicas")));
        }
        if pool.bytes_per_token.is_some_and(|bytes| !(0.25..=64.0).contains(&bytes)) {
            return Err(SyncError::Invalid(format!("the bytes per token of the pool `{cluster}` are not between 0.25 and 64")));
        }
        let mut names = HashSet::new();
        for replica in &pool.replicas {
            let name = replica.replica;
            if !names.insert(name) {
                return Err(SyncError::Invalid(format!("the replica {name} stands twice in the pool `{cluster}`")));
            }
            if !(0.0..=1.0).contains(&replica.kv_usage) {
                return Err(SyncError::Invalid(format!("the KV usage of {name} is {}, not between 0 and 1", replica.kv_usage)));
            }
        }
    }
    Ok(())
}

fn read_position(bytes: &[u8]) -> Option<((u64, u64), u64)> {
    let mut reader = Reader::open(bytes, POSITION_LAYOUT)?;
    Some(((reader.u64()?, reader.u64()?), reader.u64()?))
}

fn write_position((generation, sequence): (u64, u64), at_ms: u64) -> [u8; 25] {
    let mut bytes = [0; 25];
    let mut writer = Writer::over(&mut bytes);
    writer.u8(POSITION_LAYOUT);
    writer.u64(generation);
    writer.u64(sequence);
    writer.u64(at_ms);
    bytes
}
