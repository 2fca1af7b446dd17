//! The engines' own counters, read from their `/metrics` over and over.
//!
//! A counter of an engine that restarts begins again at 0. So what is taken is the growth from look to look, and a counter that has
//! fallen, or an engine whose start time has changed, has grown by all it shows. What an engine counted between the last look and its end
//! is lost: at most one interval's worth.

use super::client::{NO_CLIENT, client_builder};
use anyhow::{Context, Result};
use futures_util::future::{join_all, try_join_all};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A look takes no longer: an engine that hangs is not busy.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The most that a metric is taken to say, which a float still counts one by one: sums of these are numbers too.
const MOST: f64 = 9e15;

/// Which counters prefix hits are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HitCounters {
    /// `vllm:prompt_tokens_by_source_total` and `vllm:prompt_tokens_cached_total`: every prompt counts once. vLLM 0.16 and newer.
    PromptTokens,
    /// `vllm:prefix_cache_queries_total` and `_hits_total` (before 0.9.2 `gpu_prefix_cache_`): a request that waits for room is counted
    /// again at every attempt, so hits look rarer or more frequent than they are when the cache is short.
    PrefixCache,
}

/// Names of the counters of prompt tokens asked for and served from cache, the best first.
const COUNTERS: [(HitCounters, &str, &str); 3] = [
    (HitCounters::PromptTokens, "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_cached_total"),
    (HitCounters::PrefixCache, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    (HitCounters::PrefixCache, "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
];

/// One look at one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Look {
    running: f64,
    /// When the process started; engines with several API processes do not say.
    started: Option<f64>,
    /// Prompt tokens asked for and served from cache, of each of [`COUNTERS`]; none if the engine has not the first of the two.
    tokens: [Option<[f64; 2]>; COUNTERS.len()],
}

impl Look {
    fn read(text: &str) -> Self {
        let mut look = Self::default();
        for line in text.lines() {
            let Some(end) = line.find(['{', ' ']) else { continue };
            let name = &line[..end];
            if !(name.starts_with("vllm:") || name == "process_start_time_seconds") {
                continue;
            }
            let value = line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
            let Some(value) = value.filter(|value| (0.0..=MOST).contains(value)) else { continue };
            match name {
                "vllm:num_requests_running" => look.running += value,
                "process_start_time_seconds" => look.started = Some(value),
                _ => {
                    for ((_, asked, cached), tokens) in COUNTERS.iter().zip(&mut look.tokens) {
                        if name == *asked {
                            tokens.get_or_insert_default()[0] += value;
                        } else if name == *cached {
                            tokens.get_or_insert_default()[1] += value;
                        }
                    }
                }
            }
        }
        look
    }

    /// The tokens of the best counters it has.
    fn best(&self) -> Option<(HitCounters, [f64; 2])> {
        COUNTERS.iter().zip(self.tokens).find_map(|((kind, ..), tokens)| Some((*kind, tokens?)))
    }
}

/// One engine's growth since the first look.
#[derive(Clone, Debug, Default)]
struct Growth {
    last: Look,
    counters: Option<HitCounters>,
    /// Asked for and served from cache.
    tokens: [f64; 2],
    restarts: u64,
}

impl Growth {
    fn begin(look: Look) -> Self {
        Self { last: look, counters: look.best().map(|(counters, _)| counters), ..Self::default() }
    }

    fn add(&mut self, look: Look) {
        let before = self.last.best().map_or([0.0; 2], |(_, tokens)| tokens);
        let Some((counters, now)) = look.best() else { return };
        let fell = now.iter().zip(before).any(|(now, before)| *now < before);
        let another = matches!((look.started, self.last.started), (Some(now), Some(before)) if now != before);
        let since = if fell || another {
            self.restarts += 1;
            [0.0; 2]
        } else {
            before
        };
        for ((sum, now), since) in self.tokens.iter_mut().zip(now).zip(since) {
            *sum += now - since;
        }
        self.counters = Some(counters);
        self.last = look;
    }
}

/// The engines whose metrics are read.
#[derive(Clone, Debug)]
pub(super) struct Engines {
    http: reqwest::Client,
    urls: Vec<String>,
    growth: Vec<Growth>,
}

/// What the engines have counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counted {
    /// Prompt tokens asked for.
    pub(super) asked: f64,
    /// Those served from cache.
    pub(super) cached: f64,
    /// The poorest counters that one of the engines has.
    pub(super) counters: Option<HitCounters>,
    /// Restarts seen.
    pub(super) restarts: u64,
}

impl Engines {
    /// Looks at every engine for the first time.
    ///
    /// # Errors
    /// An engine that cannot be read.
    pub(super) async fn begin(urls: &[String]) -> Result<Self> {
        let urls: Vec<_> = urls.iter().map(|url| format!("{}/metrics", url.trim_end_matches('/'))).collect();
        let http = client_builder().timeout(TIMEOUT).build().context(NO_CLIENT)?;
        let first = try_join_all(urls.iter().map(|url| look(&http, url))).await?;
        Ok(Self { growth: first.into_iter().map(Growth::begin).collect(), http, urls })
    }

