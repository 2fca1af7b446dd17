//! Histograms with vLLM's buckets.

/// Upper bounds of `vllm:time_to_first_token_seconds`, in seconds (vLLM 0.26, `vllm/v1/metrics/loggers.py`).
pub(super) const TTFT_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
];

/// Upper bounds of `vllm:e2e_request_latency_seconds`, in seconds (the same source).
pub(super) const E2E_BOUNDS: &[f64] =
    &[0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0];

/// Counts of observations by upper bound.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    /// One for each bound; what is above all of them is in `count` alone.
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    pub(super) fn record(&mut self, value: f64) {
        if let Some(count) = self.counts.get_mut(self.bounds.partition_point(|bound| *bound < value)) {
            *count += 1;
        }
        self.count += 1;
        self.sum += value;
    }

    /// Each bound with the number of observations at or below it, and last infinity with all.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let below = self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        self.bounds.iter().copied().zip(below).chain([(f64::INFINITY, self.count)])
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_counts_at_its_bound_and_all_above() {
        let mut histogram = Histogram::new(&[1.0, 2.0, 4.0]);
        [0.5, 1.0, 3.0, 9.0].into_iter().for_each(|value| histogram.record(value));
        assert_eq!(histogram.cumulative().collect::<Vec<_>>(), [(1.0, 2), (2.0, 2), (4.0, 3), (f64::INFINITY, 4)]);
        assert_eq!((histogram.count(), histogram.sum()), (4, 13.5));
    }
}
