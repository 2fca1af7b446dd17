//! What a pool's texts are like, learned from two sides: the engines count prompt tokens, the proxies the bytes that became them.
//!
//! - Bytes in a token: bytes of the requests that were served by prompt tokens of the engines.
//! - Tokens that all conversations share: what the engines found in their caches beyond what the proxies know to have been read there
//!   before, by turns of which nothing had been read. Evictions make this too small, and so does nothing else; of the last windows the upper
//!   quartile is believed.

use crate::admission::Texts;

/// First turns in a window: fewer, and the turns under way at its ends weigh too much.
const WINDOW_TURNS: u64 = 32;

/// Windows that are remembered.
const WINDOWS: usize = 8;

/// Running totals of one pool, of all its engines and all its proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens the engines have read, computed or found.
    pub prompt_tokens: u64,
    /// Those of them they found in their caches.
    pub cached_tokens: u64,
    /// Bytes of the requests that were served.
    pub prompt_bytes: u64,
    /// Those of them that the replica had read with the conversation's turn before.
    pub repeated_bytes: u64,
    /// Requests of which the replica had read nothing before.
    pub first_turns: u64,
}

impl Totals {
    /// What has come since `earlier`; `None` if a counter began again.
    fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            prompt_tokens: self.prompt_tokens.checked_sub(earlier.prompt_tokens)?,
            cached_tokens: self.cached_tokens.checked_sub(earlier.cached_tokens)?,
            prompt_bytes: self.prompt_bytes.checked_sub(earlier.prompt_bytes)?,
            repeated_bytes: self.repeated_bytes.checked_sub(earlier.repeated_bytes)?,
            first_turns: self.first_turns.checked_sub(earlier.first_turns)?,
        })
    }
}

/// Learns what one pool's texts are like.
#[derive(Clone, Debug, Default)]
pub struct Estimator {
    /// The totals when the window began.
    start: Option<Totals>,
    bytes_per_token: Option<f32>,
    /// Shared tokens by window, the newest last.
    shared: Vec<u32>,
}

impl Estimator {
    /// Takes the totals as they are now.
    pub fn update(&mut self, totals: &Totals) {
        let Some(window) = self.start.and_then(|start| totals.since(&start)) else {
            self.start = Some(*totals);
            return;
        };
        if window.first_turns < WINDOW_TURNS || window.prompt_tokens == 0 || window.prompt_bytes == 0 {
            return;
        }
        self.start = Some(*totals);
        let bytes_per_token = window.prompt_bytes as f32 / window.prompt_tokens as f32;
        self.bytes_per_token = Some(bytes_per_token.clamp(0.25, 64.0));
        let repeated = window.repeated_bytes as f32 / bytes_per_token;
        // As a conversion of floats, this saturates.
        let shared = (window.cached_tokens as f32 - repeated) / window.first_turns as f32;
        self.shared.push(shared.max(0.0) as u32);
        if self.shared.len() > WINDOWS {
            self.shared.remove(0);
        }
    }

    /// Begins a new window with the next totals, because they will be sums of others than before. What was learned stays.
    pub fn begin_window(&mut self) {
        self.start = None;
    }

    /// Bytes in a token; `None` until a window has ended.
    pub fn bytes_per_token(&self) -> Option<f32> {
        self.bytes_per_token
    }

    /// Tokens that all conversations share; `None` until a window has ended.
    pub fn shared_tokens(&self) -> Option<u32> {
        let mut windows = self.shared.clone();
        windows.sort_unstable();
        windows.get(windows.len().saturating_mul(3) / 4).or(windows.last()).copied()
    }

    /// Both, with what is assumed of the unknown.
    pub fn texts(&self) -> Texts {
        let assumed = Texts::default();
        Texts {
            bytes_per_token: self.bytes_per_token.unwrap_or(assumed.bytes_per_token),
            shared_tokens: self.shared_tokens().unwrap_or(assumed.shared_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool whose conversations share 3,000 tokens and have 1,000 of their own in the first turn and 200 more in each of four others;
    /// 3 bytes are a token. `lost` turns of each conversation find only what is shared.
    fn after(conversations: u64, lost: u64) -> Totals {
        let contexts = [4_000_u64, 4_200, 4_400, 4_600, 4_800];
        let repeated: u64 = contexts[..4].iter().sum();
        let gone: u64 = contexts[..4].iter().take(lost as usize).map(|context| context - 3_000).sum();
        Totals {
            prompt_tokens: conversations * contexts.iter().sum::<u64>(),
            cached_tokens: conversations * (3_000 + repeated - gone),
            prompt_bytes: conversations * contexts.iter().sum::<u64>() * 3,
            repeated_bytes: conversations * repeated * 3,
            first_turns: conversations,
        }
    }

    #[test]
    fn it_finds_what_conversations_share_and_how_long_a_token_is() {
        let mut estimator = Estimator::default();
        estimator.update(&after(10, 0));
        assert_eq!((estimator.bytes_per_token(), estimator.shared_tokens()), (None, None));
        estimator.update(&after(42, 0));
        let texts = estimator.texts();
        assert!((texts.bytes_per_token - 3.0).abs() < 0.01 && texts.shared_tokens.abs_diff(3_000) < 10, "{texts:?}");
    }

    #[test]
    fn windows_with_evictions_do_not_unsettle_it() {
        let mut estimator = Estimator::default();
        let mut totals = Totals::default();
        estimator.update(&totals);
        for window in 0..8 {
            let more = after(40, if window % 2 == 0 { 4 } else { 0 });
            totals = Totals {
                prompt_tokens: totals.prompt_tokens + more.prompt_tokens,
                cached_tokens: totals.cached_tokens + more.cached_tokens,
                prompt_bytes: totals.prompt_bytes + more.prompt_bytes,
                repeated_bytes: totals.repeated_bytes + more.repeated_bytes,
                first_turns: totals.first_turns + more.first_turns,
            };
            estimator.update(&totals);
        }
        assert!(estimator.texts().shared_tokens.abs_diff(3_000) < 10, "{estimator:?}");
    }

    #[test]
    fn a_counter_that_begins_again_begins_a_window() {
        let mut estimator = Estimator::default();
        estimator.update(&after(100, 0));
        estimator.update(&after(5, 0));
        estimator.update(&after(30, 0));
        assert_eq!(estimator.shared_tokens(), None);
        estimator.update(&after(37, 0));
        assert!(estimator.shared_tokens().is_some());
    }
}
