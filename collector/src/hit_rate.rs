//! The prefix hit rate over the last minute, from counters that only grow.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::vllm::{PromptCache, PromptCacheSource};

/// How far back the rate looks.
pub const WINDOW: Duration = Duration::from_secs(60);

/// The time between two readings that are kept, so that a minute is some sixty of them however often a replica is polled.
const STEP: Duration = Duration::from_secs(1);

/// Hits per token looked up: the increase of both counters over the last [`WINDOW`].
#[derive(Clone, Debug, Default)]
pub struct HitRate {
    source: Option<PromptCacheSource>,
    /// Readings at least [`STEP`] apart, oldest first.
    kept: VecDeque<Reading>,
    latest: Option<Reading>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    tokens: u64,
    hits: u64,
}

impl HitRate {
    /// Takes a reading in. Says whether the engine must have restarted since the last one, because a counter fell; the rate then
    /// starts anew, as it does when the counters come from another source.
    pub fn observe(&mut self, now: Instant, cache: Option<PromptCache>) -> bool {
        let Some(cache) = cache else {
            *self = Self::default();
            return false;
        };
        let fell = self.latest.is_some_and(|last| cache.tokens < last.tokens || cache.hits < last.hits);
        let restarted = fell && self.source == Some(cache.source);
        if fell || self.source != Some(cache.source) {
            *self = Self { source: Some(cache.source), ..Self::default() };
        }
        let reading = Reading { at: now, tokens: cache.tokens, hits: cache.hits };
        while self.kept.front().is_some_and(|oldest| now.duration_since(oldest.at) > WINDOW) {
            self.kept.pop_front();
        }
        if self.kept.back().is_none_or(|last| now.duration_since(last.at) >= STEP) {
            self.kept.push_back(reading);
        }
        self.latest = Some(reading);
        restarted
    }

    /// The rate, 0 to 1; `None` when no token was looked up within the window.
    pub fn rate(&self, now: Instant) -> Option<f32> {
        let first = self.kept.iter().find(|reading| now.duration_since(reading.at) <= WINDOW)?;
        let last = self.latest?;
        let tokens = last.tokens.saturating_sub(first.tokens);
        let hits = last.hits.saturating_sub(first.hits);
        (tokens > 0).then(|| (hits as f64 / tokens as f64).min(1.0) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn cache(tokens: u64, hits: u64) -> Option<PromptCache> {
        Some(PromptCache { source: PromptCacheSource::BySource, tokens, hits })
    }

    fn observe(rate: &mut HitRate, tokens: u64, hits: u64) -> bool {
        rate.observe(Instant::now(), cache(tokens, hits))
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_no_rate_before_a_prompt_was_read() {
        let mut rate = HitRate::default();
        assert_eq!(rate.rate(Instant::now()), None);
        observe(&mut rate, 6080, 4096);
        assert_eq!(rate.rate(Instant::now()), None, "what came before the first reading is of unknown age");
        advance(Duration::from_secs(1)).await;
        observe(&mut rate, 6080, 4096);
        assert_eq!(rate.rate(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_hits_over_tokens_since_the_first_reading() {
        let mut rate = HitRate::default();
        observe(&mut rate, 1000, 0);
        advance(Duration::from_millis(250)).await;
        observe(&mut rate, 1400, 300);
        assert_eq!(rate.rate(Instant::now()), Some(0.75));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_older_than_a_minute_no_longer_counts() {
        let mut rate = HitRate::default();
        observe(&mut rate, 0, 0);
        for second in 1..=240_u64 {
            advance(Duration::from_millis(500)).await;
            // No hits in the first minute, nothing but hits in the second.
            observe(&mut rate, second * 10, second.saturating_sub(120) * 10);
        }
        assert_eq!(rate.rate(Instant::now()), Some(1.0));
        assert!(rate.kept.len() <= 61, "{}", rate.kept.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_is_silent_for_a_minute_has_no_rate() {
        let mut rate = HitRate::default();
        observe(&mut rate, 0, 0);
        advance(Duration::from_secs(2)).await;
        observe(&mut rate, 10, 5);
        advance(Duration::from_secs(61)).await;
        assert_eq!(rate.rate(Instant::now()), None);
        observe(&mut rate, 20, 5);
        assert_eq!(rate.rate(Instant::now()), None, "the reading before the gap is too old to compare with");
    }

    #[tokio::test(start_paused = true)]
    async fn a_counter_that_falls_is_a_restart_and_the_rate_begins_anew() {
        let mut rate = HitRate::default();
        assert!(!observe(&mut rate, 1000, 900));
        advance(Duration::from_secs(5)).await;
        assert!(!observe(&mut rate, 2000, 1800));
        advance(Duration::from_secs(5)).await;
        assert!(observe(&mut rate, 100, 0));
        assert_eq!(rate.rate(Instant::now()), None);
        advance(Duration::from_secs(5)).await;
        assert!(!observe(&mut rate, 300, 100));
        assert_eq!(rate.rate(Instant::now()), Some(0.5));
    }

    #[tokio::test(start_paused = true)]
    async fn counters_of_another_source_are_not_compared() {
        let mut rate = HitRate::default();
        observe(&mut rate, 1000, 900);
        advance(Duration::from_secs(1)).await;
        let other = PromptCache { source: PromptCacheSource::PrefixCache, tokens: 5000, hits: 4000 };
        assert!(!rate.observe(Instant::now(), Some(other)));
        assert_eq!(rate.rate(Instant::now()), None);
    }
}
