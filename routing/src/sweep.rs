//! Counting held conversations: one thread at a time walks the affinity table.

use hashbrown::HashMap;

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::ledger::Ledger;
use crate::metric::Metric;
use crate::replica::ReplicaId;
use crate::router::{Router, now_s};

/// How often the table is walked.
const EVERY_MS: u64 = 1_000;

/// How much longer a thread that serves requests waits, so that Envoy's main thread, which serves none, does the walk.
const DEFERENCE_MS: u64 = 2_000;

const KEY: &str = "homing/sweep";
const LAYOUT: u8 = 1;

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
            ledgers.push(Ledger::open(&host, &pool.policy.cluster)?);
        }
        let held = self.held_by_replica(&host)?;
        for (pool, mut ledger) in self.pools().zip(ledgers) {
            ledger.count(&held);
            ledger.retain(|replica| pool.member(replica).is_some());
            // A ledger that changed during the walk has placements the walk may have missed: the next walk counts them.
            ledger.store(&host)?;
            for member in pool.members() {
                let replica = &member.replica;
                host.set(replica.held, u64::from(held.get(&replica.id).copied().unwrap_or(0)))?;
            }
            if let Some(age_ms) = pool.snapshot_age_ms(&host) {
                let age = host.define(&Metric::SnapshotAge { pool: &pool.policy.cluster })?;
                host.set(age, age_ms / 1000)?;
            }
        }
        Ok(())
    }

    fn held_by_replica(&self, host: &H) -> Result<HashMap<ReplicaId, u32>, HostError> {
        let now_s = now_s(host);
        let mut held: HashMap<ReplicaId, u32> = HashMap::new();
        for index in 0..self.table().buckets() {
            self.table().active(host, index, now_s, |entry| {
                let count = held.entry(entry.home).or_default();
                *count = count.saturating_add(1);
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
