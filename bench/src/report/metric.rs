//! The figures that are compared.

use crate::load::LoadReport;

/// One figure of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Sessions completed an hour.
    Sessions,
    /// Output tokens a minute.
    Output,
    /// Median seconds to the first token.
    TtfbP50,
    /// 95th percentile of the same.
    TtfbP95,
    /// Replicas with a running request.
    Busy,
    /// Prompt tokens from the prefix cache, in per cent.
    Hits,
    /// Turns on the replica of the turn before, in per cent.
    Stayed,
    /// Turns that failed or were cut at the end.
    Failed,
}

impl Metric {
    /// In the order of the table's columns.
    pub const ALL: [Self; 8] =
        [Self::Sessions, Self::Output, Self::TtfbP50, Self::TtfbP95, Self::Busy, Self::Hits, Self::Stayed, Self::Failed];

    /// What it is called, with its unit.
    pub fn title(self) -> &'static str {
        match self {
            Self::Sessions => "sessions/h",
            Self::Output => "output tok/min",
            Self::TtfbP50 => "TTFB p50, s",
            Self::TtfbP95 => "TTFB p95, s",
            Self::Busy => "replicas busy",
            Self::Hits => "prefix hits, %",
            Self::Stayed => "stayed, %",
            Self::Failed => "failed turns",
        }
    }

    /// Its value in a run, if the run has one.
    pub fn of(self, run: &LoadReport) -> Option<f64> {
        match self {
            Self::Sessions => Some(run.sessions_per_hour),
            Self::Output => Some(run.output_tokens_per_minute),
            Self::TtfbP50 => run.ttfb_p50_s,
            Self::TtfbP95 => run.ttfb_p95_s,
            Self::Busy => run.replicas_busy,
            Self::Hits => run.prefix_hits,
            Self::Stayed => run.stayed,
            Self::Failed => Some((run.turns_unfinished + run.errors.values().sum::<u64>()) as f64),
        }
    }

    /// Digits after the point in a table.
    pub fn digits(self) -> usize {
        match self {
            Self::Sessions | Self::Output | Self::Failed => 0,
            Self::Hits | Self::Stayed => 1,
            Self::TtfbP50 | Self::TtfbP95 | Self::Busy => 2,
        }
    }
}
