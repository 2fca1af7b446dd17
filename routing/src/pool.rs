//! A pool as one thread sees it: its policy, its replicas and their load.

mod registry;

use core::cell::{Cell, RefCell};
use core::net::SocketAddr;
use std::rc::Rc;

use hashbrown::HashMap;

use crate::admission::{Room, Rooms, SharedSet, Terms, Texts, ThinkTimes};
use crate::host::{Host, HostError, MetricId};
use crate::identity::Namer;
use crate::ledger::{Ledger, ledger_key};
use crate::metric::{AdmissionEvent, Metric, NO_REPLICA, OTHER_REPLICA, PromptPart};
use crate::policy::Policy;
use crate::replica::{ReplicaId, ReplicaName};
use crate::snapshot::{Figures, Snapshot};
use crate::sync::ReplicaState;
pub(crate) use registry::Registry;
pub use registry::Replica;
use registry::Requests;

/// A replica and what the last snapshot says of it.
#[derive(Clone, Debug)]
pub struct Member {
    /// The replica.
    pub replica: Rc<Replica>,
    /// The endpoint it is a rank of: what counts requests of which only the endpoint is known.
    pub(crate) endpoint: Option<Rc<Replica>>,
    /// Replicas at its address, which share what the endpoint counts.
    pub(crate) ranks: u32,
    /// Its figures.
    pub figures: Figures,
}

impl Member {
    /// What a request counts at that is sent here, with its rank or without.
    pub(crate) fn counted_at(&self, ignores_rank: bool) -> &Rc<Replica> {
        self.endpoint.as_ref().filter(|_| ignores_rank).unwrap_or(&self.replica)
    }

    /// Requests to add to its load for recent failures, its own and its endpoint's.
    pub(crate) fn penalty(&self, now_ms: u64) -> u32 {
        let of_endpoint = self.endpoint.as_ref().map_or(0, |endpoint| endpoint.penalty(now_ms));
        self.replica.penalty(now_ms).saturating_add(of_endpoint)
    }
}

/// How old a snapshot may be before a replica that it calls down is tried again.
const STALE_MS: u64 = 30_000;

const SAME_MOMENT_MS: u64 = 1_000;

/// Requests in flight by a gauge that may stand below zero for a moment.
pub(crate) fn in_flight(host: &impl Host, gauge: MetricId) -> Result<u64, HostError> {
    Ok(u64::try_from(host.value(gauge)?.cast_signed()).unwrap_or(0))
}

/// How many replicas are at each address.
pub(crate) fn ranks<'a>(names: impl Iterator<Item = &'a ReplicaName>) -> HashMap<SocketAddr, u32> {
    let mut ranks: HashMap<_, u32> = HashMap::new();
    for name in names {
        let count = ranks.entry(name.address).or_default();
        *count = count.saturating_add(1);
    }
    ranks
}

/// One rank's part of what only its endpoint is known of: the engine spreads it over its ranks.
pub(crate) fn part(of_endpoint: u64, ranks: u32) -> u64 {
    of_endpoint.div_ceil(ranks.max(1).into())
}

fn define_events(host: &impl Host, pool: &str) -> Result<[MetricId; AdmissionEvent::ALL.len()], HostError> {
    let mut events = [MetricId(0); AdmissionEvent::ALL.len()];
    for (id, event) in events.iter_mut().zip(AdmissionEvent::ALL) {
        *id = host.define(&Metric::Admission { pool, event })?;
    }
    Ok(events)
}

pub(crate) fn define_prompts(host: &impl Host, pool: &str) -> Result<[MetricId; PromptPart::ALL.len()], HostError> {
    let mut prompts = [MetricId(0); PromptPart::ALL.len()];
    for (id, part) in prompts.iter_mut().zip(PromptPart::ALL) {
        *id = host.define(&Metric::Prompts { pool, part })?;
    }
    Ok(prompts)
}

