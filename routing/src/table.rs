//! The affinity table: which replica each conversation calls home.
//!
//! Set-associative and of fixed size: [`Table::prepare`] writes every bucket once, and later writes only replace them. A bucket
//! holds [`WAYS`] entries in one shared value and is changed by compare-and-swap, so that threads need no lock of their own.
//!
//! The table has twice as many places as conversations it is to hold: with a mean of 16 entries in a bucket of 32, the chance
//! that a bucket overflows while the table holds its number is about 1 in 7,000 (Poisson), so that almost nothing is forgotten
//! early.

use crate::binding::Binding;
use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, Stored};
use crate::identity::Digest;
use crate::replica::ReplicaId;

const LAYOUT: u8 = 2;

/// Entries in a bucket.
pub const WAYS: usize = 32;

/// Conversations a bucket is to hold, half its entries.
const CONVERSATIONS_PER_BUCKET: u32 = 16;

/// How often a bucket is tried that other threads write too, before what other Envoys tell of it is given up.
const MERGE_TRIES: usize = 10;

/// Buckets that are read at once when everything is recalled: what a worker does meanwhile waits.
const RECALL_BUCKETS: u32 = 1_024;

/// The bytes of one stored entry.
const ENTRY_BYTES: usize = 56;

/// The bytes of one stored bucket.
pub const BUCKET_BYTES: usize = 1 + WAYS * ENTRY_BYTES;

/// What is remembered of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The conversation.
    pub digest: Digest,
    /// Where it lives.
    pub home: ReplicaId,
    /// Where it was last served while its home was full.
    pub second: Option<ReplicaId>,
    /// What its home has read of it: bytes of the last request served there.
    pub home_bytes: u32,
    /// What its second home has read of it: bytes of the last request served there.
    pub second_bytes: u32,
    /// When its last turn began, in seconds since 1970.
    pub last_turn: u32,
    /// Turns in a row that were served at the second home.
    pub turns_away: u8,
    /// When it got its home, in milliseconds since 1970 by the fleet's clock: of two Envoys' homes the later one wins.
    pub bound_at_ms: u64,
}

/// Seconds an entry may be behind: rewriting a bucket costs more than the rest of a turn at home, and nothing needs to know the
/// last turn's time to the second.
const BEHIND_S: u32 = 5;

impl Entry {
    /// Whether another turn at home, with a request of this size, would change nothing worth writing.
    pub(crate) fn is_fresh(&self, bytes: u32, now_s: u32) -> bool {
        let grown = bytes.abs_diff(self.home_bytes) > self.home_bytes / 8;
        now_s.saturating_sub(self.last_turn) < BEHIND_S && self.turns_away == 0 && !grown
    }

    /// Bytes of the conversation that a replica has read with an earlier turn.
    pub(crate) fn read_at(&self, replica: ReplicaId) -> u32 {
        if self.home == replica {
            self.home_bytes
        } else if self.second == Some(replica) {
            self.second_bytes
        } else {
            0
        }
    }

    /// `None` if the place is free: an entry always has a home.
    fn read(place: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let reader = &mut Reader::new(place);
        let entry = Self {
            digest: Digest(u128::from_le_bytes(reader.array()?)),
            home: ReplicaId(reader.u64()?),
            second: Some(ReplicaId(reader.u64()?)).filter(|id| id.0 != 0),
            home_bytes: reader.u32()?,
            second_bytes: reader.u32()?,
            last_turn: reader.u32()?,
            turns_away: reader.u8()?,
            bound_at_ms: reader.u64()?,
        };
        (entry.home.0 != 0).then_some(entry)
    }

    fn write(&self) -> [u8; ENTRY_BYTES] {
        let mut place = [0; ENTRY_BYTES];
        let mut writer = Writer::over(&mut place);
        writer.bytes(&self.digest.0.to_le_bytes());
        writer.u64(self.home.0);
        writer.u64(self.second.map_or(0, |id| id.0));
        writer.u32(self.home_bytes);
        writer.u32(self.second_bytes);
        writer.u32(self.last_turn);
        writer.u8(self.turns_away);
        writer.u64(self.bound_at_ms);
        place
    }

    /// This entry with what another Envoy tells of the conversation, its times by this machine's clock but for `bound_at_ms`.
    fn merged(&self, told: &Binding) -> Self {
        let merged = self.told(self.last_turn).merged(*told);
        let mut entry = Self { home_bytes: merged.bytes, last_turn: merged.last_turn_s, bound_at_ms: merged.bound_at_ms, ..*self };
        if merged.home != self.home {
            entry.home = merged.home;
            // What the home before has read is still there, as when this Envoy moves the home itself.
            (entry.second, entry.second_bytes, entry.turns_away) = (Some(self.home), self.home_bytes, 0);
        }
        entry
    }

