//! The placement ledger: what has been placed where, shared by every thread.
//!
//! One value a pool. It is read before a placement and swapped after it, so that two threads which place at the same moment
//! see each other: the slower one finds the ledger changed and chooses again.

use hashbrown::HashMap;

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::replica::ReplicaId;
use crate::sync::MAX_REPLICAS;

const LAYOUT: u8 = 2;
const HEADER_BYTES: usize = 1 + 4;
const RECORD_BYTES: usize = 8 + 4 + 4;

/// What the ledger says of one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    /// The number of the placement that chose it last; 0 if none did.
    pub(crate) last_chosen: u32,
    /// The context of the conversations held there that were active of late, in KiB.
    pub(crate) context_kib: u32,
}

/// A pool's ledger as it was read.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    key: String,
    expected: Expected,
    placements: u32,
    lines: HashMap<ReplicaId, Line>,
}

impl Ledger {
    /// Reads the ledger of a pool. Bytes of another layout read as an empty one.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn open(host: &impl Host, cluster: &str) -> Result<Self, HostError> {
        let key = format!("homing/pool/{cluster}/ledger");
        let stored = host.read(&key)?;
        let (placements, lines) = stored.as_ref().and_then(|stored| decode(&stored.bytes)).unwrap_or_default();
        Ok(Self { key, expected: Expected::unchanged(stored.as_ref()), placements, lines })
    }

    /// What it says of a replica.
    pub(crate) fn line(&self, replica: ReplicaId) -> Line {
        self.lines.get(&replica).copied().unwrap_or_default()
    }

    /// Writes down that a replica was chosen, with the context of the conversation that will live there, if one will.
    pub(crate) fn chosen(&mut self, replica: ReplicaId, context_kib: Option<u32>) {
        self.placements = self.placements.saturating_add(1);
        let line = self.lines.entry(replica).or_default();
        line.last_chosen = self.placements;
        line.context_kib = line.context_kib.saturating_add(context_kib.unwrap_or(0));
    }

    /// Replaces every replica's held context.
    pub(crate) fn set_context(&mut self, context_kib: impl Fn(ReplicaId) -> u32, replicas: impl Iterator<Item = ReplicaId>) {
        for replica in replicas {
            self.lines.entry(replica).or_default().context_kib = context_kib(replica);
        }
    }

    /// Forgets every replica that is not `kept`.
    pub(crate) fn retain(&mut self, kept: impl Fn(ReplicaId) -> bool) {
        self.lines.retain(|replica, _| kept(*replica));
    }

    /// Writes the ledger; says whether it was still as it was read.
    ///
    /// # Errors
    /// When the host refuses.
    pub(crate) fn store(&self, host: &impl Host) -> Result<bool, HostError> {
        host.write(&self.key, &self.encode(), self.expected)
    }

    fn encode(&self) -> Vec<u8> {
        let count = self.lines.len().min(MAX_REPLICAS);
        let mut bytes = vec![0; count.saturating_mul(RECORD_BYTES).saturating_add(HEADER_BYTES)];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u32(self.placements);
        for (replica, line) in self.lines.iter().take(count) {
            writer.u64(replica.0);
            writer.u32(line.last_chosen);
            writer.u32(line.context_kib);
        }
        bytes
    }
}

fn decode(bytes: &[u8]) -> Option<(u32, HashMap<ReplicaId, Line>)> {
    let mut reader = Reader::open(bytes, LAYOUT)?;
    let placements = reader.u32()?;
    let mut lines = HashMap::new();
    while !reader.is_empty() {
        let replica = ReplicaId(reader.u64()?);
        lines.insert(replica, Line { last_chosen: reader.u32()?, context_kib: reader.u32()? });
    }
    Some((placements, lines))
}
