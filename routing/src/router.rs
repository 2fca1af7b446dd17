//! The decision: which replica a request goes to, and what is learned from where it went.

mod admit;
mod choose;
mod heal;
mod learn;
mod ticket;

use core::cell::Cell;
use core::hash::Hasher;
use std::rc::Rc;

use hashbrown::HashMap;
use siphasher::sip::SipHasher24;

use crate::binding::AHEAD_MS;
use crate::host::{Host, HostError, TRIES};
use crate::identity::{Conversation, Digest};
use crate::journal;
use crate::lanes::{Lane, PoolList};
use crate::metric::{ErrorKind, Errors};
use crate::outcome::Outcome;
use crate::policy::{Policy, Terms};
use crate::pool::{Pool, Replica};
use crate::replica::{ReplicaId, ReplicaName};
use crate::shared::Shared;
use crate::since;
use crate::table::{Entry, Table};
pub use admit::Held;
pub use learn::Answer;
use ticket::Taken;
pub use ticket::{Served, Ticket};

/// How often other Envoys are told that a conversation is still active, at most; they forget it after the idle time.
const RENEWED_S: u32 = 60;

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
    /// Turns in a row at the second home after which it becomes the home; no operator's business, but measured.
    pub turns_away: u8,
}

impl Default for Settings {
    fn default() -> Self {
        Self { hash_key: [0; 16], max_conversations: 65_536, idle_s: 600, snapshot_max_age_ms: 5_000, turns_away: 2 }
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
    /// The data-parallel rank the client named.
    pub rank: Option<u16>,
    /// Whether the engine ignores the rank it is sent for this call, so that only the endpoint can be chosen.
    pub ignores_rank: bool,
    /// The size of its body in bytes, 0 when unknown.
    pub bytes: u32,
}

/// What to do with a request.
#[derive(Debug)]
pub enum Verdict<H: Host> {
    /// Send it to the ticket's addresses, in their order; none means that Envoy chooses.
    Go(Ticket<H>),
    /// Hold it: its conversation has no place yet. Ask again with [`Router::retry`] when [`Router::called`] names it.
    Hold(Held<H>),
    /// Refuse it with a 400: the client named a replica it cannot have.
    Refuse(String),
    /// Refuse it with a 429: no place is free, and none soon.
    Busy {
        /// Seconds after which the client should try again.
        after_s: u32,
    },
}

/// Routes the requests of one thread.
#[derive(Debug)]
pub struct Router<H: Host> {
    host: H,
    settings: Settings,
    table: Table,
    pools: HashMap<Box<[u8]>, Pool>,
    errors: Errors,
    /// This thread's lane, taken with its first request.
    lane: Cell<Option<Lane>>,
    /// Whether there was none to take; the next tick tries again.
    lanes_are_out: Cell<bool>,
    /// Which pools this thread routes, as others that may settle its lane are told.
    pool_list: PoolList,
    /// The time of the decision under way: the host is asked once for each.
    now_ms: u64,
    /// Numbers this thread's requests in line.
    next_held: Cell<u64>,
}

impl<H: Host> Router<H> {
    /// A router for these pools. Takes the affinity table's memory.
    ///
    /// # Errors
    /// When the host refuses shared data or metrics.
    pub fn new(host: H, settings: Settings, policies: Vec<Policy>) -> Result<Self, HostError> {
        let table = Table::new(settings.max_conversations, settings.idle_s);
        table.prepare(&host)?;
        since::note(&host)?;
        Shared::of(&settings).publish(&host)?;
        let mut clusters: Vec<_> = policies.iter().map(|policy| policy.cluster.as_str()).collect();
        clusters.sort_unstable();
        let mut hasher = SipHasher24::new();
        hasher.write(clusters.join("\0").as_bytes());
        let pool_list = PoolList(hasher.finish());
        let mut pools = HashMap::new();
        for policy in policies {
            Terms::of(&policy).publish(&host, &policy.cluster)?;
            let cluster = policy.cluster.as_bytes().into();
            pools.insert(cluster, Pool::new(&host, policy, &settings.hash_key)?);
        }
        Ok(Self {
            host,
            settings,
            table,
            pools,
            errors: Errors::default(),
            lane: Cell::new(None),
            lanes_are_out: Cell::new(false),
            pool_list,
            now_ms: 0,
            next_held: Cell::new(0),
        })
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
        self.now_ms = self.host.now_ms();
        for pool in self.pools.values_mut() {
            pool.refresh(&self.host, self.now_ms)?;
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
        // Nothing is left to tell of a refused error count.
        let _ = self.errors.count(&self.host, kind, amount);
    }

    /// Decides where a request goes. `None` if no pool is behind the cluster.
    ///
    /// Whatever the host refuses on the way is counted, and the choice left to Envoy.
    pub fn decide(&mut self, cluster: &[u8], request: &Request<'_>) -> Option<Verdict<H>> {
        self.pools.get(cluster)?;
        let decided = self.refresh(cluster).and_then(|()| self.try_decide(cluster, request));
        let verdict = decided.unwrap_or_else(|_| {
            self.count_error(ErrorKind::Host, 1);
            None
        });
        Some(verdict.unwrap_or_else(|| Verdict::Go(self.ticket(cluster, request, Outcome::Passed, None, Vec::new()))))
    }

    /// Begins a decision: notes the time and reads the newest snapshot.
    fn refresh(&mut self, cluster: &[u8]) -> Result<(), HostError> {
        self.now_ms = self.host.now_ms();
        self.pools.get_mut(cluster).map_or(Ok(()), |pool| pool.refresh(&self.host, self.now_ms))
    }

    /// `None` leaves the choice to Envoy.
    fn try_decide(&mut self, cluster: &[u8], request: &Request<'_>) -> Result<Option<Verdict<H>>, HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        if !pool.policy.affinity || !pool.has_ready {
            return Ok(None);
        }
        if let Some(pin) = request.pin {
            return self.pinned(cluster, pool, request, pin).map(Some);
        }
        if let Some(rank) = request.rank.filter(|_| pool.has_ranks && !request.ignores_rank) {
            return self.pinned_rank(cluster, pool, request, rank).map(Some);
        }
        if Self::is_admitted_by_place(pool, request) {
            return self.admit(cluster, request);
        }
        let taken = match request.conversation {
            Some(conversation) => self.turn(cluster, conversation, request, None)?,
            None => self.place(pool, Outcome::Unkeyed, None, request)?,
        };
        let (Some(taken), Some(pool)) = (taken, self.pools.get(cluster)) else { return Ok(None) };
        let alternates = self.alternates(pool, taken.home, request.ignores_rank)?;
        Ok(Some(Verdict::Go(self.ticket(cluster, request, taken.outcome, Some(taken), alternates))))
    }

