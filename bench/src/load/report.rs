//! What a run saw.

use super::api::Api;
use super::engines::HitCounters;
use super::latency::Latency;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The figures of one run. Times are the model's: real time multiplied by the speed.
///
/// Rates count what ended within the run; distributions, shares and errors count every turn that was due in it, also those that ended in
/// the time they were given after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// What was measured: the policy or variant under load. Empty if the run was given none.
    #[serde(default)]
    pub label: String,
    /// Which repetition of the same run this is.
    #[serde(default)]
    pub round: u32,
    /// The seed.
    #[serde(default)]
    pub seed: u64,
    /// The kind of sessions.
    #[serde(default)]
    pub workload: String,
    /// The API.
    #[serde(default)]
    pub api: Api,
    /// Closed loop: sessions at once. 0 in an open loop.
    pub sessions: usize,
    /// Open loop: sessions that arrive a minute.
    #[serde(default)]
    pub rate: Option<f64>,
    /// Sessions begun.
    pub sessions_started: u64,
    /// Sessions that did all their turns.
    pub sessions_completed: u64,
    /// Those an hour.
    pub sessions_per_hour: f64,
    /// Output tokens of finished turns, a minute.
    pub output_tokens_per_minute: f64,
    /// Median seconds from when a turn was due to its first streamed token; none without a finished turn.
    pub ttfb_p50_s: Option<f64>,
    /// 95th percentile of the same.
    pub ttfb_p95_s: Option<f64>,
    /// Replicas with a running request, averaged over the looks at their metrics; none if no replica was named.
    pub replicas_busy: Option<f64>,
    /// Prompt tokens served from cache, in per cent of those asked for, all replicas together; none if no replica was named or none
    /// computed anything.
    pub prefix_hits: Option<f64>,
    /// The counters they were taken from.
    pub prefix_hits_from: Option<HitCounters>,
    /// Turns served by the replica of the turn before, in per cent of those that had one before; none if answers do not name a replica.
    pub stayed: Option<f64>,
    /// Turns finished.
    pub turns: u64,
    /// Turns whose client left before the end, on purpose.
    pub turns_left: u64,
    /// Turns that had not ended when their time after the run was over; no distribution has them.
    pub turns_unfinished: u64,
    /// From when a turn was due to its first streamed token.
    pub ttfb_s: Option<Latency>,
    /// Between output tokens.
    pub token_gap_s: Option<Latency>,
    /// From when a turn was due to its end; without turns whose client left.
    pub turn_s: Option<Latency>,
    /// Turns that each replica answered, by the name in the answer's header.
    pub turns_by_replica: BTreeMap<String, u64>,
    /// Turns that failed, by kind. The session of such a turn is given up.
    pub errors: BTreeMap<String, u64>,
    /// What was seen at the first failure of each kind.
    pub error_examples: BTreeMap<String, String>,
    /// Restarts of engines that were seen in their counters.
    pub engine_restarts: u64,
    /// How many times faster than real time the engines ran.
    pub speed: f64,
    /// How long the run took, in the model's seconds.
    pub duration_s: f64,
    /// Cores this program kept busy: if it is near the machine's, the figures are of the load generator.
    pub generator_cores: f64,
    /// Its CPU time a turn, in real milliseconds.
    pub generator_cpu_ms_per_turn: Option<f64>,
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = |value: Option<f64>, unit: &str| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}{unit}"));
        match self.rate {
            Some(rate) => writeln!(f, "{rate} sessions a minute for {:.0} s ({})", self.duration_s, self.workload)?,
            None => writeln!(f, "{} sessions at once for {:.0} s ({})", self.sessions, self.duration_s, self.workload)?,
        }
        if self.speed != 1.0 {
            writeln!(f, "(model time: latencies are multiplied by the speed, {}, and rates divided by it)", self.speed)?;
        }
        writeln!(
            f,
            "  sessions/h         {:.0} ({} begun, {} completed, {} turns)",
            self.sessions_per_hour, self.sessions_started, self.sessions_completed, self.turns
        )?;
        writeln!(f, "  output tokens/min  {:.0}", self.output_tokens_per_minute)?;
        writeln!(f, "  TTFB p50, p95      {}, {}", some(self.ttfb_p50_s, " s"), some(self.ttfb_p95_s, " s"))?;
        writeln!(f, "  replicas busy      {}", some(self.replicas_busy, ""))?;
        let from = match self.prefix_hits_from {
            Some(HitCounters::PrefixCache) => " (by the prefix cache's counters: repeated attempts count again)",
            _ => "",
        };
        writeln!(f, "  prefix hits        {}{from}", some(self.prefix_hits, " %"))?;
        writeln!(f, "  stayed             {}", some(self.stayed, " %"))?;
        if self.turns_left + self.turns_unfinished + self.engine_restarts > 0 {
            let counts = (self.turns_left, self.turns_unfinished, self.engine_restarts);
            writeln!(f, "  {} turns left by their client, {} cut at the end, {} engine restarts", counts.0, counts.1, counts.2)?;
        }
        writeln!(f, "\n  seconds        count      mean       p50       p90       p95       p99     p99.9       max")?;
        for (name, latency) in [("TTFB", self.ttfb_s), ("token gap", self.token_gap_s), ("turn", self.turn_s)] {
            if let Some(Latency { count, mean, p50, p90, p95, p99, p99_9, max }) = latency {
                write!(f, "  {name:<10} {count:>9}")?;
                for value in [mean, p50, p90, p95, p99, p99_9, max] {
                    write!(f, " {value:>9.3}")?;
                }
                writeln!(f)?;
            }
        }
        let answered: u64 = self.turns_by_replica.values().sum();
        if answered > 0 {
            let share = |count: &u64| 100.0 * *count as f64 / answered as f64;
            let shares: Vec<_> =
                self.turns_by_replica.iter().map(|(name, count)| format!("{name} {:.1} %", share(count))).collect();
            writeln!(f, "\n  turns by replica   {}", shares.join(", "))?;
        }
        let kinds: Vec<_> = self.errors.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        writeln!(f, "\n  errors             {}", if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") })?;
        for (kind, example) in &self.error_examples {
            writeln!(f, "    {kind}: {}", example.replace('\n', " "))?;
        }
        let cpu = some(self.generator_cpu_ms_per_turn, " ms a turn");
        write!(f, "  load generator     {:.2} cores, {cpu}", self.generator_cores)
    }
}
