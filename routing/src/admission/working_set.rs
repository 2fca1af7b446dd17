//! Who has a place at which replica, and who waits for one: one shared value a pool, changed by compare-and-swap.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::replica::ReplicaId;

const LAYOUT: u8 = 1;
const HEADER_BYTES: usize = 1 + 4 + 4;
const PLACE_BYTES: usize = 8 + 8 + 8 + 8 + 4 + 2 + 2 + 1 + 1;
const WAITING_BYTES: usize = 8 + 8 + 8 + 8 + 8 + 4 + 1;

/// The most places that are kept: those of 64 replicas with 64 conversations each.
const MAX_PLACES: usize = 4096;

/// The most requests in line, whatever is configured.
pub const MAX_WAITING: usize = 4096;

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
    /// Its context.
    pub(crate) tokens: u32,
    /// Whether it waits with those that return, rather than with new ones.
    pub(crate) returns: bool,
}

/// A pool's places and line, as they were read.
#[derive(Clone, Debug)]
pub(crate) struct WorkingSet {
    expected: Expected,
    pub(crate) places: Vec<Place>,
    pub(crate) waiting: Vec<Waiting>,
}

/// The key of a pool's working set.
pub(crate) fn key(cluster: &str) -> String {
    format!("homing/pool/{cluster}/working-set")
}

impl WorkingSet {
    /// Reads it; bytes of another layout read as empty.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn open(host: &impl Host, key: &str) -> Result<Self, HostError> {
        let stored = host.read(key)?;
        let expected = Expected::unchanged(stored.as_ref());
        let (places, waiting) = stored.and_then(|stored| decode(&stored.bytes)).unwrap_or_default();
        Ok(Self { expected, places, waiting })
    }

    /// Writes it; says whether it was still as it was read.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn store(&self, host: &impl Host, key: &str) -> Result<bool, HostError> {
        host.write(key, &self.encode(), self.expected)
    }

    pub(crate) fn place(&mut self, digest: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.digest == digest)
    }

    /// Takes a request out of the line.
    pub(crate) fn leave(&mut self, id: u64) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting.id != id);
        self.waiting.len() < before
    }

    fn encode(&self) -> Vec<u8> {
        let (places, waiting) = (self.places.len().min(MAX_PLACES), self.waiting.len().min(MAX_WAITING));
        let records = places.saturating_mul(PLACE_BYTES).saturating_add(waiting.saturating_mul(WAITING_BYTES));
        let mut bytes = vec![0; records.saturating_add(HEADER_BYTES)];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u32(u32::try_from(places).unwrap_or(0));
        writer.u32(u32::try_from(waiting).unwrap_or(0));
        // The newest places are at the end.
        for place in self.places.iter().skip(self.places.len().saturating_sub(places)) {
            writer.u64(place.digest);
            writer.u64(place.replica.0);
            writer.u64(place.since_ms);
            writer.u64(place.last_ms);
            writer.u32(place.tokens);
            writer.u16(place.in_flight);
            writer.u16(place.turns);
            writer.u8(place.lane);
            writer.u8(u8::from(place.is_conversation));
        }
        for waiting in self.waiting.iter().take(waiting) {
            writer.u64(waiting.id);
            writer.u64(waiting.digest);
            writer.u64(waiting.home.map_or(0, |home| home.0));
            writer.u64(waiting.since_ms);
            writer.u64(waiting.seen_ms);
            writer.u32(waiting.tokens);
            writer.u8(u8::from(waiting.returns));
        }
        bytes
    }
}

fn decode(bytes: &[u8]) -> Option<(Vec<Place>, Vec<Waiting>)> {
    let mut reader = Reader::open(bytes, LAYOUT)?;
    let mut count = |most: usize| usize::try_from(reader.u32()?).ok().filter(|count| *count <= most);
    let (places, waiting) = (count(MAX_PLACES)?, count(MAX_WAITING)?);
    let place = |reader: &mut Reader<'_>| {
        Some(Place {
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
    };
    let in_line = |reader: &mut Reader<'_>| {
        Some(Waiting {
            id: reader.u64()?,
            digest: reader.u64()?,
            home: Some(ReplicaId(reader.u64()?)).filter(|id| id.0 != 0),
            since_ms: reader.u64()?,
            seen_ms: reader.u64()?,
            tokens: reader.u32()?,
            returns: reader.u8()? != 0,
        })
    };
    let places = (0..places).map(|_| place(&mut reader)).collect::<Option<_>>()?;
    let waiting = (0..waiting).map(|_| in_line(&mut reader)).collect::<Option<_>>()?;
    reader.is_empty().then_some((places, waiting))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::MemoryHost;
    use crate::testing::test;

    const KEY: &str = "set";

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
        (any::<[u64; 4]>(), prop::option::of(1_u64..), any::<u32>(), any::<bool>()).prop_map(
            |([id, digest, since_ms, seen_ms], home, tokens, returns)| Waiting {
                id,
                digest,
                home: home.map(ReplicaId),
                since_ms,
                seen_ms,
                tokens,
                returns,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            places in prop::collection::vec(any_place(), 0..20),
            waiting in prop::collection::vec(any_waiting(), 0..20),
        ) {
            let host = MemoryHost::default();
            let set = WorkingSet { expected: Expected::Absent, places, waiting };
            prop_assert!(set.store(&host, KEY).expect("room"));
            let read = WorkingSet::open(&host, KEY).expect("a set");
            prop_assert_eq!((read.places, read.waiting), (set.places, set.waiting));
        }

        #[test]
        fn any_bytes_are_a_working_set(bytes: Vec<u8>) {
            let host = MemoryHost::default();
            host.write(KEY, &bytes, Expected::Anything).expect("room");
            prop_assert!(WorkingSet::open(&host, KEY).is_ok());
        }
    }
}