    fn ticket(
        &self,
        cluster: &[u8],
        request: &Request<'_>,
        planned: Outcome,
        taken: Option<Taken<H>>,
        alternates: Vec<Rc<Replica>>,
    ) -> Ticket<H> {
        let repeated = taken.as_ref().map_or(0, |taken| taken.read.min(request.bytes));
        let (chosen, in_flight) = taken.map(|taken| (taken.replica, taken.in_flight)).unzip();
        Ticket {
            cluster: self.pools.get(cluster).map_or_else(|| Rc::from(""), |pool| Rc::clone(&pool.cluster)),
            planned,
            conversation: request.conversation.map(|conversation| conversation.digest),
            bytes: request.bytes,
            repeated,
            generates: request.generates,
            ignores_rank: request.ignores_rank,
            chosen,
            alternates,
            in_flight,
            turn: None,
            served: None,
        }
    }

    /// The replica a client named, or why it cannot have it.
    fn pinned(&self, cluster: &[u8], pool: &Pool, request: &Request<'_>, pin: &str) -> Result<Verdict<H>, HostError> {
        if !pool.policy.client_pin {
            return Ok(denied(pool));
        }
        let named = pin.trim().parse().ok().and_then(|name: ReplicaName| pool.member(name.id()));
        let Some(member) = named.filter(|member| pool.is_ready(member)) else {
            let named: String = pin.chars().take(80).collect();
            let (pool, ready) = (&pool.policy.cluster, pool.ready_names());
            return Ok(Verdict::Refuse(format!("`{named}` is no ready replica of `{pool}`: use {ready}")));
        };
        let taken = self.take(pool, member, Outcome::Pinned, request)?;
        Ok(Verdict::Go(self.ticket(cluster, request, Outcome::Pinned, Some(taken), Vec::new())))
    }

