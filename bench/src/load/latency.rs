//! Distributions of times.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What is told of a distribution; seconds of the model's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Values.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Percentiles: the smallest value that so many per cent of all do not exceed, exact to a thousandth of itself.
    pub p50: f64,
    /// See `p50`.
    pub p90: f64,
    /// See `p50`.
    pub p95: f64,
    /// See `p50`.
    pub p99: f64,
    /// See `p50`.
    pub p99_9: f64,
    /// The largest.
    pub max: f64,
}

/// Longer times count as this one.
const LONGEST: Duration = Duration::from_secs(6 * 3600);

/// Significant digits that are kept of a time.
const DIGITS: u8 = 3;

/// Real times as they are counted, in whole microseconds.
#[derive(Clone, Debug)]
pub(super) struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        let times = Histogram::new_with_max(LONGEST.as_micros() as u64, DIGITS);
        Self(times.unwrap_or_else(|error| unreachable!("these limits are allowed: {error}")))
    }
}

impl Times {
    pub(super) fn add(&mut self, time: Duration, count: u64) {
        self.0.saturating_record_n(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), count);
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The distribution with every time multiplied by `speed`; none without a value.
    pub(super) fn latency(&self, speed: f64) -> Option<Latency> {
        let seconds = |micros: f64| micros * speed / 1e6;
        let quantile = |quantile| seconds(self.0.value_at_quantile(quantile) as f64);
        (self.count() > 0).then(|| Latency {
            count: self.count(),
            mean: seconds(self.0.mean()),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p95: quantile(0.95),
            p99: quantile(0.99),
            p99_9: quantile(0.999),
            max: seconds(self.0.max() as f64),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred_in_model_time() {
        let mut times = Times::default();
        assert_eq!(times.latency(1.0), None);
        (1..=1000).for_each(|millis| times.add(Duration::from_millis(millis), 1));
        let latency = times.latency(10.0).unwrap();
        let expected = [(latency.p50, 5.0), (latency.p90, 9.0), (latency.p95, 9.5), (latency.p99, 9.9), (latency.p99_9, 9.99)];
        for (value, expected) in expected {
            assert!((value / expected - 1.0).abs() < 0.002, "{value} {expected}");
        }
        assert!((latency.max / 10.0 - 1.0).abs() < 0.002 && (latency.mean / 5.005 - 1.0).abs() < 0.002, "{latency:?}");
    }

    #[test]
    fn a_time_may_count_several_times() {
        let mut times = Times::default();
        times.add(Duration::from_millis(1), 99);
        times.add(Duration::from_secs(1), 1);
        let latency = times.latency(1.0).unwrap();
        assert_eq!(latency.count, 100);
        assert!(latency.p99 < 0.002 && latency.p99_9 > 0.99);
    }
}