/// What a pool was like when nobody in its line was called.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    working_set: u64,
    snapshot: Option<u64>,
    /// The moment from which time alone may change that.
    until_ms: u64,
}

/// A pool as one thread sees it.
#[derive(Debug)]
pub struct Pool {
    /// What the operator decided.
    pub policy: Policy,
    /// Names its conversations.
    pub namer: Namer,
    pub(crate) cluster: Rc<str>,
    pub(crate) ledger_key: String,
    pub(crate) members: Vec<Member>,
    /// Requests that were sent to no replica and answered by none, and those served by an endpoint outside the snapshot.
    pub(crate) unserved: Requests,
    pub(crate) strangers: Requests,
    /// Whether some replica takes turns, and whether some is a rank.
    pub(crate) has_ready: bool,
    /// Whether the last snapshot is so old that a replica it calls down may have come back.
    is_stale: bool,
    pub(crate) age: MetricId,
    pub(crate) has_ranks: bool,
    indices: HashMap<ReplicaId, usize>,
    pub(crate) registry: Registry,
    version: MetricId,
    version_read: Option<u64>,
    received_ms: Option<u64>,
    /// How far the fleet's clock is ahead of this machine's, in milliseconds.
    clock_ahead_ms: i64,
    /// Whether other Envoys place conversations on these replicas too.
    pub(crate) has_peers: bool,
    /// What admission needs: the working set, what is known of the pool's texts, the replicas that take turns, think times.
    pub(crate) working_set: Rc<SharedSet>,
    pub(crate) texts: Texts,
    rooms: Rooms,
    think: RefCell<ThinkTimes>,
    /// When nobody in line was called, and until when nobody will be.
    quiet: Cell<Option<Quiet>>,
    admission_events: [MetricId; AdmissionEvent::ALL.len()],
    admission_wait: MetricId,
    prompts: [MetricId; PromptPart::ALL.len()],
}

impl Pool {
    pub(crate) fn new(host: &impl Host, policy: Policy, key: &[u8; 16]) -> Result<Self, HostError> {
        let version = host.define(&Metric::SnapshotVersion { pool: &policy.cluster })?;
        let mut pool = Self {
            cluster: Rc::from(policy.cluster.as_str()),
            ledger_key: ledger_key(&policy.cluster),
            namer: Namer::new(policy.naming.clone(), key, &policy.cluster),
            members: Vec::new(),
            unserved: Requests::new(NO_REPLICA),
            strangers: Requests::new(OTHER_REPLICA),
            has_ready: false,
            is_stale: false,
            age: host.define(&Metric::SnapshotAge { pool: &policy.cluster })?,
            has_ranks: false,
            indices: HashMap::new(),
            registry: Registry::default(),
            version,
            version_read: None,
            received_ms: None,
            clock_ahead_ms: 0,
            has_peers: false,
            working_set: Rc::new(SharedSet::new(host, &policy.cluster)?),
            texts: Texts::default(),
            rooms: Rooms::default(),
            think: RefCell::default(),
            quiet: Cell::new(None),
            admission_events: define_events(host, &policy.cluster)?,
            admission_wait: host.define(&Metric::AdmissionWait { pool: &policy.cluster })?,
            prompts: define_prompts(host, &policy.cluster)?,
            policy,
        };
        let configured: Vec<_> = pool.policy.replicas.iter().map(|name| (*name, Figures::default())).collect();
        pool.set_members(host, &configured)?;
        Ok(pool)
    }