    /// Looks at all of them and returns how many have a running request. One that does not answer is not busy.
    pub(super) async fn look(&mut self) -> usize {
        let looks = join_all(self.urls.iter().map(|url| look(&self.http, url))).await;
        let mut busy = 0;
        for (growth, look) in self.growth.iter_mut().zip(looks) {
            if let Ok(look) = look {
                busy += usize::from(look.running > 0.0);
                growth.add(look);
            }
        }
        busy
    }

    /// The growth of all together since the first look.
    pub(super) fn counted(&self) -> Counted {
        self.growth.iter().fold(Counted::default(), |sum, growth| Counted {
            asked: sum.asked + growth.tokens[0],
            cached: sum.cached + growth.tokens[1],
            counters: match (sum.counters, growth.counters) {
                (Some(HitCounters::PrefixCache), _) | (_, Some(HitCounters::PrefixCache)) => Some(HitCounters::PrefixCache),
                (one, other) => one.or(other),
            },
            restarts: sum.restarts + growth.restarts,
        })
    }
}

async fn look(http: &reqwest::Client, url: &str) -> Result<Look> {
    let response = http.get(url).send().await.and_then(reqwest::Response::error_for_status);
    let text = match response {
        Ok(response) => response.text().await,
        Err(error) => Err(error),
    };
    Ok(Look::read(&text.with_context(|| format!("cannot read {url}: --replicas takes the engines' own base URLs"))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    fn exposition(started: u32, computed: u32, cached: u32) -> String {
        format!(
            "# TYPE vllm:prompt_tokens_by_source counter\nprocess_start_time_seconds {started}\n\
             vllm:num_requests_running{{engine=\"0\"}} 2.0\n\
             vllm:prompt_tokens_by_source_total{{engine=\"0\",source=\"local_compute\"}} {computed}\n\
             vllm:prompt_tokens_by_source_total{{engine=\"0\",source=\"local_cache_hit\"}} {cached}.0\n\
             vllm:prompt_tokens_cached_total{{engine=\"0\"}} {cached}.0\nvllm:prompt_tokens_cached_created{{engine=\"0\"}} 1.7e9\n\
             vllm:prefix_cache_queries_total{{engine=\"0\"}} 99999\n"
        )
    }

    fn growth(texts: &[String]) -> Growth {
        let mut growth = Growth::begin(Look::read(&texts[0]));
        texts[1..].iter().for_each(|text| growth.add(Look::read(text)));
        growth
    }

    #[test]
    fn what_was_counted_before_the_run_does_not_count() {
        let growth = growth(&[exposition(1, 100, 10), exposition(1, 150, 40)]);
        assert_eq!((growth.tokens, growth.restarts, growth.counters), ([80.0, 30.0], 0, Some(HitCounters::PromptTokens)));
        assert_eq!(growth.last.running, 2.0);
    }

    #[test]
    fn an_engine_that_restarts_begins_again_at_zero() {
        let texts = [exposition(1, 100, 10), exposition(1, 150, 40), exposition(2, 20, 5), exposition(2, 30, 5)];
        assert_eq!((growth(&texts).tokens, growth(&texts).restarts), ([115.0, 35.0], 1));
    }

    #[test]
    fn a_restart_is_seen_by_the_start_time_though_the_counters_are_higher_again() {
        let texts = [exposition(1, 100, 10), exposition(2, 150, 40)];
        assert_eq!((growth(&texts).tokens, growth(&texts).restarts), ([190.0, 40.0], 1));
    }

    #[test]
    fn an_older_vllm_is_read_by_its_prefix_cache_counters() {
        for name in ["prefix_cache", "gpu_prefix_cache"] {
            let text = |queries, hits| format!("vllm:{name}_queries_total{{}} {queries}\nvllm:{name}_hits_total{{}} {hits}\n");
            let growth = growth(&[text(10, 1), text(30, 11)]);
            assert_eq!((growth.tokens, growth.counters), ([20.0, 10.0], Some(HitCounters::PrefixCache)));
        }
    }

    #[test]
    fn ranks_of_one_endpoint_are_summed() {
        let text = "vllm:num_requests_running{engine=\"0\"} 1.0\nvllm:num_requests_running{engine=\"1\"} 2.0\n";
        assert_eq!(Look::read(text).running, 3.0);
    }

    proptest! {
        #[test]
        fn any_metrics_are_counts_and_their_growth_is_one(texts in prop::collection::vec(mutated(seeds("metrics")), 2..4)) {
            let mut growth = Growth::begin(Look::default());
            for text in texts {
                let look = Look::read(&text.text());
                prop_assert!(look.running.is_finite() && look.running >= 0.0, "{:?}", look);
                growth.add(look);
                prop_assert!(growth.tokens.iter().all(|tokens| tokens.is_finite() && *tokens >= 0.0), "{:?}", growth);
            }
        }

        #[test]
        fn growth_never_falls(looks in prop::collection::vec((0..3u32, 0..1000u32, 0..1000u32), 1..20)) {
            let mut growth = Growth::begin(Look::default());
            for (started, computed, cached) in looks {
                let before = growth.tokens;
                growth.add(Look::read(&exposition(started, computed, cached)));
                prop_assert!(growth.tokens[0] >= before[0] && growth.tokens[1] >= before[1]);
                prop_assert!(growth.tokens[1] <= growth.tokens[0]);
            }
        }
    }
}
