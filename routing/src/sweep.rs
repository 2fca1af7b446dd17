//! Counting held conversations: one thread at a time walks the affinity table.

use hashbrown::HashMap;

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::metric::Metric;
use crate::replica::ReplicaId;
use crate::router::{Router, seconds};

/// How often the table is walked.
const EVERY_MS: u64 = 1_000;

/// How much longer a thread that serves requests waits, so that Envoy's main thread, which serves none, does the walk.
const DEFERENCE_MS: u64 = 2_000;

const KEY: &str = "homing/sweep";
const LAYOUT: u8 = 1;

/// How long after its last turn a conversation still counts where a new one is placed. Most turns follow within seconds; one
/// that has been quiet for longer has likely ended, since clients do not say when they end.
const RECENT_S: u32 = 120;

/// What one replica holds.
#[derive(Clone, Copy, Default)]
struct Held {
    conversations: u32,
    context_kib: u32,
}

/// What a conversation weighs: its last request's size, and something for the turns to come.
pub(crate) fn context_kib(bytes: u32) -> u32 {
    (bytes / 1024).saturating_add(8)
}

impl<H: Host> Router<H> {
    /// Counts held conversations if the next walk is due and no other thread takes it. `serves` says whether this thread routes
    /// requests.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn sweep(&mut self, serves: bool) -> Result<(), HostError> {
        if !self.take_turn(serves)? {
            return Ok(());
        }
        let host = self.host().clone();
        let mut ledgers = Vec::new();
        for pool in self.refreshed_pools()? {
            ledgers.push(pool.open_ledger(&host)?);
        }
        let held = self.held_by_replica(&host)?;
        let held = |replica: ReplicaId| held.get(&replica).copied().unwrap_or_default();
        for (pool, mut ledger) in self.pools().zip(ledgers) {
            for (place, member) in pool.members().iter().enumerate() {
                let held = held(member.replica.id);
                ledger.set_context(place, held.context_kib);
                host.set(member.replica.held, held.conversations.into())?;
            }
            // A ledger that changed during the walk has placements the walk may have missed: the next walk counts them.
            ledger.store(&host, &pool.ledger_key)?;
            if let Some(age_ms) = pool.snapshot_age_ms(host.now_ms()) {
                let age = host.define(&Metric::SnapshotAge { pool: &pool.policy.cluster })?;
                host.set(age, age_ms / 1000)?;
            }
        }
        Ok(())
    }

    fn held_by_replica(&self, host: &H) -> Result<HashMap<ReplicaId, Held>, HostError> {
        let now_s = seconds(host.now_ms());
        let mut held: HashMap<ReplicaId, Held> = HashMap::new();
        for index in 0..self.table().buckets() {
            self.table().active(host, index, now_s, |entry| {
                let held = held.entry(entry.home).or_default();
                held.conversations = held.conversations.saturating_add(1);
                if now_s.saturating_sub(entry.last_turn) <= RECENT_S {
                    held.context_kib = held.context_kib.saturating_add(context_kib(entry.home_bytes));
                }
            })?;
        }
        Ok(held)
    }

    /// Takes the next walk if it is due; the first thread to write the time of the one after it wins.
    fn take_turn(&self, serves: bool) -> Result<bool, HostError> {
        let host = self.host();
        let now_ms = host.now_ms();
        let stored = host.read(KEY)?;
        let due_ms = stored.as_ref().and_then(|stored| Reader::open(&stored.bytes, LAYOUT)?.u64()).unwrap_or(0);
        let patience = if serves { DEFERENCE_MS } else { 0 };
        if now_ms < due_ms.saturating_add(patience) {
            return Ok(false);
        }
        let mut bytes = [0; 9];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u64(now_ms.saturating_add(EVERY_MS));
        host.write(KEY, &bytes, Expected::unchanged(stored.as_ref()))
    }
}
