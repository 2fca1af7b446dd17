//! Who has a place at which replica, and who waits for one: one shared value a pool, changed by compare-and-swap.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, MANY_TRIES, MetricId};
use crate::metric::Metric;
use crate::replica::ReplicaId;

const LAYOUT: u8 = 2;
/// The layout's number, the grace, and how many of either follow.
const HEADER_BYTES: usize = 1 + 4 + 4 + 4;
const PLACE_BYTES: usize = 8 + 8 + 8 + 8 + 4 + 2 + 2 + 1 + 1;
const WAITING_BYTES: usize = 8 + 8 + 8 + 8 + 8 + 8 + 4 + 1;

/// The most places that are kept: those of 64 replicas with 64 conversations each.
const MAX_PLACES: usize = 4096;

/// The most requests in line, whatever is configured.
pub const MAX_WAITING: usize = 4096;

/// How far ahead another thread's time may be.
const SAME_MOMENT_MS: u64 = 1_000;

/// How long a place with a turn in flight is believed without news of that turn.
const LEASE_MS: u64 = 600_000;

/// A conversation's place at a replica. It outlives its use for a while, so that the next turn's think time is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Stands for the conversation, or for a request without one.
    pub(crate) digest: u64,
    pub(crate) replica: ReplicaId,
    /// Since when it has its place, in milliseconds since 1970.
    pub(crate) since_ms: u64,
    /// When its last turn began or ended, in milliseconds since 1970.
    pub(crate) last_ms: u64,
    /// Its context.
    pub(crate) tokens: u32,
    pub(crate) in_flight: u16,
    /// Turns since it got its place.
    pub(crate) turns: u16,
    /// The lane of the thread that routed its last turn, counted from 1; 0 for none.
    pub(crate) lane: u8,
    /// Whether it is a conversation's: others end with their request.
    pub(crate) is_conversation: bool,
}

/// Why a request was held when it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No replica has room for its context.
    NoRoom,
    /// There is room, but others go before it.
    BehindOthers,
    /// Its conversation has had its turns, and others wait.
    TurnsUsed,
    /// The conversations of its replica have outgrown the cache, and its own came last.
    Outgrown,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::NoRoom, Self::BehindOthers, Self::TurnsUsed, Self::Outgrown];

    /// Its name, as the statistics write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoRoom => "no_room",
            Self::BehindOthers => "behind_others",
            Self::TurnsUsed => "turns_used",
            Self::Outgrown => "outgrown",
        }
    }
}

/// A request in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Names it.
    pub(crate) id: u64,
    pub(crate) digest: u64,
    /// Its conversation's home.
    pub(crate) home: Option<ReplicaId>,
    /// Since when it waits, in milliseconds since 1970.
    pub(crate) since_ms: u64,
    /// When its thread last said that it still waits.
    pub(crate) seen_ms: u64,
    /// By what the line is ordered.
    pub(crate) order_ms: u64,
    /// Its context.
    pub(crate) tokens: u32,
    pub(crate) reason: Reason,
}

/// A pool's places and line, as they were read.
#[derive(Clone, Debug)]
pub(crate) struct WorkingSet {
    expected: Expected,
    /// How long a quiet conversation keeps its place, as the last writer knew it.
    pub(crate) grace_ms: u64,
    pub(crate) places: Vec<Place>,
    /// In the order in which they go.
    pub(crate) waiting: Vec<Waiting>,
}

/// Where a pool's working set is stored, and the gauges that tell of it.
#[derive(Debug)]
pub(crate) struct SharedSet {
    key: String,
    version: MetricId,
    held: MetricId,
}

impl Place {
    /// Whether it is in use: a turn is in flight, or the next may still come.
    pub(crate) fn is_active(&self, now_ms: u64, grace_ms: u64) -> bool {
        // A quiet one from a time to come is from before the clock was set back: nobody knows how long it has been quiet.
        let is_to_come = self.in_flight == 0 && self.last_ms.saturating_sub(now_ms) > SAME_MOMENT_MS;
        now_ms <= self.ends_ms(grace_ms) && !is_to_come
    }

