//! The control role: takes the collector's snapshots into shared data and answers with what this Envoy has counted.

mod clock;
mod request;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::admission::{Texts, occupancy};
use crate::binding::Bindings;
use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, MetricId, TRIES};
use crate::journal;
use crate::metric::{ErrorKind, Errors, Metric, PromptPart};
use crate::outcome::Outcome;
use crate::policy::Terms;
use crate::pool::{Registry, Replica, define_prompts, in_flight, part, ranks, snapshot_key};
use crate::replica::ReplicaName;
use crate::shared::Shared;
use crate::since;
use crate::snapshot::{Figures, Snapshot};
use crate::sync::{
    MAX_BINDINGS, OutcomeCounts, Peers, PoolAnswer, PoolReport, ReplicaAnswer, ReplicaReport, SYNC_VERSION, SyncAnswer, SyncRequest,
};
use clock::Clock;
pub use request::SyncError;
use request::read;

/// How long the collector of the latest generation must be silent before an earlier one is heard, at least: it has missed three
/// exchanges by then.
const SILENT_MS: u64 = 1_000;

/// The longest that a collector can say it will be silent.
const MAX_SILENT_MS: u64 = 30_000;

/// How long an Envoy that starts waits for a collector before it counts as ready, and for one that is there but does not hand over.
const NO_COLLECTOR_MS: u64 = 10_000;
const NO_HANDOVER_MS: u64 = 30_000;

const POSITION_KEY: &str = "homing/sync";
const POSITION_LAYOUT: u8 = 2;
const READY_KEY: &str = "homing/ready";
const READY_LAYOUT: u8 = 1;

