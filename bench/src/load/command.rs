//! `homing-bench load`.

use super::{Api, HeaderStyle, LoadConfig, LoadReport};
use crate::workload::{Kind, SessionShape, Workload, WorkloadName, trace};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

/// Sessions a minute if nothing says how many.
const DEFAULT_RATE: f64 = 12.0;

/// Drives an OpenAI or Anthropic endpoint with agent sessions and reports what they saw.
///
/// Closed loop: --sessions at once; one that ends is replaced. Open loop, with --rate, the workload `open` or a trace that has times:
/// sessions come when they come, and each turn counts from when it was due.
///
/// Latencies are multiplied and rates divided by --speed, so they are in the time of engines that run faster than real time.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Base URL of the endpoint, such as http://127.0.0.1:8080.
    #[arg(long)]
    url: String,
    /// Base URLs of the engines behind it, separated by commas: their metrics give busy replicas and prefix hits.
    #[arg(long, value_delimiter = ',')]
    replicas: Vec<String>,
    /// API of the endpoint.
    #[arg(long, value_enum, default_value = "openai")]
    api: Api,
    /// What names a request's conversation.
    #[arg(long, value_enum, default_value = "x-session-id")]
    header_style: HeaderStyle,
    /// The answers' header that names the replica.
    #[arg(long, default_value = "x-homing-replica")]
    replica_header: String,
    /// Environment variable that holds the endpoint's API key, sent as a bearer token.
    #[arg(long, value_name = "VARIABLE")]
    api_key_env: Option<String>,
    /// Name of the model.
    #[arg(long, default_value = "qwen3-4b")]
    model: String,
    /// Ask vLLM for answers as long as allowed (`ignore_eos`), so that runs are alike.
    #[arg(long)]
    ignore_eos: bool,
    /// What sessions send.
    #[arg(long, value_enum, default_value = "reference")]
    workload: WorkloadName,
    /// Sessions of this trace instead: session plans as `homing-bench workload` writes them, or a Mooncake trace.
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    /// Closed loop: sessions at once.
    #[arg(long, default_value_t = 8)]
    sessions: usize,
    /// Open loop: sessions that come a minute, as a Poisson process; 12 for the workload `open`.
    #[arg(long, conflicts_with = "sessions")]
    rate: Option<f64>,
    /// How long, in real time: 18s, 3m.
    #[arg(long, default_value = "18s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How long turns on their way at the end have to end, in real time.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    drain: Duration,
    /// A turn fails if nothing comes for so long, in real time.
    #[arg(long, default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Share of turns, 0 to 1, whose client leaves in the middle of the answer and goes on with what it has.
    #[arg(long, default_value_t = 0.0)]
    abort_share: f64,
    /// How many times faster than real time the engines run.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Workload `reference`: tokens of the system prompt that all sessions share.
    #[arg(long, default_value_t = SessionShape::default().system_tokens)]
    system_tokens: usize,
    /// Workload `reference`: tokens of a session's own first message.
    #[arg(long, default_value_t = SessionShape::default().first_tokens)]
    first_tokens: usize,
    /// Workload `reference`: requests in a session, the first included.
    #[arg(long, default_value_t = SessionShape::default().turns)]
    turns: usize,
    /// Workload `reference`: tokens added at each later turn.
    #[arg(long, default_value_t = SessionShape::default().turn_tokens)]
    turn_tokens: usize,
    /// Workload `reference`: most tokens in an answer.
    #[arg(long, default_value_t = SessionShape::default().max_tokens)]
    max_tokens: usize,
    /// Texts, session ids and times of arrival depend on it alone.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of the first session: give each of several runs against the same engines a range of its own.
    #[arg(long, default_value_t = 0)]
    first_session: u64,
    /// What is measured, such as the policy's name; `homing-bench report` compares runs by it.
    #[arg(long, default_value = "")]
    label: String,
    /// Which repetition this is; `homing-bench report` averages over them.
    #[arg(long, default_value_t = 0)]
    round: u32,
    /// Print the report as one line of JSON.
    #[arg(long)]
    pub json: bool,
    /// Show progress on stderr even if that is no terminal.
    #[arg(long)]
    progress: bool,
}

impl LoadArgs {
    /// Runs the load.
    ///
    /// # Errors
    /// Arguments that make no sense, a trace or engines that cannot be read.
    pub async fn run(&self) -> Result<LoadReport> {
        super::run(self.config()?).await
    }

    fn config(&self) -> Result<LoadConfig> {
        let (workload, workload_name) = self.workload()?;
        let api_key = self.api_key_env.as_ref().map(|name| {
            std::env::var(name).with_context(|| format!("the environment has no {name}: --api-key-env takes a variable's name"))
        });
        Ok(LoadConfig {
            url: self.url.clone(),
            replicas: self.replicas.clone(),
            model: self.model.clone(),
            api: self.api,
            header_style: self.header_style,
            replica_header: self.replica_header.clone(),
            api_key: api_key.transpose()?,
            ignore_eos: self.ignore_eos,
            workload,
            workload_name,
            sessions: self.sessions,
            rate: self.rate,
            duration: self.duration,
            drain: self.drain,
            timeout: self.timeout,
            abort_share: self.abort_share,
            speed: self.speed,
            seed: self.seed,
            first_session: self.first_session,
            label: self.label.clone(),
            round: self.round,
            progress: self.progress || io::stderr().is_terminal(),
        })
    }

    /// The workload and its name.
    fn workload(&self) -> Result<(Workload, String)> {
        if let Some(path) = &self.trace {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok((Workload::from_trace(trace::read_file(path)?), name));
        }
        let kind = match self.workload {
            WorkloadName::Reference => Kind::Reference(SessionShape {
                system_tokens: self.system_tokens,
                first_tokens: self.first_tokens,
                turns: self.turns,
                turn_tokens: self.turn_tokens,
                max_tokens: self.max_tokens,
            }),
            other => other.kind(self.rate.unwrap_or(DEFAULT_RATE)),
        };
        let name = self.workload.to_possible_value().map(|value| value.get_name().to_owned());
        Ok((Workload::new(kind, self.seed), name.unwrap_or_default()))
    }
}
