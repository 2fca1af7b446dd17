//! Whether the conversations of the moment fit into the replicas' caches.

use serde::Serialize;

/// The share of the cache up to which conversations fit: above it, there is no room for those that come next.
const NEARLY_FULL: f64 = 0.8;

/// An estimate of the tokens in requests of so many bytes; it is called one wherever it is shown.
pub fn tokens(bytes: u64, bytes_per_token: f32) -> u64 {
    // As a conversion of floats, this saturates.
    (bytes as f64 / f64::from(bytes_per_token)) as u64
}

/// The prefix hit rate above which conversations find their history, whatever the estimate says: agents' turns add little to what
/// was there, so that a pool whose caches thrash is far below it.
const HEALTHY: f64 = 0.7;

/// The conversations of the last two minutes times their typical context, against the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Capacity {
    /// Conversations at home in the pool and active in the last two minutes.
    pub conversations: u64,
    /// Tokens of such a conversation's last request, on average; an estimate.
    pub typical_context_tokens: u64,
    /// Tokens of all of them; an estimate, and too high by what they have in common.
    pub context_tokens: u64,
    /// Tokens that the caches of the replicas that are up and awake take together.
    pub cache_tokens: u64,
    /// [`Capacity::context_tokens`] divided by [`Capacity::cache_tokens`]; 1 is full.
    pub usage: f64,
    /// What that means.
    pub level: Level,
    /// The same in words, with what to do.
    pub advice: &'static str,
}

/// How full the caches are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Up to 80 %.
    Fits,
    /// Up to 100 %, or above it while turns still find their history.
    Near,
    /// Above it.
    Over,
}

impl Capacity {
    /// What `context_tokens` of so many conversations mean for caches of `cache_tokens`, where `hit_rate` is the share of prompt
    /// tokens found in the cache of late; `None` while a cache's size is unknown.
    pub fn of(conversations: u64, context_tokens: u64, cache_tokens: u64, hit_rate: Option<f64>) -> Option<Self> {
        if cache_tokens == 0 {
            return None;
        }
        let usage = context_tokens as f64 / cache_tokens as f64;
        let (level, advice) = if usage <= NEARLY_FULL {
            (Level::Fits, "The conversations fit: each turn finds its history in the cache.")
        } else if usage <= 1.0 {
            (Level::Near, "Nearly full: the conversations that come next push others out of the cache.")
        } else if hit_rate.is_some_and(|hit_rate| hit_rate >= HEALTHY) {
            (
                Level::Near,
                "More than fits, but turns still find their history: some conversations have ended. Watch the prefix hit rate.",
            )
        } else {
            (Level::Over, "Above 100 % the cache thrashes: turns read their history again. Admission or more replicas help.")
        };
        let typical_context_tokens = context_tokens.checked_div(conversations).unwrap_or(0);
        Some(Self { conversations, typical_context_tokens, context_tokens, cache_tokens, usage, level, advice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_eighty_percent_fits_and_above_a_hundred_thrashes() {
        let level = |tokens| Capacity::of(10, tokens, 1000, None).map(|capacity| capacity.level);
        let levels = [0, 800, 801, 1000, 1001].map(level);
        assert_eq!(levels, [Level::Fits, Level::Fits, Level::Near, Level::Near, Level::Over].map(Some));
    }

    #[test]
    fn what_turns_find_in_the_cache_counts_for_more_than_an_estimate() {
        let level = |hit_rate| Capacity::of(10, 3000, 1000, Some(hit_rate)).map(|capacity| capacity.level);
        assert_eq!([0.86, 0.33].map(level), [Some(Level::Near), Some(Level::Over)]);
    }

    #[test]
    fn nothing_is_said_while_the_cache_is_unknown() {
        assert_eq!(Capacity::of(10, 800, 0, None), None);
    }

    #[test]
    fn a_typical_context_is_the_mean_and_none_when_there_is_no_conversation() {
        let typical = |conversations, tokens| Capacity::of(conversations, tokens, 1000, None).map(|c| c.typical_context_tokens);
        assert_eq!((typical(4, 402), typical(0, 0)), (Some(100), Some(0)));
    }
}
