//! Counts while a run goes on.

use super::LoadConfig;
use super::client::Answer;
use super::engines::Counted;
use super::error::TurnError;
use super::latency::Times;
use super::report::LoadReport;
use std::collections::BTreeMap;
use std::time::Duration;

/// What the sessions have seen so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) sessions_started: u64,
    pub(super) sessions_completed: u64,
    /// Sessions that are on their way now.
    pub(super) sessions_now: u64,
    /// Requests without an end; after the run, those that were cut.
    pub(super) on_their_way: u64,
    /// Turns that ended, also after the run.
    ended: u64,
    /// Turns finished within the run.
    pub(super) turns: u64,
    /// Turns that the client left, of all.
    pub(super) left: u64,
    pub(super) output_tokens: u64,
    pub(super) first_tokens: Times,
    pub(super) gaps: Times,
    pub(super) durations: Times,
    /// Turns that had one before and whose replicas are both known.
    followed: u64,
    /// Those of them on the same replica.
    stayed: u64,
    turns_by_replica: BTreeMap<String, u64>,
    pub(super) errors: BTreeMap<String, u64>,
    examples: BTreeMap<String, String>,
    /// Looks at the engines.
    looks: u64,
    /// Busy replicas, summed over the looks.
    busy: u64,
}

impl Tally {
    /// Takes a finished call; `in_run` tells whether it ended before the run did. `served_by` is the replica of the conversation's call
    /// before and becomes this one's.
    pub(super) fn answered(&mut self, answer: &Answer, in_run: bool, served_by: &mut Option<String>) {
        self.ended += 1;
        if let Some(first_token) = answer.first_token {
            self.first_tokens.add(first_token, 1);
        }
        if answer.left {
            self.left += 1;
        } else {
            self.durations.add(answer.duration, 1);
        }
        for (gap, count) in &answer.gaps {
            self.gaps.add(*gap, *count);
        }
        if in_run {
            self.turns += 1;
            self.output_tokens += answer.output_tokens;
        }
        if let Some(replica) = &answer.replica {
            *self.turns_by_replica.entry(replica.clone()).or_default() += 1;
            if let Some(before) = served_by {
                self.followed += 1;
                self.stayed += u64::from(before == replica);
            }
        }
        served_by.clone_from(&answer.replica);
    }

    /// Takes a call that failed; the first of each kind is the example.
    pub(super) fn failed(&mut self, error: TurnError) {
        let kind = error.kind.to_string();
        *self.errors.entry(kind.clone()).or_default() += 1;
        self.examples.entry(kind).or_insert(error.example);
    }

    /// Takes a look at the engines.
    pub(super) fn looked(&mut self, busy: usize) {
        self.looks += 1;
        self.busy += busy as u64;
    }

    /// The report on a run of `elapsed` real time, for which this program used `cpu`.
    pub(super) fn report(self, config: &LoadConfig, elapsed: Duration, counted: Counted, cpu: Duration) -> LoadReport {
        let speed = config.speed;
        let duration_s = elapsed.as_secs_f64() * speed;
        let ttfb = self.first_tokens.latency(speed);
        let calls = self.ended + self.errors.values().sum::<u64>();
        LoadReport {
            label: config.label.clone(),
            round: config.round,
            seed: config.seed,
            workload: config.workload_name.clone(),
            api: config.api,
            sessions: if config.is_open() { 0 } else { config.sessions },
            rate: config.rate,
            sessions_started: self.sessions_started,
            sessions_completed: self.sessions_completed,
            sessions_per_hour: self.sessions_completed as f64 / duration_s * 3600.0,
            output_tokens_per_minute: self.output_tokens as f64 / duration_s * 60.0,
            ttfb_p50_s: ttfb.map(|ttfb| ttfb.p50),
            ttfb_p95_s: ttfb.map(|ttfb| ttfb.p95),
            replicas_busy: ratio(self.busy as f64, self.looks as f64),
            prefix_hits: ratio(100.0 * counted.cached, counted.asked),
            prefix_hits_from: counted.counters,
            stayed: ratio(100.0 * self.stayed as f64, self.followed as f64),
            turns: self.turns,
            turns_left: self.left,
            turns_unfinished: self.on_their_way,
            ttfb_s: ttfb,
            token_gap_s: self.gaps.latency(speed),
            turn_s: self.durations.latency(speed),
            turns_by_replica: self.turns_by_replica,
            errors: self.errors,
            error_examples: self.examples,
            engine_restarts: counted.restarts,
            speed,
            duration_s,
            generator_cores: cpu.as_secs_f64() / elapsed.as_secs_f64(),
            generator_cpu_ms_per_turn: ratio(cpu.as_secs_f64() * 1000.0, calls as f64),
        }
    }
}

/// The quotient, if there is something to divide by.
fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}
