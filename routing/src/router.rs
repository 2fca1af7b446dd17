//! The decision: which replica a request goes to, and what is learned from where it went.

use std::rc::Rc;

use hashbrown::HashMap;

use crate::bindings::{self, Bound};
use crate::host::{Host, HostError, MetricId};
use crate::identity::{Conversation, Digest};
use crate::ledger::Ledger;
use crate::metric::{ErrorKind, Metric};
use crate::outcome::Outcome;
use crate::policy::{Policy, Terms};
use crate::pool::{Member, Pool, Replica};
use crate::replica::ReplicaId;
use crate::table::{Entry, Table};

/// How often a value that other threads change too is tried.
const TRIES: usize = 3;

/// Addresses a retry may go to, behind the chosen one.
const ALTERNATES: usize = 2;

/// Replicas looked at to find the alternates of a turn that stays at home.
const ALTERNATES_SAMPLED: usize = 8;

/// Turns in a row at the second home after which it becomes the home.
const TURNS_AWAY: u8 = 2;

/// Settings that hold for every pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Makes conversation digests unpredictable; the same on every Envoy of a fleet.
    pub hash_key: [u8; 16],
    /// Conversations remembered, of all pools together.
    pub max_conversations: u32,
    /// After how many seconds without a turn a conversation is no longer held.
    pub idle_s: u32,
    /// After how many milliseconds a snapshot's load counts for nothing.
    pub snapshot_max_age_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { hash_key: [0; 16], max_conversations: 65_536, idle_s: 600, snapshot_max_age_ms: 5_000 }
    }
}

/// One request, as far as the decision needs it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// The conversation, if one was named.
    pub conversation: Option<&'a Conversation>,
    /// Whether it generates: a call that does not follows a home but makes none.
    pub generates: bool,
    /// The replica the client named.
    pub pin: Option<&'a str>,
    /// The size of its body in bytes, 0 when unknown.
    pub bytes: u32,
}

/// What to do with a request.
#[derive(Debug)]
pub enum Verdict<H: Host> {
    /// Send it to the ticket's addresses, in their order; none means that Envoy chooses.
    Go(Ticket<H>),
    /// Refuse it with a 400: the client named a replica it cannot have.
    Refuse(String),
}

/// A decided request, until its stream ends. Dropping it gives its in-flight back.
#[derive(Debug)]
pub struct Ticket<H: Host> {
    cluster: Rc<str>,
    planned: Outcome,
    conversation: Option<Digest>,
    bytes: u32,
    chosen: Option<Rc<Replica>>,
    alternates: Vec<Rc<Replica>>,
    in_flight: Option<InFlight<H>>,
    served: Option<Served>,
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
}

impl<H: Host> Ticket<H> {
    /// The chosen replica.
    pub fn chosen(&self) -> Option<&Replica> {
        self.chosen.as_deref()
    }

    /// Every address the request may go to, the chosen one first.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.chosen.iter().chain(&self.alternates).map(|replica| replica.address.as_str())
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
struct InFlight<H: Host> {
    host: H,
    gauge: MetricId,
}

impl<H: Host> InFlight<H> {
    fn reserve(host: &H, gauge: MetricId) -> Result<Self, HostError> {
        host.add(gauge, 1)?;
        Ok(Self { host: host.clone(), gauge })
    }
}

impl<H: Host> Drop for InFlight<H> {
    fn drop(&mut self) {
        // The gauge was there when this was made and Envoy forgets none, so it cannot be refused.
        let _ = self.host.add(self.gauge, -1);
    }
}

/// A replica taken for a request.
struct Taken<H: Host> {
    replica: Rc<Replica>,
    in_flight: InFlight<H>,
    outcome: Outcome,
}

/// Routes the requests of one thread.
#[derive(Debug)]
pub struct Router<H: Host> {
    host: H,
    settings: Settings,
    table: Table,
    pools: HashMap<Box<[u8]>, Pool>,
    errors: HashMap<ErrorKind, MetricId>,
}

impl<H: Host> Router<H> {
    /// A router for these pools. Takes the affinity table's memory.
    ///
    /// # Errors
    /// When the host refuses shared data or metrics.
    pub fn new(host: H, settings: Settings, policies: Vec<Policy>) -> Result<Self, HostError> {
        let table = Table::new(settings.max_conversations, settings.idle_s);
        table.prepare(&host)?;
        let mut pools = HashMap::new();
        for policy in policies {
            Terms::of(&policy).publish(&host, &policy.cluster)?;
            let cluster = policy.cluster.as_bytes().into();
            pools.insert(cluster, Pool::new(&host, policy, &settings.hash_key)?);
        }
        Ok(Self { host, settings, table, pools, errors: HashMap::new() })
    }

