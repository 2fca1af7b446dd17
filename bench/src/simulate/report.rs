//! What simulations showed.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::world::Simulation;
use crate::engine::Counters;

/// What has been counted so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) started: u64,
    pub(super) done: u64,
    pub(super) abandoned: u64,
    pub(super) refused: u64,
    pub(super) refused_calls: u64,
    pub(super) output_tokens: u64,
    ttfb_s: Vec<f64>,
    later: u64,
    stayed: u64,
    looks: u64,
    busy: u64,
}

/// The figures of one simulation, or the mean of several, in the model's time. Sessions are those that nobody started: a subagent is part
/// of its session. Turns are calls but those beside the conversation. What there is nothing to tell of is not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Tokens of whole answers, a minute.
    pub output_tokens_per_minute: f64,
    /// Sessions that did all they had planned, an hour.
    pub sessions_per_hour: f64,
    /// Seconds from sending a turn to its first token, median.
    pub ttfb_p50_s: f64,
    /// The same, 95th percentile.
    pub ttfb_p95_s: f64,
    /// The same, mean.
    pub ttfb_mean_s: f64,
    /// Prompt tokens from the cache, per cent, by the engines' own counters.
    pub prefix_hits: f64,
    /// Looked-up tokens that were found in the cache, per cent: vLLM's `prefix_cache_hits` of `prefix_cache_queries`, which count a request
    /// that waits for room again at every step.
    pub looked_up_hits: f64,
    /// Replicas with a running request, averaged over looks.
    pub replicas_busy: f64,
    /// Turns served where the session's turn before was, per cent.
    pub stayed: f64,
    /// Turns that were answered.
    pub turns: f64,
    /// Requests put back since the cache was full.
    pub preemptions: f64,
    /// Calls that an engine refused: they and their answers have more tokens than a KV cache holds. Their sessions end.
    pub refused_calls: f64,
    /// Sessions that began.
    pub sessions_started: f64,
    /// Of those: did all they had planned.
    pub sessions_done: f64,
    /// Of those: stopped without notice, as planned.
    pub sessions_abandoned: f64,
    /// Of those: ended by a refusal.
    pub sessions_refused: f64,
    /// Of those: still under way at the end.
    pub sessions_unfinished: f64,
}

/// The figures of one or more simulations that differ by their seeds.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationReport {
    /// Where requests went, or the setting that is compared.
    pub policy: String,
    /// Sessions at once; None for an open loop or several loads.
    pub sessions: Option<usize>,
    /// Simulations.
    pub runs: usize,
    /// The mean over them.
    #[serde(flatten)]
    pub mean: Figures,
    /// Their sample standard deviation; None with one run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deviation: Option<Figures>,
}

impl Tally {
    /// A turn that was answered, and whether it stayed where the one before was.
    pub(super) fn turn(&mut self, ttfb: Duration, stayed: Option<bool>) {
        self.ttfb_s.push(ttfb.as_secs_f64());
        self.later += u64::from(stayed.is_some());
        self.stayed += u64::from(stayed == Some(true));
    }

    pub(super) fn look(&mut self, busy: usize) {
        self.looks += 1;
        self.busy += busy as u64;
    }

    pub(super) fn figures(mut self, duration: Duration, unfinished: usize, counters: &Counters) -> Figures {
        self.ttfb_s.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            let at = (share * self.ttfb_s.len() as f64) as usize;
            self.ttfb_s.get(at.min(self.ttfb_s.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
        };
        let (cached, computed) = (counters.prompt_tokens_cached, counters.prompt_tokens_computed);
        let ratio = |part: u64, all: u64| if all == 0 { f64::NAN } else { part as f64 / all as f64 };
        let minutes = duration.as_secs_f64() / 60.0;
        Figures {
            output_tokens_per_minute: self.output_tokens as f64 / minutes,
            sessions_per_hour: self.done as f64 * 60.0 / minutes,
            ttfb_p50_s: quantile(0.5),
            ttfb_p95_s: quantile(0.95),
            ttfb_mean_s: self.ttfb_s.iter().sum::<f64>() / self.ttfb_s.len() as f64,
            prefix_hits: 100.0 * ratio(cached, cached + computed),
            looked_up_hits: 100.0 * ratio(counters.prefix_cache_hits, counters.prefix_cache_queries),
            replicas_busy: ratio(self.busy, self.looks),
            stayed: 100.0 * ratio(self.stayed, self.later),
            turns: self.ttfb_s.len() as f64,
            preemptions: counters.preemptions as f64,
            refused_calls: self.refused_calls as f64,
            sessions_started: self.started as f64,
            sessions_done: self.done as f64,
            sessions_abandoned: self.abandoned as f64,
            sessions_refused: self.refused as f64,
            sessions_unfinished: unfinished as f64,
        }
    }
}

impl Figures {
    /// Combines each figure with its counterpart.
    fn zip(self, other: Self, with: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            output_tokens_per_minute: with(self.output_tokens_per_minute, other.output_tokens_per_minute),
            sessions_per_hour: with(self.sessions_per_hour, other.sessions_per_hour),
            ttfb_p50_s: with(self.ttfb_p50_s, other.ttfb_p50_s),
            ttfb_p95_s: with(self.ttfb_p95_s, other.ttfb_p95_s),
            ttfb_mean_s: with(self.ttfb_mean_s, other.ttfb_mean_s),
            prefix_hits: with(self.prefix_hits, other.prefix_hits),
            looked_up_hits: with(self.looked_up_hits, other.looked_up_hits),
            replicas_busy: with(self.replicas_busy, other.replicas_busy),
            stayed: with(self.stayed, other.stayed),
            turns: with(self.turns, other.turns),
            preemptions: with(self.preemptions, other.preemptions),
            refused_calls: with(self.refused_calls, other.refused_calls),
            sessions_started: with(self.sessions_started, other.sessions_started),
            sessions_done: with(self.sessions_done, other.sessions_done),
            sessions_abandoned: with(self.sessions_abandoned, other.sessions_abandoned),
            sessions_refused: with(self.sessions_refused, other.sessions_refused),
            sessions_unfinished: with(self.sessions_unfinished, other.sessions_unfinished),
        }
    }
}

