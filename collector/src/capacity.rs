//! Whether the conversations that replicas hold fit into their caches.

use serde::Serialize;

/// Bytes of a request's body that make one token: about four for English and code, in JSON, with the tokenizers of today's models.
/// What it gives is an estimate, and is called one wherever it is shown.
const BYTES_PER_TOKEN: u64 = 4;

/// The share of the cache up to which conversations fit: above it, there is no room for those that come next.
const NEARLY_FULL: f64 = 0.8;

/// An estimate of the tokens in requests of so many bytes.
pub fn tokens(bytes: u64) -> u64 {
    bytes / BYTES_PER_TOKEN
}

/// Held conversations times their typical context, against the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Capacity {
    /// Conversations at home in the pool and active within the idle time.
    pub held_conversations: u64,
    /// Tokens of a held conversation's last request, on average; an estimate.
    pub typical_context_tokens: u64,
    /// Tokens of all of them; an estimate.
    pub held_tokens: u64,
    /// Tokens that the caches of the replicas that are up take together.
    pub cache_tokens: u64,
    /// [`Capacity::held_tokens`] divided by [`Capacity::cache_tokens`]; 1 is full.
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
    /// Up to 100 %.
    Near,
    /// Above it.
    Over,
}

impl Capacity {
    /// What `held_tokens` of `held_conversations` mean for caches of `cache_tokens`; `None` while a cache's size is unknown.
    pub fn of(held_conversations: u64, held_tokens: u64, cache_tokens: u64) -> Option<Self> {
        if cache_tokens == 0 {
            return None;
        }
        let usage = held_tokens as f64 / cache_tokens as f64;
        let (level, advice) = match usage {
            usage if usage <= NEARLY_FULL => (Level::Fits, "The conversations fit: each turn finds its history in the cache."),
            usage if usage <= 1.0 => (Level::Near, "Nearly full: the conversations that come next push others out of the cache."),
            _ => (
                Level::Over,
                "More than fits: above 100 % the cache thrashes and turns read their history again. Admission or more replicas help.",
            ),
        };
        let typical_context_tokens = held_tokens.checked_div(held_conversations).unwrap_or(0);
        Some(Self { held_conversations, typical_context_tokens, held_tokens, cache_tokens, usage, level, advice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_eighty_percent_fits_and_above_a_hundred_thrashes() {
        let level = |held| Capacity::of(10, held, 1000).map(|capacity| capacity.level);
        let levels = [0, 800, 801, 1000, 1001].map(level);
        assert_eq!(levels, [Level::Fits, Level::Fits, Level::Near, Level::Near, Level::Over].map(Some));
    }

    #[test]
    fn nothing_is_said_while_the_cache_is_unknown() {
        assert_eq!(Capacity::of(10, 800, 0), None);
    }

    #[test]
    fn a_typical_context_is_the_mean_and_none_when_nothing_is_held() {
        let typical = |conversations, tokens| Capacity::of(conversations, tokens, 1000).map(|c| c.typical_context_tokens);
        assert_eq!((typical(4, 402), typical(0, 0)), (Some(100), Some(0)));
    }
}