    /// A replica of the rank a client named, or why it cannot have it.
    fn pinned_rank(&self, cluster: &[u8], pool: &Pool, request: &Request<'_>, rank: u16) -> Result<Verdict<H>, HostError> {
        if !pool.policy.client_pin {
            return Ok(denied(pool));
        }
        let conversation = request.conversation.map(|conversation| conversation.digest);
        let home = conversation.map_or(Ok(None), |conversation| self.home_of(conversation, seconds(self.now_ms)))?;
        let Some(taken) = self.place_at_rank(pool, rank, home, request)? else {
            let (pool, ready) = (&pool.policy.cluster, pool.ready_names());
            return Ok(Verdict::Refuse(format!("no replica of rank {rank} of `{pool}` is ready: use one of {ready}")));
        };
        let alternates = self.alternates(pool, taken.home, false)?;
        Ok(Verdict::Go(self.ticket(cluster, request, Outcome::Pinned, Some(taken), alternates)))
    }

    /// Routes one turn of a conversation and remembers where it went. With `admitted_at` it has its place there; otherwise it goes home, or
    /// where a new one goes. `None` if no replica is ready.
    fn turn(
        &mut self,
        cluster: &[u8],
        conversation: &Conversation,
        request: &Request<'_>,
        admitted_at: Option<ReplicaId>,
    ) -> Result<Option<Taken<H>>, HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(None) };
        let (now_s, digest) = (seconds(self.now_ms), conversation.digest);
        let mut last = None;
        for _ in 0..TRIES {
            // A try that lost the race gives back what it had reserved.
            drop(last.take());
            let bucket = self.table.open(&self.host, digest)?;
            // A home that was bound while this machine's clock was wrong must not win for ever.
            let latest_ms = pool.fleet_ms(self.now_ms).saturating_add(AHEAD_MS);
            let known =
                self.table.entry(&bucket, now_s).map(|known| Entry { bound_at_ms: known.bound_at_ms.min(latest_ms), ..known });
            let home = known.and_then(|entry| pool.member(entry.home)).filter(|home| pool.is_ready(home));
            if !request.generates {
                return home.map_or_else(
                    || self.place(pool, Outcome::Unkeyed, None, request),
                    |home| self.take(pool, home, Outcome::Sticky, request).map(Some),
                );
            }
            let taken = match (known, home) {
                (known, home) if admitted_at.is_some_and(|replica| home.is_none_or(|home| home.replica.id != replica)) => {
                    let outcome = if known.is_some() { Outcome::Rehomed } else { Outcome::Placed };
                    admitted_at.map_or(Ok(None), |replica| self.place_at(cluster, replica, outcome, request))?
                }
                (Some(entry), Some(home)) => Some(self.turn_at_home(pool, home, entry.second, request)?),
                (Some(_), None) => self.place(pool, Outcome::Rehomed, None, request)?,
                (None, _) => {
                    // A subagent shares the prefix of the conversation it began in.
                    let parent = conversation.parent.map_or(Ok(None), |parent| self.home_of(parent, now_s))?;
                    self.place(pool, Outcome::Placed, parent, request)?
                }
            };
            let Some(mut taken) = taken else { return Ok(None) };
            taken.read = known.map_or(0, |entry| entry.read_at(taken.home));
            let stays = taken.outcome == Outcome::Sticky;
            if stays && known.is_some_and(|entry| entry.is_fresh(request.bytes, now_s)) {
                return Ok(Some(taken));
            }
            let (entry, rebinds) = remembered(known, digest, &taken, request.bytes, self.moment(pool), self.settings.turns_away);
            let is_told = rebinds || known.is_some_and(|known| is_worth_telling(&known, &entry, self.settings.idle_s));
            if self.table.store(&self.host, bucket, &entry)? {
                if is_told {
                    self.journal(cluster, &entry)?;
                }
                return Ok(Some(taken));
            }
            last = Some(taken);
        }
        self.count_error(ErrorKind::Contended, 1);
        Ok(last)
    }

    fn home_of(&self, conversation: Digest, now_s: u32) -> Result<Option<ReplicaId>, HostError> {
        let bucket = self.table.open(&self.host, conversation)?;
        Ok(self.table.entry(&bucket, now_s).map(|entry| entry.home))
    }

    /// Notes an entry for the other Envoys.
    fn journal(&mut self, cluster: &[u8], entry: &Entry) -> Result<(), HostError> {
        let Some(pool) = self.pools.get(cluster) else { return Ok(()) };
        if !journal::append(&self.host, &entry.told(seconds(pool.fleet_ms(self.now_ms))))? {
            self.count_error(ErrorKind::BindingDropped, 1);
        }
        Ok(())
    }

    fn moment(&self, pool: &Pool) -> Moment {
        Moment { now_s: seconds(self.now_ms), fleet_ms: pool.fleet_ms(self.now_ms) }
    }
}

