//! What a run saw.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The figures of one run. Times are the model's: real time multiplied by the speed. Only turns that ended within the run count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Sessions at once.
    pub sessions: usize,
    /// Sessions that did all their turns.
    pub sessions_completed: u64,
    /// Those an hour.
    pub sessions_per_hour: f64,
    /// Output tokens of finished turns, a minute.
    pub output_tokens_per_minute: f64,
    /// Median seconds to the first streamed token; none without a finished turn.
    pub ttfb_p50_s: Option<f64>,
    /// 95th percentile of the same.
    pub ttfb_p95_s: Option<f64>,
    /// Replicas with a running request, averaged over the looks at their metrics; none if no replica was named.
    pub replicas_busy: Option<f64>,
    /// Prompt tokens served from cache, in per cent of those asked for, all replicas together; none if no replica was named or none
    /// computed anything.
    pub prefix_hits: Option<f64>,
    /// Turns served by the replica of the turn before, in per cent of those that had one before; none if answers do not name a replica.
    pub stayed: Option<f64>,
    /// Turns finished.
    pub turns: usize,
    /// Turns that failed, by kind. The session of such a turn is given up.
    pub errors: BTreeMap<String, u64>,
    /// How many times faster than real time the engines ran.
    pub speed: f64,
    /// How long the run took, in the model's seconds.
    pub duration_s: f64,
}

/// Counts while a run goes on.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) sessions_completed: u64,
    /// Real time to the first token of each finished turn.
    pub(super) first_tokens: Vec<Duration>,
    pub(super) output_tokens: u64,
    /// Turns that had one before and whose replicas are both known.
    pub(super) followed: u64,
    /// Those of them on the same replica.
    pub(super) stayed: u64,
    pub(super) errors: BTreeMap<String, u64>,
    pub(super) looks: u64,
    pub(super) busy: u64,
}

impl Tally {
    /// The report on a run of `elapsed` real time.
    pub(super) fn report(mut self, sessions: usize, speed: f64, elapsed: Duration, prefix_hits: Option<f64>) -> LoadReport {
        self.first_tokens.sort_unstable();
        let duration_s = elapsed.as_secs_f64() * speed;
        let ttfb = |quantile| percentile(&self.first_tokens, quantile).map(|time| time.as_secs_f64() * speed);
        LoadReport {
            sessions,
            sessions_completed: self.sessions_completed,
            sessions_per_hour: self.sessions_completed as f64 / duration_s * 3600.0,
            output_tokens_per_minute: self.output_tokens as f64 / duration_s * 60.0,
            ttfb_p50_s: ttfb(0.5),
            ttfb_p95_s: ttfb(0.95),
            replicas_busy: ratio(self.busy as f64, self.looks as f64),
            prefix_hits,
            stayed: ratio(100.0 * self.stayed as f64, self.followed as f64),
            turns: self.first_tokens.len(),
            errors: self.errors,
            speed,
            duration_s,
        }
    }
}

/// The quotient, if there is something to divide by.
pub(super) fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

/// The nearest-rank percentile: the smallest value that `quantile` of all values do not exceed.
fn percentile(sorted: &[Duration], quantile: f64) -> Option<Duration> {
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = |value: Option<f64>, unit: &str| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}{unit}"));
        writeln!(f, "{} sessions at once for {:.0} s", self.sessions, self.duration_s)?;
        if self.speed != 1.0 {
            writeln!(f, "(model time: latencies are multiplied by the speed, {}, and rates divided by it)", self.speed)?;
        }
        writeln!(
            f,
            "  sessions/h         {:.0} ({} completed, {} turns)",
            self.sessions_per_hour, self.sessions_completed, self.turns
        )?;
        writeln!(f, "  output tokens/min  {:.0}", self.output_tokens_per_minute)?;
        writeln!(f, "  TTFB p50, p95      {}, {}", some(self.ttfb_p50_s, " s"), some(self.ttfb_p95_s, " s"))?;
        writeln!(f, "  replicas busy      {}", some(self.replicas_busy, ""))?;
        writeln!(f, "  prefix hits        {}", some(self.prefix_hits, " %"))?;
        writeln!(f, "  stayed             {}", some(self.stayed, " %"))?;
        let errors: Vec<_> = self.errors.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        write!(f, "  errors             {}", if errors.is_empty() { "none".to_owned() } else { errors.join(", ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let times: Vec<_> = (1..=20).map(Duration::from_secs).collect();
        assert_eq!(percentile(&times, 0.5), Some(Duration::from_secs(10)));
        assert_eq!(percentile(&times, 0.95), Some(Duration::from_secs(19)));
        assert_eq!(percentile(&times[..1], 0.95), Some(Duration::from_secs(1)));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn figures_are_in_model_time() {
        let tally = Tally {
            sessions_completed: 3,
            first_tokens: vec![Duration::from_millis(50)],
            output_tokens: 1000,
            followed: 4,
            stayed: 3,
            ..Tally::default()
        };
        let report = tally.report(8, 10.0, Duration::from_secs(18), Some(80.0));
        assert_eq!(report.duration_s, 180.0);
        assert_eq!(report.sessions_per_hour, 60.0);
        assert!((report.output_tokens_per_minute - 1000.0 / 3.0).abs() < 1e-9);
        assert_eq!(report.ttfb_p50_s, Some(0.5));
        assert_eq!(report.stayed, Some(75.0));
        assert_eq!(report.replicas_busy, None);
    }
}