    /// Reads the newest snapshot, if it is another than the one read last.
    pub(crate) fn refresh(&mut self, host: &impl Host, now_ms: u64) -> Result<(), HostError> {
        let version = host.value(self.version)?;
        if self.version_read == Some(version) {
            let is_stale = self.snapshot_age_ms(now_ms).is_some_and(|age_ms| age_ms > STALE_MS);
            if is_stale != self.is_stale {
                self.is_stale = is_stale;
                self.find_ready();
            }
            return Ok(());
        }
        self.is_stale = false;
        let stored = host.read(&snapshot_key(&self.policy.cluster))?;
        if let Some(snapshot) = stored.and_then(|stored| Snapshot::decode(&stored.bytes)) {
            self.texts = snapshot.texts;
            self.set_members(host, &snapshot.replicas)?;
            self.received_ms = Some(snapshot.received_ms);
            self.clock_ahead_ms = snapshot.clock_ahead_ms;
            self.has_peers = snapshot.has_peers;
        }
        self.version_read = Some(version);
        Ok(())
    }

    fn set_members(&mut self, host: &impl Host, replicas: &[(ReplicaName, Figures)]) -> Result<(), HostError> {
        let cluster = &self.policy.cluster;
        let ranks = ranks(replicas.iter().map(|(name, _)| name));
        let member = |(name, figures): &(ReplicaName, Figures)| {
            let endpoint = name.rank.map(|_| ReplicaName::endpoint(name.address));
            let endpoint = endpoint.map(|endpoint| self.registry.replica(host, cluster, &endpoint)).transpose()?;
            let ranks = ranks.get(&name.address).copied().unwrap_or(1);
            Ok(Member { replica: self.registry.replica(host, cluster, name)?, endpoint, ranks, figures: *figures })
        };
        self.members = replicas.iter().map(member).collect::<Result<_, _>>()?;
        self.find_ready();
        self.has_ranks = self.members.iter().any(|member| member.endpoint.is_some());
        self.indices = self.members.iter().enumerate().map(|(index, member)| (member.replica.id, index)).collect();
        Ok(())
    }

    fn find_ready(&mut self) {
        let room = |member: &Member| Room { replica: member.replica.id, cache_tokens: member.figures.cache_tokens };
        self.rooms = self.members.iter().filter(|member| self.is_ready(member)).map(room).collect();
        self.has_ready = !self.rooms.is_empty();
        self.quiet.set(None);
    }