/// The control role of one thread.
#[derive(Debug)]
pub struct Control<H: Host> {
    host: H,
    pools: HashMap<String, KnownPool>,
    errors: Errors,
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
        Self { host, pools: HashMap::new(), errors: Errors::default() }
    }

    /// Takes one snapshot and answers it.
    ///
    /// # Errors
    /// [`SyncError`] says why the snapshot was refused; then nothing was changed.
    pub fn exchange(&mut self, body: &[u8]) -> Result<SyncAnswer, SyncError> {
        let request = read(body)?;
        let in_force = self.advance(&request)?;
        let standby = in_force != (request.generation, request.sequence);
        let clock = Clock::of(&request, self.host.now_ms());
        let shared = Shared::published(&self.host)?;
        let since_ms = since::noted(&self.host)?;
        if let Some(shared) = shared.as_ref().filter(|_| !standby) {
            self.merge(shared, &request.bindings, clock)?;
            if request.handed_over.is_some() && request.handed_over == since_ms {
                self.host.write(READY_KEY, &[READY_LAYOUT], Expected::Anything)?;
            }
        }
        let mut pools = Vec::with_capacity(request.pools.len());
        for report in &request.pools {
            // A pool this Envoy does not route needs no key in shared data.
            if let Some(terms) = Terms::published(&self.host, &report.cluster)? {
                pools.push(self.take(report, terms, (!standby).then_some(clock))?);
            }
        }
        let journal::Found { mut bindings, cursor, more, missed } = journal::read(&self.host, &request.journal, MAX_BINDINGS)?;
        let mut recall = None;
        if let (Some(from), Some(shared)) = (request.recall, &shared) {
            let (recalled, next) = shared.table().recall(&self.host, from, clock.now_s(), MAX_BINDINGS)?;
            bindings.extend(recalled.into_iter().map(|told| clock.to_fleet(told)));
            recall = next;
        }
        let (generation, sequence) = in_force;
        Ok(SyncAnswer {
            version: SYNC_VERSION,
            generation,
            sequence,
            standby,
            pools,
            bindings: Bindings(bindings),
            journal: cursor,
            more,
            missed,
            recall,
            bindings_dropped: self.errors(ErrorKind::BindingDropped)?,
            mismatches: self.errors(ErrorKind::Mismatch)?,
            idle_s: shared.map(|shared| shared.idle_s),
            key_check: shared.map(|shared| format!("{:016x}", shared.key_check)),
            filter_version: env!("CARGO_PKG_VERSION").to_owned(),
            counting_since_ms: since_ms,
        })
    }

    /// Why this Envoy should get no requests yet; `None` once it knows the homes of the fleet's conversations.
    ///
    /// It is ready when a collector has handed over what it knew, and after a while without a collector, so that nobody is locked out.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn unready(&self) -> Result<Option<&'static str>, HostError> {
        if self.host.read(READY_KEY)?.is_some_and(|stored| stored.bytes == [READY_LAYOUT]) {
            return Ok(None);
        }
        let Some(since_ms) = since::noted(&self.host)? else {
            return Ok(Some("no filter with `role: route` and this vm_id has been configured yet"));
        };
        let now_ms = self.host.now_ms();
        let heard = self.host.read(POSITION_KEY)?.and_then(|stored| Position::read(&stored.bytes));
        let is_quiet = heard.is_none_or(|last| last.is_silent(now_ms));
        let patience_ms = if is_quiet { NO_COLLECTOR_MS } else { NO_HANDOVER_MS };
        // A start that is to come was noted by a clock that has been set back since.
        if now_ms.checked_sub(since_ms).is_none_or(|up_ms| up_ms > patience_ms) {
            self.host.write(READY_KEY, &[READY_LAYOUT], Expected::Anything)?;
            return Ok(None);
        }
        Ok(Some(if is_quiet {
            "no collector has come yet"
        } else {
            "the collector has not handed over every conversation's home yet"
        }))
    }

    /// Moves on to a snapshot's place in the order, unless another collector's is in force; returns the place then in force.
    fn advance(&self, request: &SyncRequest) -> Result<(u64, u64), SyncError> {
        let now_ms = self.host.now_ms();
        let order = (request.generation, request.sequence);
        for _ in 0..TRIES {
            let stored = self.host.read(POSITION_KEY)?;
            if let Some(last) = stored.as_ref().and_then(|stored| Position::read(&stored.bytes)).filter(|last| order < last.order) {
                if request.generation == last.order.0 {
                    return Err(SyncError::Older { newest: last.order });
                }
                if !last.is_silent(now_ms) {
                    return Ok(last.order);
                }
            }
            let silent_ms = request.pause_ms.saturating_mul(2).saturating_add(SILENT_MS / 4).clamp(SILENT_MS, MAX_SILENT_MS);
            let position = Position { order, at_ms: now_ms, silent_ms };
            if self.host.write(POSITION_KEY, &position.write(), Expected::unchanged(stored.as_ref()))? {
                return Ok(order);
            }
        }
        // Other threads took three snapshots meanwhile; theirs are as new.
        Ok(order)
    }

    /// Takes in what other Envoys told.
    fn merge(&mut self, shared: &Shared, bindings: &Bindings, clock: Clock) -> Result<(), HostError> {
        let mut told: Vec<_> = bindings.0.iter().map(|binding| clock.to_local(*binding)).collect();
        let lost = shared.table().merge(&self.host, &mut told, clock.now_s())?;
        if lost > 0 {
            self.errors.count(&self.host, ErrorKind::BindingDropped, lost as u64)?;
        }
        Ok(())
    }

    /// Answers for one pool; with a clock, takes what is reported of it too.
    fn take(&mut self, report: &PoolReport, terms: Terms, taken: Option<Clock>) -> Result<PoolAnswer, HostError> {
        let Self { host, pools, .. } = self;
        let pool = match pools.entry(report.cluster.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let version = host.define(&Metric::SnapshotVersion { pool: &report.cluster })?;
                new.insert(KnownPool { version, prompts: define_prompts(host, &report.cluster)?, registry: Registry::default() })
            }
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
        let clock_ahead_ms = taken.map_or(0, |clock| clock.ahead_ms);
        let replicas = Vec::with_capacity(report.replicas.len());
        let has_peers = report.replicas.iter().any(|replica| replica.peers != Peers::default());
        let mut snapshot = Snapshot { received_ms: host.now_ms(), clock_ahead_ms, has_peers, texts, replicas };
        let mut answers = Vec::with_capacity(report.replicas.len());
        let ranks = ranks(report.replicas.iter().map(|reported| &reported.replica));
        let mut endpoints: Vec<ReplicaAnswer> = Vec::new();
        for reported in &report.replicas {
            let replica = pool.registry.replica(host, &report.cluster, &reported.replica)?;
            let endpoint = match reported.replica.rank {
                Some(_) => Some(pool.registry.replica(host, &report.cluster, &ReplicaName::endpoint(reported.replica.address))?),
                None => None,
            };
            let at_endpoint = endpoint.as_ref().map_or(Ok(0), |endpoint| in_flight(host, endpoint.in_flight))?;
            let in_flight = in_flight(host, replica.in_flight)?;
            let ended = replica.requests.total(host, &report.cluster)?;
            let [ended_last, ended_before] = before.get(&reported.replica).map_or([ended; 2], |figures| figures.ended);
            let own = in_flight.saturating_add(ended.saturating_sub(ended_before));
            let ranks = ranks.get(&reported.replica.address).copied().unwrap_or(1);
            // The other Envoys find in the engine's figures what was sent without a rank, so a rank's answer is without it.
            let figures = figures(reported, own.saturating_add(part(at_endpoint, ranks)), [ended, ended_last]);
            snapshot.replicas.push((reported.replica, figures));
            if let Some(endpoint) = endpoint.filter(|endpoint| endpoints.iter().all(|known| known.replica != endpoint.name)) {
                endpoints.push(ReplicaAnswer {
                    replica: endpoint.name,
                    in_flight: at_endpoint,
                    own: at_endpoint,
                    spill_threshold: terms.threshold(&figures),
                    spill_margin: Some(terms.margin(&figures)),
                    held_conversations: None,
                    recent_conversations: None,
                    recent_context_bytes: None,
                    active_conversations: None,
                    active_context_tokens: None,
                    requests: counts(host, &report.cluster, &endpoint)?,
                });
            }
            answers.push(ReplicaAnswer {
                replica: reported.replica,
                in_flight,
                own,
                spill_threshold: terms.threshold(&figures),
                spill_margin: Some(terms.margin(&figures)),
                held_conversations: Some(host.value(replica.at_home)?),
                recent_conversations: Some(host.value(replica.recent)?),
                recent_context_bytes: Some(host.value(replica.recent_context)?),
                active_conversations: None,
                active_context_tokens: None,
                requests: counts(host, &report.cluster, &replica)?,
            });
        }
        if taken.is_some() {
            host.write(&key, &snapshot.encode(), Expected::Anything)?;
            host.add(pool.version, 1)?;
        }
        let admission = match terms.admits {
            true => Some(occupancy(host, &report.cluster)?.tell(host.now_ms(), &mut answers)),
            false => None,
        };
        answers.extend(endpoints);
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

    fn errors(&mut self, kind: ErrorKind) -> Result<u64, HostError> {
        let counter = self.errors.counter(&self.host, kind)?;
        self.host.value(counter)
    }

    /// Counts an exchange that came to nothing.
    pub fn count_error(&mut self, kind: ErrorKind) {
        // Nothing is left to tell of a refused error count.
        let _ = self.errors.count(&self.host, kind, 1);
    }
}

