//! What a simulation showed.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::world::Simulation;
use crate::engine::Counters;

/// What has been counted so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) sessions: u64,
    ttfb_s: Vec<f64>,
    output_tokens: u64,
    later: u64,
    stayed: u64,
    looks: u64,
    busy: u64,
}

/// The figures of one simulation, in the model's time.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationReport {
    /// Where turns went.
    pub policy: String,
    /// Sessions at once.
    pub sessions: usize,
    /// Sessions that ended, an hour.
    pub sessions_per_hour: f64,
    /// Tokens of answers that ended, a minute.
    pub output_tokens_per_minute: f64,
    /// Seconds to the first token, median.
    pub ttfb_p50_s: f64,
    /// Seconds to the first token, 95th percentile.
    pub ttfb_p95_s: f64,
    /// Seconds to the first token, mean.
    pub ttfb_mean_s: f64,
    /// Replicas with a running request, averaged over looks.
    pub replicas_busy: f64,
    /// Prompt tokens from the cache, per cent, by the engines' own counters.
    pub prefix_hits: f64,
    /// Turns served where the session's turn before was, per cent.
    pub stayed: f64,
    /// Turns that ended.
    pub turns: usize,
    /// Requests put back since the cache was full.
    pub preemptions: u64,
}

impl Tally {
    pub(super) fn turn(&mut self, sent: Duration, first_token: Option<Duration>, _ended: Duration, output_tokens: usize) {
        if let Some(first_token) = first_token {
            self.ttfb_s.push((first_token - sent).as_secs_f64());
            self.output_tokens += output_tokens as u64;
        }
    }

    pub(super) fn later_turn(&mut self, stayed: bool) {
        self.later += 1;
        self.stayed += u64::from(stayed);
    }

    pub(super) fn look(&mut self, busy: usize) {
        self.looks += 1;
        self.busy += busy as u64;
    }

    pub(super) fn report(mut self, simulation: &Simulation, counters: &[Counters]) -> SimulationReport {
        self.ttfb_s.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            let at = (share * self.ttfb_s.len() as f64) as usize;
            self.ttfb_s.get(at.min(self.ttfb_s.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
        };
        let (cached, computed) =
            counters.iter().fold((0, 0), |(c, p), one| (c + one.prompt_tokens_cached, p + one.prompt_tokens_computed));
        let ratio = |part: u64, all: u64| if all == 0 { f64::NAN } else { part as f64 / all as f64 };
        let minutes = simulation.duration.as_secs_f64() / 60.0;
        SimulationReport {
            policy: format!("{:?}", simulation.policy),
            sessions: simulation.sessions,
            sessions_per_hour: self.sessions as f64 * 60.0 / minutes,
            output_tokens_per_minute: self.output_tokens as f64 / minutes,
            ttfb_p50_s: quantile(0.5),
            ttfb_p95_s: quantile(0.95),
            ttfb_mean_s: self.ttfb_s.iter().sum::<f64>() / self.ttfb_s.len() as f64,
            replicas_busy: ratio(self.busy, self.looks),
            prefix_hits: 100.0 * ratio(cached, cached + computed),
            stayed: 100.0 * ratio(self.stayed, self.later),
            turns: self.ttfb_s.len(),
            preemptions: counters.iter().map(|one| one.preemptions).sum(),
        }
    }
}

impl SimulationReport {
    /// The columns of its line.
    pub const HEADER: &'static str =
        "sessions  policy        output tok/min  sessions/h  TTFB p50 s   p95 s  mean s  hits %  busy  stayed %  turns  preempted";
}

impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>8}  {:<12}  {:>14.0}  {:>10.0}  {:>10.2}  {:>6.2}  {:>6.2}  {:>6.1}  {:>4.2}  {:>8.1}  {:>5}  {:>9}",
            self.sessions,
            self.policy,
            self.output_tokens_per_minute,
            self.sessions_per_hour,
            self.ttfb_p50_s,
            self.ttfb_p95_s,
            self.ttfb_mean_s,
            self.prefix_hits,
            self.replicas_busy,
            self.stayed,
            self.turns,
            self.preemptions,
        )
    }
}
