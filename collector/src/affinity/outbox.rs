//! What waits to be written to the store: bounded, so that a store that is away costs memory for a while and nothing else.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use homing_routing::binding::Binding;
use tokio::sync::Notify;

use crate::fleet::lock;

/// The most bindings that wait; of more the oldest are dropped. When the store is back, all that it does not have is written anyway.
const MAX_WAITING: usize = 65_536;

/// Bindings on their way to the store.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Mutex<VecDeque<Binding>>,
    arrived: Notify,
    dropped: AtomicU64,
}

impl Outbox {
    /// Appends one, and never waits.
    pub(crate) fn put(&self, binding: Binding) {
        let mut waiting = lock(&self.waiting);
        if waiting.len() >= MAX_WAITING {
            waiting.pop_front();
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
    }
}