    /// An entry of what another Envoy tells.
    fn of(told: &Binding) -> Self {
        Self {
            digest: told.conversation,
            home: told.home,
            second: None,
            home_bytes: told.bytes,
            second_bytes: 0,
            last_turn: told.last_turn_s,
            turns_away: 0,
            bound_at_ms: told.bound_at_ms,
        }
    }

    /// What other Envoys are told of it; its last turn was at this time by the fleet's clock.
    pub(crate) fn told(&self, last_turn_s: u32) -> Binding {
        Binding { conversation: self.digest, home: self.home, bound_at_ms: self.bound_at_ms, last_turn_s, bytes: self.home_bytes }
    }
}

/// The table's size and where it is kept.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    buckets: u32,
    idle_s: u32,
}

/// One bucket as it was read.
#[derive(Clone, Debug)]
pub struct Bucket {
    index: u32,
    digest: Digest,
    expected: Expected,
    bytes: Vec<u8>,
}

impl Table {
    /// A table for `max_conversations`, each forgotten `idle_s` seconds after its last turn began.
    pub fn new(max_conversations: u32, idle_s: u32) -> Self {
        Self { buckets: max_conversations.div_ceil(CONVERSATIONS_PER_BUCKET).max(1), idle_s }
    }

    /// The bytes the table takes in shared data, keys and the host's own overhead aside.
    pub fn bytes(&self) -> usize {
        (self.buckets as usize).saturating_mul(BUCKET_BYTES)
    }

    /// How many buckets the table has.
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Writes every bucket that is not there yet, so that memory is taken at start and never grows.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn prepare(&self, host: &impl Host) -> Result<(), HostError> {
        let empty = empty();
        for index in 0..self.buckets {
            host.write(&key(index), &empty, Expected::Absent)?;
        }
        Ok(())
    }

    /// Reads the bucket a conversation belongs to.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn open(&self, host: &impl Host, digest: Digest) -> Result<Bucket, HostError> {
        let index = self.index(digest);
        let stored = host.read(&key(index))?;
        let expected = Expected::unchanged(stored.as_ref());
        Ok(Bucket { index, digest, expected, bytes: readable(stored) })
    }

    /// Reads every entry of one bucket that is active at `now_s`.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn active(&self, host: &impl Host, index: u32, now_s: u32, mut with: impl FnMut(&Entry)) -> Result<(), HostError> {
        let bytes = readable(host.read(&key(index))?);
        for entry in places(&bytes).iter().filter_map(Entry::read) {
            if now_s.saturating_sub(entry.last_turn) <= self.idle_s {
                with(&entry);
            }
        }
        Ok(())
    }

    /// Every active entry of the buckets from `from` on, as other Envoys are told it but with last turns by this machine's clock; with the
    /// bucket to go on from, if there is one. It ends behind the bucket with which it has at least `enough`.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn recall(
        &self,
        host: &impl Host,
        from: u32,
        now_s: u32,
        enough: usize,
    ) -> Result<(Vec<Binding>, Option<u32>), HostError> {
        let mut found = Vec::new();
        for index in from..self.buckets {
            if found.len() >= enough || index.saturating_sub(from) >= RECALL_BUCKETS {
                return Ok((found, Some(index)));
            }
            self.active(host, index, now_s, |entry| found.push(entry.told(entry.last_turn)))?;
        }
        Ok((found, None))
    }

    /// The conversation's entry in an open bucket, unless it has been idle for too long.
    pub fn entry(&self, bucket: &Bucket, now_s: u32) -> Option<Entry> {
        let wanted = bucket.digest.0.to_le_bytes();
        let entry = places(&bucket.bytes).iter().filter(|place| place.starts_with(&wanted)).find_map(Entry::read)?;
        (now_s.saturating_sub(entry.last_turn) <= self.idle_s).then_some(entry)
    }

    /// Writes the conversation's entry into its bucket; says whether the bucket was still as it was read.
    ///
    /// A full bucket forgets the entry whose last turn is the longest ago.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn store(&self, host: &impl Host, mut bucket: Bucket, entry: &Entry) -> Result<bool, HostError> {
        if let Some(place) = place_for(&mut bucket.bytes, bucket.digest) {
            *place = entry.write();
        }
        host.write(&key(bucket.index), &bucket.bytes, bucket.expected)
    }

    /// Takes in what other Envoys tell, their last turns by this machine's clock. Each bucket is read and written once, so bindings that
    /// come in the order of their digests cost the least. Returns how many could not be written, since other threads wrote the bucket at
    /// every try.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn merge(&self, host: &impl Host, told: &mut [Binding], now_s: u32) -> Result<usize, HostError> {
        told.sort_unstable_by_key(|binding| binding.conversation);
        let mut lost = 0_usize;
        for run in told.chunk_by(|one, other| self.index(one.conversation) == self.index(other.conversation)) {
            let Some(first) = run.first() else { continue };
            let mut written = false;
            for _ in 0..MERGE_TRIES {
                let Bucket { index, expected, mut bytes, .. } = self.open(host, first.conversation)?;
                let changed = run.iter().filter(|told| self.merge_one(&mut bytes, told, now_s)).count() > 0;
                written = !changed || host.write(&key(index), &bytes, expected)?;
                if written {
                    break;
                }
            }
            lost = lost.saturating_add(if written { 0 } else { run.len() });
        }
        Ok(lost)
    }

    /// Takes one binding into a bucket; says whether that changed it. What is idle is not taken, and none of what is here and was active
    /// later makes room for it.
    fn merge_one(&self, bytes: &mut [u8], told: &Binding, now_s: u32) -> bool {
        let is_idle = now_s.saturating_sub(told.last_turn_s) > self.idle_s;
        let Some(place) = place_for(bytes, told.conversation).filter(|_| !is_idle) else { return false };
        let entry = match Entry::read(place) {
            Some(known) if known.digest == told.conversation => known.merged(told),
            Some(other) if other.last_turn >= told.last_turn_s => return false,
            _ => Entry::of(told),
        };
        let entry = entry.write();
        let changed = *place != entry;
        *place = entry;
        changed
    }

    /// The bucket of a digest: its upper half scaled to the number of buckets, so that any number of buckets is filled evenly.
    fn index(&self, digest: Digest) -> u32 {
        let upper = (digest.0 >> 96) as u32;
        let scaled = u64::from(upper).saturating_mul(u64::from(self.buckets)) >> 32;
        u32::try_from(scaled).unwrap_or(0)
    }
}

