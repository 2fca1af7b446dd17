//! What waits to be written to the store: bounded, so that a store that is away costs memory for a while and nothing else.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use homing_routing::binding::Binding;
use tokio::sync::Notify;

use crate::fleet::lock;

/// The most bindings that wait; of more the oldest are dropped. All that the store does not have is then looked for and written.
const MAX_WAITING: usize = 65_536;

/// Bindings on their way to the store.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Mutex<VecDeque<Binding>>,
    arrived: Notify,
    dropped: AtomicU64,
    /// Whether the store lacks more than what waits.
    behind: AtomicBool,
}

impl Outbox {
    /// Appends one, and never waits.
    pub(crate) fn put(&self, binding: Binding) {
        let mut waiting = lock(&self.waiting);
        if waiting.len() >= MAX_WAITING {
            waiting.pop_front();
            self.behind.store(true, Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        waiting.push_back(binding);
        drop(waiting);
        self.arrived.notify_one();
    }

    /// Takes the oldest, at most `limit`.
    pub(crate) fn take(&self, limit: usize) -> Vec<Binding> {
        let mut waiting = lock(&self.waiting);
        let count = waiting.len().min(limit);
        waiting.drain(..count).collect()
    }

    /// Has all written that the store does not have.
    pub(crate) fn is_behind(&self) {
        self.behind.store(true, Ordering::Relaxed);
        self.arrived.notify_one();
    }

    /// Whether all is to be written that the store does not have. What waits is a part of that and waits no longer.
    pub(crate) fn take_behind(&self) -> bool {
        let was_behind = self.behind.swap(false, Ordering::Relaxed);
        if was_behind {
            lock(&self.waiting).clear();
        }
        was_behind
    }

    /// Waits until something arrives; it may have been taken since.
    pub(crate) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// How many were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use homing_routing::identity::Digest;
    use homing_routing::replica::ReplicaId;

    use super::*;

    #[test]
    fn when_nobody_takes_the_oldest_go_and_are_counted() {
        let outbox = Outbox::default();
        let binding = |n| Binding { conversation: Digest(n), home: ReplicaId(1), bound_at_ms: 1, last_turn_s: 1, bytes: 1 };
        for n in 0..MAX_WAITING as u128 + 3 {
            outbox.put(binding(n));
        }
        assert_eq!(outbox.dropped(), 3);
        assert_eq!(outbox.take(2), [binding(3), binding(4)]);
        assert_eq!(outbox.take(usize::MAX).len(), MAX_WAITING - 2);
        assert_eq!([outbox.take_behind(), outbox.take_behind()], [true, false], "all is to be looked for once");
    }
}