    /// The pool behind an Envoy cluster.
    pub fn pool(&self, cluster: &[u8]) -> Option<&Pool> {
        self.pools.get(cluster)
    }

    pub(crate) fn host(&self) -> &H {
        &self.host
    }

    /// Every pool, each with its newest snapshot.
    pub(crate) fn refreshed_pools(&mut self) -> Result<impl Iterator<Item = &Pool>, HostError> {
        for pool in self.pools.values_mut() {
            pool.refresh(&self.host)?;
        }
        Ok(self.pools.values())
    }

    /// Every pool.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values()
    }

    /// The affinity table.
    pub fn table(&self) -> Table {
        self.table
    }

    /// Counts something that should not have happened.
    pub fn count_error(&mut self, kind: ErrorKind, amount: u64) {
        let host = &self.host;
        let counter = self.errors.get(&kind).copied().or_else(|| host.define(&Metric::Errors { kind }).ok());
        if let Some(counter) = counter {
            self.errors.insert(kind, counter);
            // Nothing is left to tell of a refused error count.
            let _ = host.add(counter, i64::try_from(amount).unwrap_or(i64::MAX));
        }
    }

    /// Decides where a request goes. `None` if no pool is behind the cluster.
    ///
    /// Whatever the host refuses on the way is counted, and the choice left to Envoy.
    pub fn decide(&mut self, cluster: &[u8], request: &Request<'_>) -> Option<Verdict<H>> {
        let pool = self.pools.get_mut(cluster)?;
        let refreshed = pool.refresh(&self.host);
        let decided = refreshed.and_then(|()| self.try_decide(cluster, request));
        let verdict = decided.unwrap_or_else(|_| {
            self.count_error(ErrorKind::Host, 1);
            None
        });
        Some(verdict.unwrap_or_else(|| Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new()))))
    }

    /// `None` leaves the choice to Envoy.
    fn try_decide(&mut self, cluster: &[u8], request: &Request<'_>) -> Result<Option<Verdict<H>>, HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        if !pool.policy.affinity || !pool.members.iter().any(Member::is_ready) {
            return Ok(None);
        }
        if let Some(pin) = request.pin {
            return self.pinned(cluster, pool, request, pin).map(Some);
        }
        let taken = match request.conversation {
            Some(conversation) => self.turn(cluster, conversation.digest, request)?,
            None => self.place(pool, Outcome::Unkeyed)?,
        };
        let Some(taken) = taken else { return Ok(None) };
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        let alternates = self.alternates(pool, &taken.replica)?;
        Ok(Some(Verdict::Go(self.ticket(cluster, request, taken.outcome, Some((taken.replica, taken.in_flight)), alternates))))
    }

    fn ticket(
        &self,
        cluster: &[u8],
        request: &Request<'_>,
        planned: Outcome,
        taken: Option<(Rc<Replica>, InFlight<H>)>,
        alternates: Vec<Rc<Replica>>,
    ) -> Ticket<H> {
        let (chosen, in_flight) = taken.unzip();
        let conversation = request.conversation.map(|conversation| conversation.digest);
        let cluster = self.pools.get(cluster).map_or_else(|| Rc::from(""), |pool| Rc::clone(&pool.cluster));
        Ticket { cluster, planned, conversation, bytes: request.bytes, chosen, alternates, in_flight, served: None }
    }

    /// The replica a client named, or why it cannot have it.
    fn pinned(&self, cluster: &[u8], pool: &Pool, request: &Request<'_>, pin: &str) -> Result<Verdict<H>, HostError> {
        if !pool.policy.client_pin {
            return Ok(Verdict::Refuse(format!("the pool `{}` does not let clients name a replica", pool.policy.cluster)));
        }
        let named = pin.trim().parse().ok().and_then(|name: crate::replica::ReplicaName| pool.member(name.id()));
        let Some(member) = named.filter(|member| member.is_ready()) else {
            let ready: Vec<_> = pool.members.iter().filter(|m| m.is_ready()).map(|m| m.replica.name.to_string()).collect();
            let named: String = pin.chars().take(80).collect();
            return Ok(Verdict::Refuse(format!(
                "`{named}` is no ready replica of `{}`: use {}",
                pool.policy.cluster,
                ready.join(", ")
            )));
        };
        let in_flight = InFlight::reserve(&self.host, member.replica.in_flight)?;
        let taken = Some((Rc::clone(&member.replica), in_flight));
        Ok(Verdict::Go(self.ticket(cluster, request, Outcome::Pinned, taken, Vec::new())))
    }

    /// Routes one turn of a conversation and remembers where it went. `None` if no replica is ready.
    fn turn(&mut self, cluster: &[u8], digest: Digest, request: &Request<'_>) -> Result<Option<Taken<H>>, HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        let now_s = now_s(&self.host);
        let mut last = None;
        for _ in 0..TRIES {
            // A try that lost the race gives back what it had reserved.
            drop(last.take());
            let bucket = self.table.open(&self.host, digest)?;
            let known = self.table.entry(&bucket, now_s);
            let home = known.and_then(|entry| pool.member(entry.home)).filter(|home| home.is_ready());
            if !request.generates {
                return home.map_or_else(|| self.place(pool, Outcome::Unkeyed), |home| self.take(home, Outcome::Sticky).map(Some));
            }
            let taken = match (known, home) {
                (Some(entry), Some(home)) => Some(self.turn_at_home(pool, home, entry.second)?),
                (Some(_), None) => self.place(pool, Outcome::Rehomed)?,
                (None, _) => self.place(pool, Outcome::Placed)?,
            };
            let Some(taken) = taken else { return Ok(None) };
            let (entry, binds) = remembered(known, digest, &taken, request.bytes, now_s);
            if self.table.store(&self.host, bucket, &entry)? {
                if binds {
                    self.journal(&entry)?;
                }
                return Ok(Some(taken));
            }
            last = Some(taken);
        }
        self.count_error(ErrorKind::Contended, 1);
        Ok(last)
    }

    /// A turn of a conversation whose home is ready.
    fn turn_at_home(&self, pool: &Pool, home: &Member, second: Option<ReplicaId>) -> Result<Taken<H>, HostError> {
        let load = self.load(pool, home)?;
        let full = load > pool.policy.threshold(&home.figures);
        let elsewhere = if full { self.elsewhere(pool, home, load, second)? } else { None };
        let (member, outcome) = elsewhere.map_or((home, Outcome::Sticky), |member| (member, Outcome::Spilled));
        self.take(member, outcome)
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
        for member in pool.members.iter().filter(|member| member.is_ready() && member.replica.id != home.replica.id) {
            let load = self.load(pool, member)?;
            let pays = load <= pool.policy.threshold(&member.figures) && load.saturating_add(margin) <= home_load;
            let cost = if Some(member.replica.id) == second { load.saturating_sub(margin) } else { load };
            if pays && best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, member));
            }
        }
        Ok(best.map(|(_, member)| member))
    }

    /// The least loaded replica; ties go to the one with the fewest held conversations, then the least KV cache in use, then the
    /// one chosen the longest ago. `None` if no replica is ready.
    fn place(&self, pool: &Pool, outcome: Outcome) -> Result<Option<Taken<H>>, HostError> {
        let mut last = None;
        for _ in 0..TRIES {
            drop(last.take());
            let mut ledger = Ledger::open(&self.host, &pool.policy.cluster)?;
            let mut best = None;
            for member in pool.members.iter().filter(|member| member.is_ready()) {
                let line = ledger.line(member.replica.id);
                // KV usage in sixteenths: less is noise of the moment.
                let kv_usage = (member.figures.kv_usage * 16.0) as u32;
                let rank = (self.load(pool, member)?, line.held, kv_usage, line.last_chosen);
                if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                    best = Some((rank, member));
                }
            }
            let Some((_, member)) = best else { return Ok(None) };
            // Reserved before the ledger is swapped: a thread that finds the ledger changed finds this in flight too.
            let taken = self.take(member, outcome)?;
            ledger.chosen(taken.replica.id, outcome != Outcome::Unkeyed);
            if ledger.store(&self.host)? {
                return Ok(Some(taken));
            }
            last = Some(taken);
        }
        Ok(last)
    }

    fn take(&self, member: &Member, outcome: Outcome) -> Result<Taken<H>, HostError> {
        let in_flight = InFlight::reserve(&self.host, member.replica.in_flight)?;
        Ok(Taken { replica: Rc::clone(&member.replica), in_flight, outcome })
    }

    fn load(&self, pool: &Pool, member: &Member) -> Result<u32, HostError> {
        pool.load(&self.host, member, self.settings.snapshot_max_age_ms)
    }

    /// Where a retry may go: the least loaded of a few ready replicas at other addresses. A rank is sent once for every attempt,
    /// so only replicas of the same rank will do.
    fn alternates(&self, pool: &Pool, chosen: &Replica) -> Result<Vec<Rc<Replica>>, HostError> {
        // Starts behind the chosen one, so that the retries of one replica's failure spread.
        let start = pool.members.iter().position(|member| member.replica.id == chosen.id).map_or(0, |at| at.saturating_add(1));
        let others = pool.members.iter().cycle().skip(start).take(pool.members.len());
        let fits =
            |m: &&Member| m.is_ready() && m.replica.name.address != chosen.name.address && m.replica.name.rank == chosen.name.rank;
        let mut ranked = Vec::with_capacity(ALTERNATES_SAMPLED);
        for member in others.filter(fits).take(ALTERNATES_SAMPLED) {
            ranked.push((self.load(pool, member)?, Rc::clone(&member.replica)));
        }
        ranked.sort_by_key(|(load, _)| *load);
        Ok(ranked.into_iter().take(ALTERNATES).map(|(_, replica)| replica).collect())
    }

    /// Learns where a request is served: `address` answered it. Rebinds the conversation if a retry moved it.
    pub fn served(&mut self, ticket: &mut Ticket<H>, address: &str) {
        let moved = ticket.chosen.as_ref().is_some_and(|chosen| chosen.address != address);
        let stays = !moved && ticket.chosen.is_some();
        let replica = if stays { ticket.chosen.clone() } else { self.find(ticket, address) };
        let outcome = match (&replica, ticket.planned) {
            (_, planned) if stays => planned,
            (None, _) | (_, Outcome::Pinned) => Outcome::Passed,
            (Some(_), Outcome::Sticky) => Outcome::Rehomed,
            (Some(_), planned) => planned,
        };
        let mut served = Served { outcome, replica, moved };
        if !stays && let Some(replica) = served.replica.clone() {
            if let Err(_refused) = self.moved(ticket, &replica, &mut served) {
                self.count_error(ErrorKind::Host, 1);
            }
        }
        ticket.served = Some(served);
    }

    /// Moves what was reserved and remembered to the replica that really serves the request.
    fn moved(&mut self, ticket: &mut Ticket<H>, replica: &Rc<Replica>, served: &mut Served) -> Result<(), HostError> {
        ticket.in_flight = Some(InFlight::reserve(&self.host, replica.in_flight)?);
        let binds = matches!(ticket.planned, Outcome::Sticky | Outcome::Placed | Outcome::Rehomed);
        let Some(digest) = ticket.conversation.filter(|_| binds || ticket.planned == Outcome::Spilled) else { return Ok(()) };
        let now_s = now_s(&self.host);
        for _ in 0..TRIES {
            let bucket = self.table.open(&self.host, digest)?;
            let Some(mut entry) = self.table.entry(&bucket, now_s) else { return Ok(()) };
            if binds {
                entry = Entry { home: replica.id, home_bytes: ticket.bytes, ..entry };
            } else if entry.home == replica.id {
                served.outcome = Outcome::Sticky;
                return Ok(());
            } else {
                entry = Entry { second: Some(replica.id), second_bytes: ticket.bytes, ..entry };
            }
            if self.table.store(&self.host, bucket, &entry)? {
                return if binds { self.journal(&entry) } else { Ok(()) };
            }
        }
        self.count_error(ErrorKind::Contended, 1);
        Ok(())
    }

    fn find(&self, ticket: &Ticket<H>, address: &str) -> Option<Rc<Replica>> {
        let rank = ticket.chosen.as_ref().and_then(|chosen| chosen.name.rank);
        let pool = self.pools.get(ticket.cluster.as_bytes())?;
        let at = |member: &&Member| member.replica.address == address && (member.replica.name.rank == rank);
        pool.members.iter().find(at).map(|member| Rc::clone(&member.replica))
    }

    /// Counts a request whose stream has ended and gives its in-flight back.
    pub fn ended(&mut self, ticket: Ticket<H>) {
        let Some(pool) = self.pools.get(ticket.cluster.as_bytes()) else { return };
        let (requests, outcome) = match &ticket.served {
            None => (&pool.unserved, Outcome::Unserved),
            Some(Served { replica: Some(replica), outcome, .. }) => (&replica.requests, *outcome),
            Some(Served { replica: None, outcome, .. }) => (&pool.strangers, *outcome),
        };
        if requests.count(&self.host, &pool.policy.cluster, outcome).is_err() {
            self.count_error(ErrorKind::Host, 1);
        }
    }

    fn journal(&mut self, entry: &Entry) -> Result<(), HostError> {
        let bound = Bound { digest: entry.digest, home: entry.home, last_turn: entry.last_turn };
        let dropped = bindings::append(&self.host, bound)?;
        if dropped > 0 {
            self.count_error(ErrorKind::BindingDropped, dropped);
        }
        Ok(())
    }
}

