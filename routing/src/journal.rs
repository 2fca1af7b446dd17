//! The journal: bindings this Envoy made or renewed, for whoever fetches them.
//!
//! A ring in [`SLOTS`] shared values, each for the conversations of its digests, so that threads seldom meet and an append copies little.
//! Fetching takes nothing out: a reader names the place in each slot up to which it has read. So an answer that is lost costs nothing, and
//! several collectors read the same. A reader that comes too late for some of it learns that, and reads the affinity table instead.

use crate::binding::{BINDING_BYTES, Binding};
use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, TRIES};
use crate::identity::Digest;

const LAYOUT: u8 = 2;
const HEADER_BYTES: usize = 1 + 8;

/// Shared values it is spread over.
pub(crate) const SLOTS: usize = 128;

/// Bindings each of them keeps: 8,192 in all are what 2,000 new conversations a second make in four seconds.
const KEPT: usize = 64;

/// What a reader finds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Found {
    /// Bindings, those of a conversation in their order.
    pub(crate) bindings: Vec<Binding>,
    /// Where to go on reading.
    pub(crate) cursor: Vec<u64>,
    /// Whether there are more.
    pub(crate) more: bool,
    /// Whether some were overwritten before they were read.
    pub(crate) missed: bool,
}

/// Appends one binding; says whether it could, for threads that write the same slot at every try.
///
/// # Errors
/// When the host refuses.
pub(crate) fn append(host: &impl Host, binding: &Binding) -> Result<bool, HostError> {
    let key = key(slot_of(binding.conversation));
    for _ in 0..TRIES {
        let stored = host.read(&key)?;
        let expected = Expected::unchanged(stored.as_ref());
        let mut bytes = stored.map(|stored| stored.bytes).unwrap_or_default();
        let next = match read_slot(&bytes) {
            Some((next, _)) => next,
            None => {
                bytes.clear();
                bytes.resize(HEADER_BYTES, 0);
                0
            }
        };
        let over = bytes.len().saturating_add(BINDING_BYTES).saturating_sub(HEADER_BYTES.saturating_add(KEPT * BINDING_BYTES));
        bytes.drain(HEADER_BYTES.min(bytes.len())..HEADER_BYTES.saturating_add(over).min(bytes.len()));
        bytes.extend_from_slice(&binding.pack());
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u64(next.saturating_add(1));
        if host.write(&key, &bytes, expected)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads at most `limit` bindings, those behind `cursor`; an empty cursor stands before all.
///
/// # Errors
/// When the host refuses.
pub(crate) fn read(host: &impl Host, cursor: &[u64], limit: usize) -> Result<Found, HostError> {
    let mut found = Found { cursor: Vec::with_capacity(SLOTS), ..Found::default() };
    let share = (limit / SLOTS).max(1);
    for slot in 0..SLOTS {
        let stored = host.read(&key(slot))?;
        let (next, kept) = stored.as_ref().and_then(|stored| read_slot(&stored.bytes)).unwrap_or_default();
        let oldest = next.saturating_sub(kept.len().try_into().unwrap_or(u64::MAX));
        // A place further on is from before Envoy restarted.
        let wanted = cursor.get(slot).copied().filter(|wanted| *wanted <= next).unwrap_or(0);
        found.missed |= wanted < oldest;
        let from = wanted.max(oldest);
        let behind = usize::try_from(from.saturating_sub(oldest)).unwrap_or(usize::MAX);
        let unread = kept.get(behind.min(kept.len())..).unwrap_or_default();
        let taken = unread.get(..share.min(unread.len())).unwrap_or_default();
        found.more |= taken.len() < unread.len();
        found.bindings.extend(taken.iter().filter_map(|bytes| Binding::unpack(bytes)));
        found.cursor.push(from.saturating_add(taken.len().try_into().unwrap_or(u64::MAX)));
    }
    Ok(found)
}

fn slot_of(conversation: Digest) -> usize {
    // The table takes the upper bits.
    conversation.0 as usize % SLOTS
}

fn key(slot: usize) -> String {
    format!("homing/bindings/{slot}")
}

/// The number of the next binding, and those that are kept; `None` if the bytes are no slot.
fn read_slot(bytes: &[u8]) -> Option<(u64, &[[u8; BINDING_BYTES]])> {
    let next = Reader::open(bytes, LAYOUT)?.u64()?;
    let (kept, rest) = bytes.get(HEADER_BYTES..)?.as_chunks();
    (rest.is_empty() && kept.len() <= KEPT && u64::try_from(kept.len()).is_ok_and(|kept| kept <= next)).then_some((next, kept))
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;
    use crate::host::MemoryHost;
    use crate::replica::ReplicaId;

    fn binding(n: u128) -> Binding {
        Binding { conversation: Digest(n), home: ReplicaId(1), bound_at_ms: 2, last_turn_s: 3, bytes: 4 }
    }

    fn append_all(host: &MemoryHost, numbers: impl Iterator<Item = u128>) {
        for n in numbers {
            assert!(append(host, &binding(n)).expect("room"));
        }
    }

    /// A slot's bytes after some bindings.
    fn stored(count: usize) -> Vec<u8> {
        let host = MemoryHost::default();
        append_all(&host, (0..count).map(|n| (n * SLOTS + 7) as u128));
        host.shared().remove(&key(7)).expect("a slot")
    }

    #[test]
    fn every_reader_finds_what_is_new_to_it() {
        let host = MemoryHost::default();
        append_all(&host, 1..=3);
        let first = read(&host, &[], 4096).expect("a journal");
        assert_eq!(first.bindings, [binding(1), binding(2), binding(3)]);
        assert_eq!((first.more, first.missed), (false, false));
        append_all(&host, 4..=5);
        assert_eq!(read(&host, &first.cursor, 4096).expect("a journal").bindings, [binding(4), binding(5)]);
        // Its answer was lost; and another reader has read nothing yet.
        assert_eq!(read(&host, &first.cursor, 4096).expect("a journal").bindings.len(), 2);
        assert_eq!(read(&host, &[], 4096).expect("a journal").bindings.len(), 5);
    }

    #[test]
    fn a_burst_is_read_in_parts_and_whole() {
        let host = MemoryHost::default();
        append_all(&host, 0..8192);
        let (mut cursor, mut seen) = (Vec::new(), Vec::new());
        loop {
            let found = read(&host, &cursor, 1024).expect("a journal");
            assert!(found.bindings.len() <= 1024 && !found.missed);
            seen.extend(found.bindings);
            cursor = found.cursor;
            if !found.more {
                break;
            }
        }
        seen.sort_unstable_by_key(|binding| binding.conversation);
        assert_eq!(seen, (0..8192).map(binding).collect::<Vec<_>>());
    }

    #[test]
    fn a_reader_that_is_late_learns_that_it_missed_something() {
        let host = MemoryHost::default();
        append_all(&host, 0..9000);
        let found = read(&host, &[], usize::MAX).expect("a journal");
        assert_eq!((found.bindings.len(), found.missed), (8192, true));
        assert!(!read(&host, &found.cursor, 4096).expect("a journal").missed);
    }

    #[test]
    fn a_reader_of_an_earlier_envoy_begins_anew() {
        let host = MemoryHost::default();
        append_all(&host, 0..2);
        assert_eq!(read(&host, &[1_000; SLOTS], 4096).expect("a journal").bindings.len(), 2);
    }

    proptest! {
        #[test]
        fn any_stored_bytes_are_a_journal(bytes in mutated([stored(1), stored(KEPT)]), cursor: Vec<u64>) {
            let host = MemoryHost::default();
            host.write(&key(7), &bytes, Expected::Anything).expect("room");
            append(&host, &binding(7)).expect("room");
            prop_assert!(host.shared_bytes() <= HEADER_BYTES + KEPT * BINDING_BYTES);
            let found = read(&host, &[], usize::MAX).expect("a journal");
            prop_assert_eq!(found.bindings.last(), Some(&binding(7)));
            let _ = read(&host, &cursor, 10).expect("a journal");
        }
    }
}