/// The mean, and with two or more the sample standard deviation.
pub(super) fn mean_and_deviation(all: &[Figures]) -> (Figures, Option<Figures>) {
    let count = all.len() as f64;
    let sum = |figures: &mut dyn Iterator<Item = Figures>| figures.fold(Figures::default(), |sum, one| sum.zip(one, |a, b| a + b));
    let each = |figures: Figures, with: &dyn Fn(f64) -> f64| figures.zip(Figures::default(), |figure, _| with(figure));
    let mean = each(sum(&mut all.iter().copied()), &|sum| sum / count);
    let squares = sum(&mut all.iter().map(|one| one.zip(mean, |one, mean| (one - mean).powi(2))));
    let deviation = (all.len() > 1).then(|| each(squares, &|squares| (squares / (count - 1.0)).sqrt()));
    (mean, deviation)
}

impl SimulationReport {
    /// The columns of its line.
    pub const HEADER: &'static str = "sessions  policy                  output tok/min  sessions/h  TTFB p50 s   p95 s  mean s  hits %  busy  \
                                      stayed %  turns  preempted  refused";

    /// What runs with this name showed, which differ by their seeds or loads.
    pub fn new(policy: impl Into<String>, sessions: Option<usize>, runs: &[Figures]) -> Self {
        let (mean, deviation) = mean_and_deviation(runs);
        Self { policy: policy.into(), sessions, runs: runs.len(), mean, deviation }
    }

    /// What a simulation's runs showed.
    pub fn of(simulation: &Simulation, runs: &[Figures]) -> Self {
        let sessions = (!simulation.workload.is_open()).then_some(simulation.sessions);
        Self::new(simulation.policy.as_str(), sessions, runs)
    }
}

impl fmt::Display for SimulationReport {
    /// A line of means; with several runs another of standard deviations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sessions = self.sessions.map_or_else(|| "-".to_owned(), |sessions| sessions.to_string());
        line(f, &sessions, &self.policy, &self.mean)?;
        if let Some(deviation) = &self.deviation {
            writeln!(f)?;
            line(f, "", &format!("  +- over {} runs", self.runs), deviation)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, sessions: &str, name: &str, figures: &Figures) -> fmt::Result {
    write!(
        f,
        "{sessions:>8}  {name:<22}  {:>14.0}  {:>10.0}  {:>10.2}  {:>6.2}  {:>6.2}  {:>6.1}  {:>4.2}  {:>8.1}  {:>5.0}  {:>9.0}  {:>7.0}",
        figures.output_tokens_per_minute,
        figures.sessions_per_hour,
        figures.ttfb_p50_s,
        figures.ttfb_p95_s,
        figures.ttfb_mean_s,
        figures.prefix_hits,
        figures.replicas_busy,
        figures.stayed,
        figures.turns,
        figures.preemptions,
        figures.refused_calls,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_runs_are_their_mean_and_standard_deviation() {
        let run = |turns: f64| Figures { turns, ..Figures::default() };
        let report = SimulationReport::new("a", None, &[run(2.0), run(4.0), run(9.0)]);
        assert_eq!(report.mean.turns, 5.0);
        assert!((report.deviation.expect("three runs").turns - 13.0_f64.sqrt()).abs() < 1e-12);
        assert_eq!(SimulationReport::new("a", None, &[run(2.0)]).deviation, None);
    }
}