fn key(index: u32) -> String {
    format!("homing/table/{index}")
}

/// The conversation's own place in a bucket, else a free one, else the one that has been idle the longest.
fn place_for(bytes: &mut [u8], conversation: Digest) -> Option<&mut [u8; ENTRY_BYTES]> {
    let wanted = conversation.0.to_le_bytes();
    let rank = |place: &[u8; ENTRY_BYTES]| match Entry::read(place) {
        Some(_) if place.starts_with(&wanted) => (0, 0),
        None => (1, 0),
        Some(other) => (2, other.last_turn),
    };
    bytes.get_mut(1..)?.as_chunks_mut().0.iter_mut().min_by_key(|place| rank(place))
}

/// A bucket's bytes, empty if there are none, or of another length or layout.
fn readable(stored: Option<Stored>) -> Vec<u8> {
    match stored {
        Some(stored) if stored.bytes.len() == BUCKET_BYTES && stored.bytes.first() == Some(&LAYOUT) => stored.bytes,
        _ => empty(),
    }
}

fn empty() -> Vec<u8> {
    let mut bytes = vec![0; BUCKET_BYTES];
    if let Some(layout) = bytes.first_mut() {
        *layout = LAYOUT;
    }
    bytes
}

fn places(bytes: &[u8]) -> &[[u8; ENTRY_BYTES]] {
    bytes.get(1..).unwrap_or_default().as_chunks().0
}

#[cfg(test)]
mod tests {
    use hashbrown::HashMap;
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;
    use crate::host::MemoryHost;
    use crate::identity::{Namer, Naming};

    fn entry(digest: u128, home: u64, last_turn: u32) -> Entry {
        Entry {
            digest: Digest(digest),
            home: ReplicaId(home),
            second: None,
            home_bytes: 0,
            second_bytes: 0,
            last_turn,
            turns_away: 0,
            bound_at_ms: 0,
        }
    }

    fn remember(host: &MemoryHost, table: Table, entry: Entry) -> bool {
        let bucket = table.open(host, entry.digest).expect("a bucket");
        table.store(host, bucket, &entry).expect("a write")
    }

    fn recall(host: &MemoryHost, table: Table, digest: u128, now_s: u32) -> Option<Entry> {
        let bucket = table.open(host, Digest(digest)).expect("a bucket");
        table.entry(&bucket, now_s)
    }