    /// Until when it is in use without news of a turn.
    pub(crate) fn ends_ms(&self, grace_ms: u64) -> u64 {
        self.last_ms.saturating_add(if self.in_flight > 0 { LEASE_MS } else { grace_ms })
    }

    fn read(bytes: &[u8; PLACE_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        Some(Self {
            digest: reader.u64()?,
            replica: ReplicaId(reader.u64()?),
            since_ms: reader.u64()?,
            last_ms: reader.u64()?,
            tokens: reader.u32()?,
            in_flight: reader.u16()?,
            turns: reader.u16()?,
            lane: reader.u8()?,
            is_conversation: reader.u8()? != 0,
        })
    }

    fn write(&self, bytes: &mut [u8; PLACE_BYTES]) {
        let mut writer = Writer::over(bytes);
        writer.u64(self.digest);
        writer.u64(self.replica.0);
        writer.u64(self.since_ms);
        writer.u64(self.last_ms);
        writer.u32(self.tokens);
        writer.u16(self.in_flight);
        writer.u16(self.turns);
        writer.u8(self.lane);
        writer.u8(u8::from(self.is_conversation));
    }
}

impl Waiting {
    /// Where it stands in line.
    pub(crate) fn order(&self) -> (u64, u64) {
        (self.order_ms, self.id)
    }

    /// The place it gets at a replica, with its turn in flight.
    pub(crate) fn place(&self, replica: ReplicaId, now_ms: u64) -> Place {
        Place {
            digest: self.digest,
            replica,
            since_ms: now_ms,
            last_ms: now_ms,
            tokens: self.tokens,
            in_flight: 1,
            turns: 1,
            lane: 0,
            is_conversation: self.digest != self.id,
        }
    }

    fn read(bytes: &[u8; WAITING_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        Some(Self {
            id: reader.u64()?,
            digest: reader.u64()?,
            home: Some(ReplicaId(reader.u64()?)).filter(|id| id.0 != 0),
            since_ms: reader.u64()?,
            seen_ms: reader.u64()?,
            order_ms: reader.u64()?,
            tokens: reader.u32()?,
            reason: *Reason::ALL.get(usize::from(reader.u8()?))?,
        })
    }

    fn write(&self, bytes: &mut [u8; WAITING_BYTES]) {
        let mut writer = Writer::over(bytes);
        writer.u64(self.id);
        writer.u64(self.digest);
        writer.u64(self.home.map_or(0, |home| home.0));
        writer.u64(self.since_ms);
        writer.u64(self.seen_ms);
        writer.u64(self.order_ms);
        writer.u32(self.tokens);
        writer.u8(self.reason as u8);
    }
}

impl SharedSet {
    /// Where a pool's is.
    ///
    /// # Errors
    /// When the host refuses metrics.
    pub(crate) fn new(host: &impl Host, pool: &str) -> Result<Self, HostError> {
        let key = key(pool);
        let version = host.define(&Metric::WorkingSetVersion { pool })?;
        Ok(Self { key, version, held: host.define(&Metric::HeldRequests { pool })? })
    }

    /// A number that changes with every write.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn version(&self, host: &impl Host) -> Result<u64, HostError> {
        host.value(self.version)
    }

    /// Reads it; bytes of another layout read as empty.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn open(&self, host: &impl Host) -> Result<WorkingSet, HostError> {
        WorkingSet::read(host, &self.key)
    }

    /// Writes it; says whether it was still as it was read.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn store(&self, host: &impl Host, set: &WorkingSet) -> Result<bool, HostError> {
        let stored = host.write(&self.key, &set.encode(), set.expected)?;
        if stored {
            host.add(self.version, 1)?;
        }
        Ok(stored)
    }

    /// Changes it, unless `with` says that there is nothing to change. What the host refuses is lost: a lease ends it.
    pub(crate) fn change(&self, host: &impl Host, with: impl Fn(&mut WorkingSet) -> bool) {
        for _ in 0..MANY_TRIES {
            let Ok(mut set) = self.open(host) else { return };
            if !with(&mut set) || self.store(host, &set) != Ok(false) {
                return;
            }
        }
    }

    /// Says how many are in line.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn set_held(&self, host: &impl Host, held: usize) -> Result<(), HostError> {
        host.set(self.held, held as u64)
    }
}

