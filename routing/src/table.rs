//! The affinity table: which replica each conversation calls home.
//!
//! Set-associative and of fixed size: [`Table::prepare`] writes every bucket once, and later writes only replace them. A bucket
//! holds [`WAYS`] entries in one shared value and is changed by compare-and-swap, so that threads need no lock of their own.
//!
//! The table has twice as many slots as conversations it is to hold: with a mean of 16 entries in a bucket of 32, the chance
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

    /// `None` if the slot is free: an entry always has a home.
    fn read(slot: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let reader = &mut Reader::new(slot);
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
        let mut slot = [0; ENTRY_BYTES];
        let mut writer = Writer::over(&mut slot);
        writer.bytes(&self.digest.0.to_le_bytes());
        writer.u64(self.home.0);
        writer.u64(self.second.map_or(0, |id| id.0));
        writer.u32(self.home_bytes);
        writer.u32(self.second_bytes);
        writer.u32(self.last_turn);
        writer.u8(self.turns_away);
        writer.u64(self.bound_at_ms);
        slot
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
        for entry in slots(&bytes).iter().filter_map(Entry::read) {
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
        let entry = slots(&bucket.bytes).iter().filter(|slot| slot.starts_with(&wanted)).find_map(Entry::read)?;
        (now_s.saturating_sub(entry.last_turn) <= self.idle_s).then_some(entry)
    }

    /// Writes the conversation's entry into its bucket; says whether the bucket was still as it was read.
    ///
    /// A full bucket forgets the entry whose last turn is the longest ago.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn store(&self, host: &impl Host, mut bucket: Bucket, entry: &Entry) -> Result<bool, HostError> {
        if let Some(slot) = slot_for(&mut bucket.bytes, bucket.digest) {
            *slot = entry.write();
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
        let Some(slot) = slot_for(bytes, told.conversation).filter(|_| !is_idle) else { return false };
        let entry = match Entry::read(slot) {
            Some(known) if known.digest == told.conversation => known.merged(told),
            Some(other) if other.last_turn >= told.last_turn_s => return false,
            _ => Entry::of(told),
        };
        let entry = entry.write();
        let changed = *slot != entry;
        *slot = entry;
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

/// The conversation's own slot in a bucket, else a free one, else the one that has been idle the longest.
fn slot_for(bytes: &mut [u8], conversation: Digest) -> Option<&mut [u8; ENTRY_BYTES]> {
    let wanted = conversation.0.to_le_bytes();
    let rank = |slot: &[u8; ENTRY_BYTES]| match Entry::read(slot) {
        Some(_) if slot.starts_with(&wanted) => (0, 0),
        None => (1, 0),
        Some(other) => (2, other.last_turn),
    };
    bytes.get_mut(1..)?.as_chunks_mut().0.iter_mut().min_by_key(|slot| rank(slot))
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

fn slots(bytes: &[u8]) -> &[[u8; ENTRY_BYTES]] {
    bytes.get(1..).unwrap_or_default().as_chunks().0
}

#[cfg(test)]
mod tests;
