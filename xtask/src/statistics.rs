//! Envoy's statistics of Homing, and engines' metrics.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result};

/// Statistics by name, then by labels (as they are written) and value.
#[derive(Clone, Debug, Default)]
pub struct Statistics(pub BTreeMap<String, Vec<(String, u64)>>);

impl Statistics {
    /// Reads them at the admin interface.
    ///
    /// # Errors
    /// If Envoy does not answer.
    pub async fn read(admin: SocketAddr) -> Result<Self> {
        let text = reqwest::get(format!("http://{admin}/stats/prometheus?filter=homing")).await?.text().await?;
        let mut statistics: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("homing")) {
            let (series, value) = line.rsplit_once(' ').context("a value")?;
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            statistics.entry(name.to_owned()).or_default().push((labels.trim_end_matches('}').to_owned(), value.parse()?));
        }
        Ok(Self(statistics))
    }

    /// The sum of one statistic over the labels that contain every one of `labels`. Gauges below zero are signed numbers to Homing and
    /// huge ones to Envoy; they are added as signed numbers are.
    pub fn sum(&self, name: &str, labels: &[&str]) -> u64 {
        let series = self.0.get(name).into_iter().flatten();
        let values = series.filter(|(own, _)| labels.iter().all(|label| own.contains(label))).map(|(_, value)| *value);
        values.fold(0, u64::wrapping_add)
    }

    /// Whether a statistic is there, and zero in every series.
    pub fn all_zero(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|series| series.iter().all(|(_, value)| *value == 0))
    }
}

/// Requests that a replica's engine runs.
///
/// # Errors
/// If it does not answer, or does not say.
pub async fn running(replica: SocketAddr) -> Result<u64> {
    let metrics = reqwest::get(format!("http://{replica}/metrics")).await?.text().await?;
    let line = metrics.lines().find(|line| line.starts_with("vllm:num_requests_running")).context("vllm:num_requests_running")?;
    let (_, value) = line.rsplit_once(' ').context("a value")?;
    Ok(value.parse::<f64>()? as u64)
}