/// What is remembered of a conversation after this turn, and whether its home is new.
fn remembered<H: Host>(known: Option<Entry>, digest: Digest, taken: &Taken<H>, bytes: u32, now_s: u32) -> (Entry, bool) {
    let replica = taken.replica.id;
    let fresh = Entry { digest, home: replica, second: None, home_bytes: bytes, second_bytes: 0, last_turn: now_s, turns_away: 0 };
    match (known, taken.outcome) {
        (Some(entry), Outcome::Sticky) => (Entry { home_bytes: bytes, last_turn: now_s, turns_away: 0, ..entry }, false),
        (Some(entry), Outcome::Spilled) => {
            let again = entry.second == Some(replica);
            let turns_away = if again { entry.turns_away.saturating_add(1) } else { 1 };
            if turns_away >= TURNS_AWAY {
                let (second, second_bytes) = (Some(entry.home), entry.home_bytes);
                (Entry { second, second_bytes, ..fresh }, true)
            } else {
                (Entry { second: Some(replica), second_bytes: bytes, last_turn: now_s, turns_away, ..entry }, false)
            }
        }
        _ => (fresh, true),
    }
}

/// Seconds since 1970, as the table keeps them.
pub(crate) fn now_s(host: &impl Host) -> u32 {
    u32::try_from(host.now_ms() / 1000).unwrap_or(u32::MAX)
}
