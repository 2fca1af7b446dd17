//! Metrics that are expected of an engine and that it does not report.

use std::fmt;
use std::ops::BitOrAssign;

use serde::{Serialize, Serializer};

/// A set of metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing(u8);

/// Each metric with the name it has now.
const NAMES: [(Missing, &str); 8] = [
    (Missing::RUNNING, "num_requests_running"),
    (Missing::WAITING, "num_requests_waiting"),
    (Missing::KV_USAGE, "kv_cache_usage_perc"),
    (Missing::PROMPT_TOKENS, "prompt_tokens_total"),
    (Missing::GENERATION_TOKENS, "generation_tokens_total"),
    (Missing::PREEMPTIONS, "num_preemptions_total"),
    (Missing::PREFIX_CACHE, "prompt_tokens_cached_total or prefix_cache_queries_total"),
    (Missing::CACHE_SIZE, "cache_config_info with the cache's size"),
];

#[expect(missing_docs, reason = "each is the metric of that name in `NAMES`")]
impl Missing {
    pub const NONE: Self = Self(0);
    pub const RUNNING: Self = Self(1);
    pub const WAITING: Self = Self(1 << 1);
    pub const KV_USAGE: Self = Self(1 << 2);
    pub const PROMPT_TOKENS: Self = Self(1 << 3);
    pub const GENERATION_TOKENS: Self = Self(1 << 4);
    pub const PREEMPTIONS: Self = Self(1 << 5);
    pub const PREFIX_CACHE: Self = Self(1 << 6);
    pub const CACHE_SIZE: Self = Self(1 << 7);
}

impl Missing {
    /// What is expected of an engine. It writes its gauges from its first step on: until it `has_worked`, they may be absent.
    pub(super) fn expected(has_worked: bool) -> Self {
        let gauges = Self::RUNNING.0 | Self::WAITING.0 | Self::KV_USAGE.0;
        Self(if has_worked { u8::MAX } else { !gauges })
    }

    pub(super) fn without(self, reported: Self) -> Self {
        Self(self.0 & !reported.0)
    }

    /// Whether nothing is missing.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Whether `metric` is missing.
    pub fn contains(self, metric: Self) -> bool {
        self.0 & metric.0 != 0
    }

    fn names(self) -> impl Iterator<Item = &'static str> {
        NAMES.iter().filter(move |(metric, _)| self.contains(*metric)).map(|(_, name)| *name)
    }
}

impl BitOrAssign for Missing {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// The names, with `vllm:` before each.
impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, name) in self.names().enumerate() {
            write!(f, "{}vllm:{name}", if place > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

impl Serialize for Missing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.names())
    }
}
