//! What admission by working set does in one pool, by all Envoys together.

use homing_routing::sync::{AdmissionAnswer, HeldCounts, ReplicaAnswer};
use serde::Serialize;

/// The line of a pool, and what of its caches active conversations need.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Admission {
    /// Requests held now.
    pub held: u64,
    /// For how long the first of them has been, in milliseconds; absent when none is.
    pub oldest_held_ms: Option<u64>,
    /// Those held now, by why they were held when they came.
    pub by_reason: HeldCounts,
    /// Conversations with a place at a replica that is up: a turn is in flight, or the next may still come.
    pub active_conversations: u64,
    /// Tokens of their contexts together; an estimate.
    pub active_context_tokens: u64,
    /// Tokens that the caches of the replicas that are up take together.
    pub cache_tokens: u64,
    /// [`Admission::active_context_tokens`] divided by [`Admission::cache_tokens`]: 1 is full, and more is what several Envoys admit that do
    /// not know of one another; absent while no cache's size is known.
    pub usage: Option<f64>,
}

impl Admission {
    /// Adds what one Envoy says of the line.
    pub(crate) fn add(&mut self, line: &AdmissionAnswer) {
        self.held = self.held.saturating_add(line.held);
        self.oldest_held_ms = self.oldest_held_ms.max(line.oldest_held_ms);
        self.by_reason = self.by_reason.and(&line.by_reason);
    }

    /// Adds a replica that is up.
    pub(crate) fn add_replica(&mut self, active: Active, cache_tokens: u64) {
        self.active_conversations = self.active_conversations.saturating_add(active.conversations);
        self.active_context_tokens = self.active_context_tokens.saturating_add(active.context_tokens);
        self.cache_tokens = self.cache_tokens.saturating_add(cache_tokens);
        self.usage = (self.cache_tokens > 0).then(|| self.active_context_tokens as f64 / self.cache_tokens as f64);
    }
}

/// What is active at one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Active {
    pub(crate) conversations: u64,
    pub(crate) context_tokens: u64,
}

impl Active {
    /// What one Envoy says of a replica; `None` if it says nothing.
    pub(crate) fn of(answer: &ReplicaAnswer) -> Option<Self> {
        let (conversations, context_tokens) = answer.active_conversations.zip(answer.active_context_tokens)?;
        Some(Self { conversations, context_tokens })
    }

    /// This and what another Envoy has active there. Both count what all conversations share, which the cache holds once.
    pub(crate) fn and(self, other: Self, shared_tokens: u32) -> Self {
        let twice = if self.conversations > 0 && other.conversations > 0 { shared_tokens.into() } else { 0 };
        Self {
            conversations: self.conversations.saturating_add(other.conversations),
            context_tokens: self.context_tokens.saturating_add(other.context_tokens).saturating_sub(twice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(held: u64, oldest_held_ms: Option<u64>) -> AdmissionAnswer {
        let by_reason = HeldCounts { no_room: held, ..HeldCounts::default() };
        AdmissionAnswer { held, oldest_held_ms, by_reason, shared_tokens: 0 }
    }

    #[test]
    fn lines_add_up_and_the_oldest_of_all_is_the_oldest() {
        let mut admission = Admission::default();
        for line in [line(2, Some(900)), line(0, None), line(3, Some(1_500))] {
            admission.add(&line);
        }
        assert_eq!((admission.held, admission.oldest_held_ms, admission.by_reason.no_room), (5, Some(1_500), 5));
    }

    #[test]
    fn what_all_conversations_share_is_in_a_cache_once_however_many_envoys_count_it() {
        let active = |conversations, context_tokens| Active { conversations, context_tokens };
        assert_eq!(active(1, 5_000).and(active(2, 9_000), 1_000), active(3, 13_000));
        assert_eq!(active(1, 5_000).and(active(0, 0), 1_000), active(1, 5_000));
    }

    #[test]
    fn usage_is_of_all_caches_and_not_known_while_none_is() {
        let mut admission = Admission::default();
        let active = Active { conversations: 1, context_tokens: 5_000 };
        admission.add_replica(active, 0);
        assert_eq!(admission.usage, None);
        admission.add_replica(active, 20_000);
        assert_eq!((admission.active_conversations, admission.usage), (2, Some(0.5)));
    }
}