impl WorkingSet {
    /// A pool's, for those who only look: it defines no gauges, of which the host keeps every definition.
    ///
    /// # Errors
    /// When the host refuses.
    pub(super) fn of(host: &impl Host, pool: &str) -> Result<Self, HostError> {
        Self::read(host, &key(pool))
    }

    fn read(host: &impl Host, key: &str) -> Result<Self, HostError> {
        let stored = host.read(key)?;
        let expected = Expected::unchanged(stored.as_ref());
        let (grace_ms, places, waiting) = stored.and_then(|stored| decode(&stored.bytes)).unwrap_or_default();
        Ok(Self { expected, grace_ms, places, waiting })
    }

    pub(crate) fn place(&mut self, digest: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.digest == digest)
    }

    /// Puts a request where it belongs in line.
    pub(crate) fn join(&mut self, waiting: Waiting) {
        let at = self.waiting.partition_point(|other| other.order() < waiting.order());
        self.waiting.insert(at, waiting);
    }

    /// Takes a request out of the line.
    pub(crate) fn leave(&mut self, id: u64) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting.id != id);
        self.waiting.len() < before
    }

    fn encode(&self) -> Vec<u8> {
        let (places, waiting) = (self.places.len().min(MAX_PLACES), self.waiting.len().min(MAX_WAITING));
        let place_bytes = places.saturating_mul(PLACE_BYTES);
        let records = place_bytes.saturating_add(waiting.saturating_mul(WAITING_BYTES));
        let mut bytes = vec![0; records.saturating_add(HEADER_BYTES)];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u32(u32::try_from(self.grace_ms).unwrap_or(u32::MAX));
        writer.u32(u32::try_from(places).unwrap_or(0));
        writer.u32(u32::try_from(waiting).unwrap_or(0));
        let records = bytes.get_mut(HEADER_BYTES..).unwrap_or_default();
        let (of_places, of_waiting) = records.split_at_mut(place_bytes.min(records.len()));
        // The newest places are at the end.
        let newest = self.places.iter().skip(self.places.len().saturating_sub(places));
        newest.zip(of_places.as_chunks_mut().0).for_each(|(place, bytes)| place.write(bytes));
        self.waiting.iter().zip(of_waiting.as_chunks_mut().0).for_each(|(waiting, bytes)| waiting.write(bytes));
        bytes
    }
}

fn key(pool: &str) -> String {
    format!("homing/pool/{pool}/working-set")
}

fn decode(bytes: &[u8]) -> Option<(u64, Vec<Place>, Vec<Waiting>)> {
    let mut reader = Reader::open(bytes, LAYOUT)?;
    let grace_ms = reader.u32()?.into();
    let mut count = |most: usize| usize::try_from(reader.u32()?).ok().filter(|count| *count <= most);
    let (places, waiting) = (count(MAX_PLACES)?, count(MAX_WAITING)?);
    let (of_places, of_waiting) = bytes.get(HEADER_BYTES..)?.split_at_checked(places.checked_mul(PLACE_BYTES)?)?;
    let is_whole = of_waiting.len() == waiting.checked_mul(WAITING_BYTES)?;
    let (places, waiting) = (read_all(of_places, Place::read)?, read_all(of_waiting, Waiting::read)?);
    is_whole.then_some((grace_ms, places, waiting))
}