/// Requests by outcome, of a replica or of an endpoint.
fn counts(host: &impl Host, cluster: &str, replica: &Replica) -> Result<OutcomeCounts, HostError> {
    let count = |outcome| replica.requests.value(host, cluster, outcome);
    Ok(OutcomeCounts {
        sticky: count(Outcome::Sticky)?,
        placed: count(Outcome::Placed)?,
        spilled: count(Outcome::Spilled)?,
        pinned: count(Outcome::Pinned)?,
        unkeyed: count(Outcome::Unkeyed)?,
        rehomed: count(Outcome::Rehomed)?,
        passed: count(Outcome::Passed)?,
    })
}

/// What is stored of one replica.
///
/// `own` is the most of this Envoy's requests that the engine can have counted: those in flight and those that have ended since
/// the exchange before the last, since an engine's figures are as old as its last step and the scrape. What is above that, and above
/// what the other Envoys take for theirs, was sent by others; of the other Envoys what is in flight counts.
fn figures(reported: &ReplicaReport, own: u64, ended: [u64; 2]) -> Figures {
    let own = u32::try_from(own).unwrap_or(u32::MAX);
    Figures {
        state: reported.state,
        running: reported.running,
        waiting: reported.waiting,
        others: reported
            .running
            .saturating_add(reported.waiting)
            .saturating_sub(own.saturating_add(reported.peers.own))
            .saturating_add(reported.peers.in_flight),
        kv_usage: reported.kv_usage,
        cache_tokens: reported.cache_tokens,
        max_num_seqs: reported.max_num_seqs,
        age_ms: reported.age_ms.unwrap_or(u64::MAX),
        ended,
    }
}

/// The newest snapshot's place in the order, and when it came.
#[derive(Clone, Copy)]
struct Position {
    /// Generation and sequence number.
    order: (u64, u64),
    at_ms: u64,
    /// How long it may be ago before its collector counts as silent.
    silent_ms: u64,
}

impl Position {
    fn is_silent(&self, now_ms: u64) -> bool {
        // A time to come was written by a clock that has been set back since.
        now_ms.checked_sub(self.at_ms).is_none_or(|ago| ago > self.silent_ms.min(MAX_SILENT_MS))
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::open(bytes, POSITION_LAYOUT)?;
        Some(Self { order: (reader.u64()?, reader.u64()?), at_ms: reader.u64()?, silent_ms: reader.u64()? })
    }

    fn write(&self) -> [u8; 33] {
        let mut bytes = [0; 33];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(POSITION_LAYOUT);
        writer.u64(self.order.0);
        writer.u64(self.order.1);
        writer.u64(self.at_ms);
        writer.u64(self.silent_ms);
        bytes
    }
}
