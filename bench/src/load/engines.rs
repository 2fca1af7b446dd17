//! The engines' own counters, read from their `/metrics`.

use super::client::http_client;
use anyhow::{Context, Result};
use futures_util::future::{join_all, try_join_all};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Between two looks at what is running.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The replicas whose metrics are read.
#[derive(Clone, Debug)]
pub(super) struct Engines {
    http: reqwest::Client,
    urls: Vec<String>,
}

/// Prompt tokens that engines have counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PromptTokens {
    pub(super) all: f64,
    pub(super) cached: f64,
}

impl Engines {
    /// None if there is no URL to read from.
    pub(super) fn new(urls: &[String]) -> Result<Option<Self>> {
        if urls.is_empty() {
            return Ok(None);
        }
        let urls = urls.iter().map(|url| format!("{}/metrics", url.trim_end_matches('/'))).collect();
        Ok(Some(Self { http: http_client()?, urls }))
    }

    /// The counters of all replicas together.
    pub(super) async fn prompt_tokens(&self) -> Result<PromptTokens> {
        let texts = try_join_all(self.urls.iter().map(|url| self.read(url))).await?;
        Ok(texts.iter().fold(PromptTokens::default(), |sum, text| PromptTokens {
            all: sum.all + total(text, "vllm:prompt_tokens_by_source_total"),
            cached: sum.cached + total(text, "vllm:prompt_tokens_cached_total"),
        }))
    }

    /// Looks at the replicas over and over and tells `seen` each time how many have a running request. A replica that does not answer is
    /// not busy.
    pub(super) async fn watch(&self, mut seen: impl FnMut(usize)) {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once, when nothing has been sent yet.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let texts = join_all(self.urls.iter().map(|url| self.read(url))).await;
            seen(texts.iter().flatten().filter(|text| total(text, "vllm:num_requests_running") > 0.0).count());
        }
    }

    async fn read(&self, url: &str) -> Result<String> {
        let response = self.http.get(url).send().await.and_then(reqwest::Response::error_for_status);
        let text = match response {
            Ok(response) => response.text().await,
            Err(error) => Err(error),
        };
        text.with_context(|| format!("cannot read {url}: --replicas takes the engines' own base URLs"))
    }
}

/// The sum of a name's samples in the Prometheus text format, over all labels; 0 if there is none.
fn total(text: &str, name: &str) -> f64 {
    text.lines()
        .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_names_samples_are_summed_over_labels_and_no_others() {
        let text = "# TYPE a_total counter\na_total{e=\"0\"} 2.0\na_total{e=\"1\"} 1.5e+01\na_total_more 100\na 7\n";
        assert_eq!([total(text, "a_total"), total(text, "a"), total(text, "b")], [17.0, 7.0, 0.0]);
    }
}