    /// A bucket without a free place.
    fn full() -> Vec<u8> {
        let (host, table) = (MemoryHost::default(), Table::new(1, 600));
        for digest in 1..=WAYS as u32 {
            assert!(remember(&host, table, entry(digest.into(), digest.into(), digest)));
        }
        host.shared().remove(&key(0)).expect("a bucket")
    }

    #[test]
    fn a_conversation_is_found_until_it_has_been_idle_too_long() {
        let (host, table) = (MemoryHost::default(), Table::new(64, 600));
        let stored = Entry {
            second: Some(ReplicaId(9)),
            home_bytes: 5,
            second_bytes: 6,
            turns_away: 1,
            bound_at_ms: 8,
            ..entry(7, 3, 1000)
        };
        assert!(remember(&host, table, stored));
        assert_eq!(recall(&host, table, 7, 1600), Some(stored));
        assert_eq!(recall(&host, table, 7, 1601), None);
        assert_eq!(recall(&host, table, 8, 1000), None);
    }

    #[test]
    fn a_write_that_lost_a_race_is_refused() {
        let (host, table) = (MemoryHost::default(), Table::new(1, 600));
        table.prepare(&host).expect("room");
        let (one, two) = (table.open(&host, Digest(1)).expect("a bucket"), table.open(&host, Digest(2)).expect("a bucket"));
        assert!(table.store(&host, one, &entry(1, 1, 0)).expect("a write"));
        assert!(!table.store(&host, two, &entry(2, 2, 0)).expect("a write"));
        assert_eq!(recall(&host, table, 2, 0), None);
    }