    /// The rules of admission now.
    pub(crate) fn terms(&self, now_ms: u64) -> Terms<'_> {
        let admission = self.policy.admission.unwrap_or_default();
        let grace_ms = self.think.try_borrow().map_or(admission.min_grace_ms, |think| think.grace_ms(&admission));
        Terms {
            now_ms,
            grace_ms,
            patience_ms: admission.patience_ms(),
            shared_tokens: self.texts.shared_tokens,
            rooms: &self.rooms,
        }
    }

    /// Notes how long a client has thought.
    pub(crate) fn hear(&self, think_ms: u64) {
        if let Ok(mut think) = self.think.try_borrow_mut() {
            think.heard(think_ms);
            self.quiet.set(None);
        }
    }

    /// Those in line whose turn it is. While nothing changes this costs a look at a gauge.
    pub(crate) fn called(&self, host: &impl Host, now_ms: u64) -> Result<Vec<u64>, HostError> {
        let working_set = self.working_set.version(host)?;
        let is_quiet =
            |quiet: Quiet| (quiet.working_set, quiet.snapshot) == (working_set, self.version_read) && now_ms < quiet.until_ms;
        if self.quiet.get().is_some_and(is_quiet) {
            return Ok(Vec::new());
        }
        let terms = self.terms(now_ms);
        let mut set = self.working_set.open(host)?;
        terms.tidy(&mut set);
        let called = terms.called(&set);
        let quiet = Quiet { working_set, snapshot: self.version_read, until_ms: terms.next_change_ms(&set) };
        self.quiet.set(called.is_empty().then_some(quiet));
        Ok(called)
    }

    pub(crate) fn count_admission(&self, host: &impl Host, event: AdmissionEvent) -> Result<(), HostError> {
        let counter = AdmissionEvent::ALL.iter().zip(&self.admission_events).find(|(known, _)| **known == event);
        counter.map_or(Ok(()), |(_, counter)| host.add(*counter, 1))
    }

    /// Counts a request's prompt that was served: its bytes, and how many of them the replica had read before.
    pub(crate) fn count_prompt(&self, host: &impl Host, bytes: u32, repeated: u32) -> Result<(), HostError> {
        let [all, again, first] = self.prompts;
        // Counters take only positive amounts.
        if bytes > 0 {
            host.add(all, bytes.into())?;
        }
        if repeated > 0 { host.add(again, repeated.into()) } else { host.add(first, 1) }
    }

    pub(crate) fn count_wait(&self, host: &impl Host, ms: u64) -> Result<(), HostError> {
        // Counters take only positive amounts.
        if ms == 0 { Ok(()) } else { host.add(self.admission_wait, i64::try_from(ms).unwrap_or(i64::MAX)) }
    }

    /// The replicas of the newest snapshot this thread has read.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    pub(crate) fn member(&self, id: ReplicaId) -> Option<&Member> {
        self.members.get(self.index_of(id)?)
    }

    /// Where a replica stands in the list.
    pub(crate) fn index_of(&self, id: ReplicaId) -> Option<usize> {
        self.indices.get(&id).copied()
    }

    /// Whether a replica takes turns.
    pub fn is_ready(&self, member: &Member) -> bool {
        match member.figures.state {
            ReplicaState::Ready => true,
            // Nobody will say that it is back. If it is not, a retry goes on to the next address.
            ReplicaState::Down => self.is_stale,
            ReplicaState::Draining | ReplicaState::Asleep => false,
        }
    }

    /// The replicas that take turns, for a message.
    pub(crate) fn ready_names(&self) -> String {
        let ready: Vec<_> = self.members.iter().filter(|m| self.is_ready(m)).map(|m| m.replica.name.to_string()).collect();
        ready.join(", ")
    }

    /// The pool's ledger, a line for each member.
    pub(crate) fn open_ledger(&self, host: &impl Host) -> Result<Ledger, HostError> {
        Ledger::open(host, &self.ledger_key, self.members.iter().map(|member| member.replica.id))
    }

    /// Whether a snapshot has ever come.
    pub(crate) fn has_snapshot(&self) -> bool {
        self.received_ms.is_some()
    }

    /// Milliseconds since the last snapshot came; `None` if none ever did.
    pub(crate) fn snapshot_age_ms(&self, now_ms: u64) -> Option<u64> {
        // A snapshot that another thread took in this very moment is new; one of a later time is from a clock set back since.
        let received_ms = self.received_ms?;
        now_ms.checked_sub(received_ms).or_else(|| (received_ms.abs_diff(now_ms) < SAME_MOMENT_MS).then_some(0))
    }

    /// The time by the fleet's clock, in milliseconds since 1970.
    pub(crate) fn fleet_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add_signed(self.clock_ahead_ms)
    }

    /// A replica's load in requests: what others have there, as far as its figures are not older than `max_age_ms`, and what
    /// this Envoy has in flight there now, with a rank's part of what its endpoint has.
    pub(crate) fn load(&self, host: &impl Host, member: &Member, now_ms: u64, max_age_ms: u64) -> Result<u32, HostError> {
        let of_endpoint = member.endpoint.as_ref().map_or(Ok(0), |endpoint| in_flight(host, endpoint.in_flight))?;
        let own = in_flight(host, member.replica.in_flight)?.saturating_add(part(of_endpoint, member.ranks));
        let own = u32::try_from(own).unwrap_or(u32::MAX);
        let age_ms = self.snapshot_age_ms(now_ms).map_or(u64::MAX, |age| age.saturating_add(member.figures.age_ms));
        Ok(if age_ms <= max_age_ms { own.saturating_add(member.figures.others) } else { own })
    }
}

pub(crate) fn snapshot_key(cluster: &str) -> String {
    format!("homing/pool/{cluster}/snapshot")
}