/// Records of `N` bytes each. Collecting options would grow the list step by step.
fn read_all<T, const N: usize>(bytes: &[u8], read: impl Fn(&[u8; N]) -> Option<T>) -> Option<Vec<T>> {
    let records = bytes.as_chunks().0;
    let mut all = Vec::with_capacity(records.len());
    for record in records {
        all.push(read(record)?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;
    use crate::host::MemoryHost;

    const POOL: &str = "pool";

    /// The bytes of a set with some places and as many requests in line.
    fn stored(count: u64) -> Vec<u8> {
        let host = MemoryHost::default();
        let shared = SharedSet::new(&host, POOL).expect("gauges");
        let mut set = shared.open(&host).expect("a set");
        for n in 1..=count {
            let (replica, reason) = (ReplicaId(n), Reason::ALL[n as usize % 4]);
            set.places.push(Place {
                digest: n,
                replica,
                since_ms: n,
                last_ms: n,
                tokens: 10_000,
                in_flight: 1,
                turns: 2,
                lane: 1,
                is_conversation: true,
            });
            set.join(Waiting {
                id: n,
                digest: n + 100,
                home: Some(replica),
                since_ms: n,
                seen_ms: n,
                order_ms: n,
                tokens: 5_000,
                reason,
            });
        }
        assert!(shared.store(&host, &set).expect("room"));
        host.shared().remove(&shared.key).expect("a set")
    }

    fn any_place() -> impl Strategy<Value = Place> {
        (any::<[u64; 4]>(), any::<u32>(), any::<[u16; 2]>(), any::<u8>(), any::<bool>()).prop_map(
            |([digest, replica, since_ms, last_ms], tokens, [in_flight, turns], lane, is_conversation)| Place {
                digest,
                replica: ReplicaId(replica),
                since_ms,
                last_ms,
                tokens,
                in_flight,
                turns,
                lane,
                is_conversation,
            },
        )
    }

    fn any_waiting() -> impl Strategy<Value = Waiting> {
        (any::<[u64; 5]>(), prop::option::of(1_u64..), any::<u32>(), prop::sample::select(Reason::ALL.to_vec())).prop_map(
            |([id, digest, since_ms, seen_ms, order_ms], home, tokens, reason)| Waiting {
                id,
                digest,
                home: home.map(ReplicaId),
                since_ms,
                seen_ms,
                order_ms,
                tokens,
                reason,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            places in prop::collection::vec(any_place(), 0..20),
            waiting in prop::collection::vec(any_waiting(), 0..20),
            grace_ms: u32,
        ) {
            let host = MemoryHost::default();
            let shared = SharedSet::new(&host, POOL).expect("gauges");
            let set = WorkingSet { expected: Expected::Absent, grace_ms: grace_ms.into(), places, waiting };
            let version = shared.version(&host).expect("a gauge");
            prop_assert!(shared.store(&host, &set).expect("room"));
            prop_assert_ne!(shared.version(&host).expect("a gauge"), version);
            let read = shared.open(&host).expect("a set");
            prop_assert_eq!((read.grace_ms, read.places, read.waiting), (set.grace_ms, set.places, set.waiting));
        }

        #[test]
        fn any_bytes_are_a_working_set(bytes in mutated([stored(0), stored(1), stored(4)])) {
            let host = MemoryHost::default();
            let shared = SharedSet::new(&host, POOL).expect("gauges");
            host.write(&shared.key, &bytes, Expected::Anything).expect("room");
            let set = shared.open(&host).expect("a set");
            prop_assert!(HEADER_BYTES + set.places.len() * PLACE_BYTES + set.waiting.len() * WAITING_BYTES <= bytes.len().max(HEADER_BYTES));
            prop_assert!(shared.store(&host, &set).expect("room"));
            let read = shared.open(&host).expect("a set");
            prop_assert_eq!((read.grace_ms, read.places, read.waiting), (set.grace_ms, set.places, set.waiting));
        }

        #[test]
        fn the_line_is_in_order(waiting in prop::collection::vec(any_waiting(), 0..20)) {
            let mut set = SharedSet::new(&MemoryHost::default(), POOL).and_then(|shared| shared.open(&MemoryHost::default())).expect("a set");
            waiting.iter().for_each(|waiting| set.join(*waiting));
            prop_assert!(set.waiting.is_sorted_by_key(Waiting::order));
        }
    }
}
