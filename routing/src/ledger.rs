//! The placement ledger: what has been placed where, shared by every thread.
//!
//! One value a pool, with a line for each replica in the order of the pool's list. It is read before a placement and swapped after
//! it, so that two threads which place at the same moment see each other: the slower one finds the ledger changed and chooses again.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::replica::ReplicaId;

const LAYOUT: u8 = 3;
const HEADER_BYTES: usize = 1 + 4;
const LINE_BYTES: usize = 8 + 4 + 4;

/// What the ledger says of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    replica: ReplicaId,
    /// The number of the placement that chose it last; 0 if none did.
    pub(crate) last_chosen: u32,
    /// The context of the conversations held there that were active of late, in KiB.
    pub(crate) context_kib: u32,
}

impl Line {
    fn read(bytes: &[u8; LINE_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        Some(Self { replica: ReplicaId(reader.u64()?), last_chosen: reader.u32()?, context_kib: reader.u32()? })
    }

    fn write(&self, bytes: &mut [u8; LINE_BYTES]) {
        let mut writer = Writer::over(bytes);
        writer.u64(self.replica.0);
        writer.u32(self.last_chosen);
        writer.u32(self.context_kib);
    }
}

/// A pool's ledger as it was read, in the bytes it is stored in.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    expected: Expected,
    bytes: Vec<u8>,
}

/// The key of a pool's ledger.
pub(crate) fn ledger_key(cluster: &str) -> String {
    format!("homing/pool/{cluster}/ledger")
}

impl Ledger {
    /// Reads a pool's ledger. Lines of replicas that are not in the list are dropped, those that are new begin empty, and bytes of
    /// another layout read as an empty ledger.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn open(host: &impl Host, key: &str, replicas: impl Iterator<Item = ReplicaId> + Clone) -> Result<Self, HostError> {
        let stored = host.read(key)?;
        let expected = Expected::unchanged(stored.as_ref());
        let bytes = stored.map(|stored| stored.bytes).unwrap_or_default();
        let same = bytes.first() == Some(&LAYOUT) && lines(&bytes).map(|line| line.replica).eq(replicas.clone());
        Ok(Self { expected, bytes: if same { bytes } else { rebuilt(&bytes, replicas) } })
    }

    /// The line of the replica at this index of the list.
    pub(crate) fn line(&self, index: usize) -> Option<Line> {
        Line::read(stored_lines(&self.bytes).get(index)?)
    }

    /// Writes down that the replica at this index was chosen, with the context of the conversation that will live there, if one
    /// will.
    pub(crate) fn choose(&mut self, index: usize, context_kib: Option<u32>) {
        let number = self.placements().saturating_add(1);
        if let Some(header) = self.bytes.get_mut(1..HEADER_BYTES) {
            Writer::over(header).u32(number);
        }
        self.change(index, |line| {
            line.last_chosen = number;
            line.context_kib = line.context_kib.saturating_add(context_kib.unwrap_or(0));
        });
    }

    /// Replaces the context held by the replica at this index.
    pub(crate) fn set_context(&mut self, index: usize, context_kib: u32) {
        self.change(index, |line| line.context_kib = context_kib);
    }

    /// Writes the ledger; says whether it was still as it was read.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn store(&self, host: &impl Host, key: &str) -> Result<bool, HostError> {
        host.write(key, &self.bytes, self.expected)
    }

    fn placements(&self) -> u32 {
        Reader::open(&self.bytes, LAYOUT).and_then(|mut reader| reader.u32()).unwrap_or(0)
    }

    fn change(&mut self, index: usize, with: impl FnOnce(&mut Line)) {
        let lines = self.bytes.get_mut(HEADER_BYTES..).unwrap_or_default().as_chunks_mut().0;
        if let Some(bytes) = lines.get_mut(index)
            && let Some(mut line) = Line::read(bytes)
        {
            with(&mut line);
            line.write(bytes);
        }
    }
}

fn stored_lines(bytes: &[u8]) -> &[[u8; LINE_BYTES]] {
    bytes.get(HEADER_BYTES..).unwrap_or_default().as_chunks().0
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = Line> {
    stored_lines(bytes).iter().filter_map(Line::read)
}

/// A ledger of these replicas, with what an earlier one says of them.
fn rebuilt(earlier: &[u8], replicas: impl Iterator<Item = ReplicaId>) -> Vec<u8> {
    let earlier = if earlier.first() == Some(&LAYOUT) { earlier } else { &[] };
    let mut bytes = vec![LAYOUT];
    bytes.extend_from_slice(earlier.get(1..HEADER_BYTES).unwrap_or(&[0; HEADER_BYTES - 1]));
    for replica in replicas {
        let known = lines(earlier).find(|line| line.replica == replica);
        let mut line = [0; LINE_BYTES];
        known.unwrap_or(Line { replica, last_chosen: 0, context_kib: 0 }).write(&mut line);
        bytes.extend_from_slice(&line);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;
    use crate::host::MemoryHost;

    const KEY: &str = "ledger";

    fn open(host: &MemoryHost, replicas: &[u64]) -> Ledger {
        Ledger::open(host, KEY, replicas.iter().map(|id| ReplicaId(*id))).expect("a ledger")
    }

    /// A ledger's bytes after some placements.
    fn stored(replicas: &[u64]) -> Vec<u8> {
        let host = MemoryHost::default();
        let mut ledger = open(&host, replicas);
        (0..replicas.len()).for_each(|index| ledger.choose(index, Some(10)));
        ledger.bytes
    }

    #[test]
    fn what_is_written_is_found_when_the_list_has_changed() {
        let host = MemoryHost::default();
        let mut ledger = open(&host, &[1, 2, 3]);
        ledger.choose(1, Some(10));
        ledger.choose(2, None);
        assert!(ledger.store(&host, KEY).expect("a write"));
        let ledger = open(&host, &[4, 3, 2]);
        let lines: Vec<_> =
            (0..3).filter_map(|index| ledger.line(index)).map(|line| (line.last_chosen, line.context_kib)).collect();
        assert_eq!(lines, [(0, 0), (2, 0), (1, 10)]);
    }

    #[test]
    fn of_two_threads_that_place_at_once_one_is_refused() {
        let host = MemoryHost::default();
        assert!(open(&host, &[1]).store(&host, KEY).expect("a write"));
        let [mut one, mut two] = [open(&host, &[1]), open(&host, &[1])];
        one.choose(0, None);
        two.choose(0, None);
        assert!(one.store(&host, KEY).expect("a write"));
        assert!(!two.store(&host, KEY).expect("a write"));
    }

    proptest! {
        #[test]
        fn any_stored_bytes_are_a_ledger(bytes in mutated([stored(&[1, 2, 3]), stored(&[])]), replicas in prop::collection::vec(1_u64..9, 0..6)) {
            let host = MemoryHost::default();
            host.write(KEY, &bytes, Expected::Anything).expect("room");
            let mut ledger = open(&host, &replicas);
            for (index, replica) in replicas.into_iter().enumerate() {
                ledger.choose(index, Some(1));
                prop_assert_eq!(ledger.line(index).expect("a line").replica, ReplicaId(replica));
            }
            // Whatever was there, it does not grow.
            prop_assert!(ledger.bytes.len() <= bytes.len().max(HEADER_BYTES + 6 * LINE_BYTES));
            prop_assert!(ledger.store(&host, KEY).expect("a write"));
        }
    }
}