    #[test]
    fn memory_is_taken_at_start_and_never_grows() {
        let (host, table) = (MemoryHost::default(), Table::new(65_536, 600));
        table.prepare(&host).expect("room");
        let at_start = host.shared_bytes();
        assert_eq!(at_start, table.bytes());
        for n in 0..100_000_u128 {
            remember(&host, table, entry(n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835), 1, 0));
        }
        assert_eq!(host.shared_bytes(), at_start);
    }

    #[test]
    fn a_table_holds_the_number_it_was_made_for() {
        let (host, table) = (MemoryHost::default(), Table::new(4096, 600));
        let digest = |n: u128| n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        for n in 1..=4096 {
            remember(&host, table, entry(digest(n), 1, u32::try_from(n).expect("small")));
        }
        let kept = (1..=4096).filter(|n| recall(&host, table, digest(*n), 600).is_some()).count();
        assert!(kept >= 4090, "{kept} of 4096");
    }

    fn told(digest: u128, home: u64, bound_at_ms: u64, last_turn_s: u32) -> Binding {
        Binding { conversation: Digest(digest), home: ReplicaId(home), bound_at_ms, last_turn_s, bytes: 7 }
    }

    fn merge(host: &MemoryHost, table: Table, told: &[Binding], now_s: u32) {
        assert_eq!(table.merge(host, &mut told.to_vec(), now_s).expect("a merge"), 0);
    }

    #[test]
    fn what_another_envoy_tells_is_remembered_and_the_later_home_wins() {
        let (host, table) = (MemoryHost::default(), Table::new(64, 600));
        merge(&host, table, &[told(7, 3, 50, 1000)], 1000);
        assert_eq!(recall(&host, table, 7, 1000), Some(Entry { home_bytes: 7, bound_at_ms: 50, ..entry(7, 3, 1000) }));
        // An earlier home changes nothing but the last turn; a later one leaves the first as the second home.
        merge(&host, table, &[told(7, 9, 49, 1010)], 1010);
        let kept = recall(&host, table, 7, 1010).expect("an entry");
        assert_eq!((kept.home, kept.last_turn), (ReplicaId(3), 1010));
        merge(&host, table, &[told(7, 4, 51, 1005)], 1010);
        let moved = recall(&host, table, 7, 1010).expect("an entry");
        assert_eq!((moved.home, moved.second, moved.last_turn), (ReplicaId(4), Some(ReplicaId(3)), 1010));
    }

    #[test]
    fn what_is_idle_elsewhere_puts_nothing_out_that_is_active_here() {
        let (host, table) = (MemoryHost::default(), Table::new(16, 600));
        let here: Vec<_> = (1..=64).map(|n| told(n << 90, 1, 1, 1000)).collect();
        merge(&host, table, &here, 1000);
        let before: Vec<_> = (1..=64).map(|n| recall(&host, table, n << 90, 1000)).collect();
        merge(&host, table, &[told(99, 2, 9, 999), told(98, 2, 9, 300)], 1000);
        assert_eq!(before, (1..=64).map(|n| recall(&host, table, n << 90, 1000)).collect::<Vec<_>>());
        assert_eq!(recall(&host, table, 99, 1000), None);
    }

    /// What is found out under one key is of no use where another is set.
    #[test]
    fn ids_that_crowd_one_bucket_under_one_key_are_spread_under_another() {
        let table = Table::new(4_096, 600);
        let bucket = |key: u8, id: u32| {
            let namer = Namer::new(Naming::default(), &[key; 16], "pool");
            let id = id.to_string();
            let named = namer.from_headers([(&b"x-session-id"[..], id.as_bytes())].into_iter()).expect("a conversation");
            table.index(named.digest)
        };
        // As many as a bucket holds, found by trying.
        let crowd: Vec<u32> = (0..).filter(|id| bucket(1, *id) == 7).take(WAYS).collect();
        let mut spread: Vec<u32> = crowd.iter().map(|id| bucket(2, *id)).collect();
        spread.sort_unstable();
        spread.dedup();
        // 32 drawn of 256 at random are in 30 different ones on average.
        assert!(spread.len() >= 24, "{WAYS} ids in {} of {} buckets", spread.len(), table.buckets());
    }

    proptest! {
        /// Two Envoys that hear the same, each in its own order, have the same homes.
        #[test]
        fn tables_agree_whatever_the_order(
            told in prop::collection::vec((0_u128..6, 1_u64..4, 0_u64..5, 90_u32..100), 1..30),
            cut in 0_usize..30,
        ) {
            let told: Vec<_> = told.into_iter().map(|(digest, home, at, last)| super::tests::told(digest, home, at, last)).collect();
            let table = Table::new(64, 600);
            let (one, other) = (MemoryHost::default(), MemoryHost::default());
            for binding in &told {
                merge(&one, table, &[*binding], 100);
            }
            let (first, second) = told.split_at(cut.min(told.len()));
            merge(&other, table, second, 100);
            merge(&other, table, first, 100);
            merge(&other, table, second, 100);
            for digest in 0..6 {
                let home = |host| recall(host, table, digest, 100).map(|entry| (entry.home, entry.bound_at_ms, entry.last_turn));
                prop_assert_eq!(home(&one), home(&other));
            }
        }

        #[test]
        fn any_bytes_of_another_length_read_as_an_empty_bucket(bytes in mutated([full()])) {
            prop_assume!(bytes.len() != BUCKET_BYTES);
            let (host, table) = (MemoryHost::default(), Table::new(1, 600));
            host.write(&key(0), &bytes, Expected::Anything).expect("a write");
            prop_assert_eq!(recall(&host, table, 1, 0), None);
            prop_assert!(remember(&host, table, entry(1, 1, 0)));
            prop_assert_eq!(recall(&host, table, 1, 0), Some(entry(1, 1, 0)));
        }

        #[test]
        fn any_bytes_of_the_right_length_are_a_usable_bucket(bytes in mutated([full()])) {
            let (host, table) = (MemoryHost::default(), Table::new(1, 600));
            let mut bucket = bytes.to_vec();
            bucket.resize(BUCKET_BYTES, 0xff);
            host.write(&key(0), &bucket, Expected::Anything).expect("a write");
            remember(&host, table, entry(1, 1, u32::MAX));
            prop_assert_eq!(recall(&host, table, 1, u32::MAX), Some(entry(1, 1, u32::MAX)));
        }

        /// Whatever comes, a conversation's entry is its own, and the ones that are active outlive the ones that are idle.
        #[test]
        fn it_never_returns_another_conversations_home(turns in proptest::collection::vec((0_u128..200, 0_u32..5), 1..400)) {
            let (host, table) = (MemoryHost::default(), Table::new(16, 10));
            let mut now = 100;
            let mut expected = HashMap::new();
            for (digest, wait) in turns {
                now += wait;
                if let Some(found) = recall(&host, table, digest, now) {
                    prop_assert_eq!(found, expected[&digest]);
                }
                let turn = entry(digest, u64::try_from(digest).expect("small") + 1, now);
                prop_assert!(remember(&host, table, turn));
                expected.insert(digest, turn);
                // The 32 conversations of one bucket that were active last are all there.
                let mut last: Vec<_> = expected.values().copied().collect();
                last.sort_by_key(|turn| core::cmp::Reverse(turn.last_turn));
                let cut = last.get(WAYS - 1).map_or(0, |turn| turn.last_turn);
                for turn in last.into_iter().filter(|turn| turn.last_turn > cut && now - turn.last_turn <= 10) {
                    prop_assert_eq!(recall(&host, table, u128::from(turn.home.0 - 1), now), Some(turn));
                }
            }
            prop_assert!(host.shared_bytes() <= table.bytes());
        }
    }
}