/// The time of a decision, by this machine's clock and by the fleet's.
#[derive(Clone, Copy)]
struct Moment {
    now_s: u32,
    fleet_ms: u64,
}

impl Moment {
    /// When a conversation gets a new home now: later than it got the one it had, as far as this Envoy knows.
    fn binds(self, known: Option<&Entry>) -> u64 {
        known.map_or(self.fleet_ms, |known| self.fleet_ms.max(known.bound_at_ms.saturating_add(1)))
    }
}

/// Whether other Envoys should hear of an entry whose home is the same: its last turn has come into another minute, or what the home
/// has read into another quarter of a power of two. Nothing has to be stored to know what they were told last.
fn is_worth_telling(before: &Entry, after: &Entry, idle_s: u32) -> bool {
    let period = RENEWED_S.min(idle_s / 8).max(1);
    // Each conversation's minutes begin at another second, so that they are not all told at once.
    let phase = (before.digest.0 as u32).checked_rem(period).unwrap_or(0);
    let minute = |entry: &Entry| entry.last_turn.saturating_add(phase).checked_div(period);
    let size = |bytes: u32| {
        let exponent = bytes.max(4).ilog2();
        (exponent, (bytes.max(4) >> exponent.saturating_sub(2)) & 3)
    };
    minute(before) != minute(after) || size(before.home_bytes) != size(after.home_bytes)
}

fn denied<H: Host>(pool: &Pool) -> Verdict<H> {
    Verdict::Refuse(format!("the pool `{}` does not let clients name a replica", pool.policy.cluster))
}

/// What is remembered of a conversation after this turn, and whether its home is new.
fn remembered<H: Host>(
    known: Option<Entry>,
    digest: Digest,
    taken: &Taken<H>,
    bytes: u32,
    moment: Moment,
    most_away: u8,
) -> (Entry, bool) {
    let (replica, now_s, bound_at_ms) = (taken.home, moment.now_s, moment.binds(known.as_ref()));
    let last_turn = now_s;
    let fresh =
        Entry { digest, home: replica, second: None, home_bytes: bytes, second_bytes: 0, last_turn, turns_away: 0, bound_at_ms };
    match (known, taken.outcome) {
        (Some(entry), Outcome::Sticky) => {
            let stays = Entry { home_bytes: bytes, last_turn, turns_away: 0, ..entry };
            // Of one home's sizes the larger wins elsewhere, so one that a client has made much smaller is bound anew.
            let shrank = bytes < entry.home_bytes.saturating_sub(entry.home_bytes / 8);
            (if shrank { Entry { bound_at_ms, ..stays } } else { stays }, shrank)
        }
        (Some(entry), Outcome::Spilled) => {
            let again = entry.second == Some(replica);
            let turns_away = if again { entry.turns_away.saturating_add(1) } else { 1 };
            if turns_away >= most_away {
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
pub(crate) fn seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
