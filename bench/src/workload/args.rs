//! A workload on the command line.

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

use super::{Kind, SessionShape, Workload, trace};

/// Kinds of load by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WorkloadName {
    /// Sessions of one shape: a shared system prompt of 3.5k tokens, a first message of 7.3k, five more turns of 400, 256 tokens out.
    Reference,
    /// As agents have them: think times, contexts from 5k to 100k tokens, compaction, calls beside the conversation, silent ends.
    Agents,
    /// The reference's sessions, each with two fan-outs of two to four subagents.
    Subagents,
    /// Six turns on contexts of 5k to 100k tokens.
    Long,
    /// The reference's sessions with agents' think times; one in eight begins with 20k tokens and has 20 turns.
    Skewed,
    /// The reference's sessions as a Poisson process: --rate says how many a minute.
    Open,
}

/// What sessions send.
#[derive(Clone, Debug, Args)]
pub struct WorkloadArgs {
    /// Kind of sessions.
    #[arg(long, alias = "kind", value_enum, default_value = "reference")]
    pub workload: WorkloadName,
    /// Sessions a minute that come in the workload `open`.
    #[arg(long, default_value_t = 12.0)]
    pub rate: f64,
    /// Sessions of this trace instead: session plans as `homing-bench workload` writes them, or a Mooncake trace.
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub trace: Option<PathBuf>,
}

impl WorkloadArgs {
    /// The workload; the same seed gives the same sessions.
    ///
    /// # Errors
    /// A trace that cannot be read, or a rate that makes no sense.
    pub fn workload(&self, seed: u64) -> Result<Workload> {
        if let Some(path) = &self.trace {
            return Ok(Workload::from_trace(trace::read_file(path)?));
        }
        ensure!(self.rate.is_finite() && self.rate > 0.0, "--rate is {}: give sessions a minute, above 0", self.rate);
        Ok(Workload::new(self.workload.kind(self.rate), seed))
    }
}

impl WorkloadName {
    /// The kind by this name; `per_minute` is the rate of an open loop.
    pub fn kind(self, per_minute: f64) -> Kind {
        match self {
            Self::Reference => Kind::Reference(SessionShape::default()),
            Self::Agents => Kind::Agents,
            Self::Subagents => Kind::Subagents,
            Self::Long => Kind::Long,
            Self::Skewed => Kind::Skewed,
            Self::Open => Kind::Open { per_minute },
        }
    }
}
