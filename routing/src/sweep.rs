//! Counting held conversations: one thread at a time walks the affinity table.

use hashbrown::HashMap;

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, TRIES};
use crate::ledger::Ledger;
use crate::pool::Pool;
use crate::replica::ReplicaId;
use crate::router::{Router, seconds};
use crate::since;

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
struct AtHome {
    conversations: u32,
    /// Those of them that were active of late, bytes of their last requests, and what they weigh where a new one is placed.
    recent: u32,
    recent_bytes: u64,
    recent_kib: u32,
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
        let at_home = self.at_home_by_replica(&host)?;
        let found = |replica: ReplicaId| at_home.get(&replica).copied().unwrap_or_default();
        for (pool, before) in self.pools().zip(ledgers) {
            for replica in pool.registry.known() {
                let found = found(replica.id);
                host.set(replica.at_home, found.conversations.into())?;
                host.set(replica.recent, found.recent.into())?;
                host.set(replica.recent_context, found.recent_bytes)?;
            }
            self.set_context(pool, &before, |replica| found(replica).recent_kib)?;
            self.count_held(pool)?;
            if let Some(age_ms) = self.age_ms(pool)? {
                host.set(pool.age, age_ms / 1000)?;
            }
        }
        Ok(())
    }

    /// How old a pool's snapshot is. One that never came is as old as this Envoy, unless the configuration names the replicas.
    fn age_ms(&self, pool: &Pool) -> Result<Option<u64>, HostError> {
        let now_ms = self.host().now_ms();
        if pool.has_snapshot() {
            return Ok(pool.snapshot_age_ms(now_ms));
        }
        let since_ms = since::noted(self.host())?.filter(|_| pool.policy.replicas.is_empty());
        Ok(since_ms.map(|since_ms| now_ms.saturating_sub(since_ms)))
    }

    /// Writes what the walk found into the ledger, and what was placed during the walk besides: it may not have been found.
    fn set_context(&self, pool: &Pool, before: &Ledger, found: impl Fn(ReplicaId) -> u32) -> Result<(), HostError> {
        for _ in 0..TRIES {
            let mut ledger = pool.open_ledger(self.host())?;
            for (index, member) in pool.members().iter().enumerate() {
                let (then, now) = (before.line(index), ledger.line(index));
                let since = now.zip(then).map_or(0, |(now, then)| now.context_kib.saturating_sub(then.context_kib));
                ledger.set_context(index, found(member.replica.id).saturating_add(since));
            }
            if ledger.store(self.host(), &pool.ledger_key)? {
                break;
            }
        }
        Ok(())
    }

    fn at_home_by_replica(&self, host: &H) -> Result<HashMap<ReplicaId, AtHome>, HostError> {
        let now_s = seconds(host.now_ms());
        let mut at_home: HashMap<ReplicaId, AtHome> = HashMap::new();
        for index in 0..self.table().buckets() {
            self.table().active(host, index, now_s, |entry| {
                let found = at_home.entry(entry.home).or_default();
                found.conversations = found.conversations.saturating_add(1);
                if now_s.saturating_sub(entry.last_turn) <= RECENT_S {
                    found.recent = found.recent.saturating_add(1);
                    found.recent_bytes = found.recent_bytes.saturating_add(entry.home_bytes.into());
                    found.recent_kib = found.recent_kib.saturating_add(context_kib(entry.home_bytes));
                }
            })?;
        }
        Ok(at_home)
    }

    /// Takes the next walk if it is due; the first thread to write the time of the one after it wins.
    fn take_turn(&self, serves: bool) -> Result<bool, HostError> {
        let host = self.host();
        let now_ms = host.now_ms();
        let stored = host.read(KEY)?;
        let due_ms = stored.as_ref().and_then(|stored| Reader::open(&stored.bytes, LAYOUT)?.u64()).unwrap_or(0);
        let patience = if serves { DEFERENCE_MS } else { 0 };
        let due_ms = due_ms.saturating_add(patience);
        // A walk due later than the next one ever is was put off by a clock that has been set back.
        let is_due = now_ms >= due_ms || due_ms.saturating_sub(now_ms) > EVERY_MS.saturating_add(DEFERENCE_MS);
        if !is_due {
            return Ok(false);
        }
        let mut bytes = [0; 9];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u64(now_ms.saturating_add(EVERY_MS));
        host.write(KEY, &bytes, Expected::unchanged(stored.as_ref()))
    }
}
