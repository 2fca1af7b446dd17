//! The load generator: agent sessions against an OpenAI or Anthropic endpoint, and what they saw.
//!
//! - **Closed loop**: so many sessions at once; one that ends is replaced. Figures per turn count from when the request was sent.
//! - **Open loop**: sessions come at times of their own, whether or not the endpoint keeps up, and each turn counts from when it was due.
//!   So turns that a slow endpoint held up count in full, and none is left out because the one before it was slow.
//!
//! In both, a session's next turn is due when the last has ended and the think time is over, and its history has the real answers. When
//! the run is over no turn starts; those on their way have [`LoadConfig::drain`] to end.

mod api;
mod client;
mod command;
mod drive;
mod engines;
mod error;
mod latency;
mod progress;
mod report;
mod stream;
mod tally;

pub use api::{Api, HeaderStyle};
pub use command::LoadArgs;
pub use engines::HitCounters;
pub use latency::Latency;
pub use report::LoadReport;

use crate::proxy::cpu;
use crate::workload::{Kind, SessionShape, Workload};
use anyhow::{Result, ensure};
use client::Endpoint;
use drive::Run;
use engines::{Counted, Engines};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval, sleep_until};

/// What to run.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// Base URL of the endpoint.
    pub url: String,
    /// Base URLs of the engines behind it, for their metrics; may be empty.
    pub replicas: Vec<String>,
    /// The model's name.
    pub model: String,
    /// The API.
    pub api: Api,
    /// What names the conversation.
    pub header_style: HeaderStyle,
    /// The answers' header that names the replica.
    pub replica_header: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// Whether answers go on to their token limit whatever the model says: vLLM's `ignore_eos`, OpenAI's API only.
    pub ignore_eos: bool,
    /// What sessions send.
    pub workload: Workload,
    /// What the workload is called in the report.
    pub workload_name: String,
    /// Closed loop: sessions at once, at least 1.
    pub sessions: usize,
    /// Open loop: sessions that come a minute of the engines' time, as a Poisson process. None: as the workload has it.
    pub rate: Option<f64>,
    /// How long, in real time.
    pub duration: Duration,
    /// How long turns on their way at the end have to end, in real time.
    pub drain: Duration,
    /// A turn fails if nothing comes for so long, in real time.
    pub timeout: Duration,
    /// The share of turns whose client leaves in the middle of the answer and goes on with what it has, 0 to 1.
    pub abort_share: f64,
    /// How many times faster than real time the engines run; figures are in their time.
    pub speed: f64,
    /// When clients leave, and when sessions come at a rate. The workload has a seed of its own.
    pub seed: u64,
    /// The number of the first session: another run of the same seed that starts elsewhere has sessions of its own.
    pub first_session: u64,
    /// What is measured, for the report.
    pub label: String,
    /// Which repetition this is, for the report.
    pub round: u32,
    /// A line a second on stderr.
    pub progress: bool,
}

impl LoadConfig {
    /// Eight sessions of the reference shape for 18 s, against engines in real time.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            replicas: Vec::new(),
            model: "qwen3-4b".to_owned(),
            api: Api::default(),
            header_style: HeaderStyle::default(),
            replica_header: "x-homing-replica".to_owned(),
            api_key: None,
            ignore_eos: false,
            workload: Workload::new(Kind::Reference(SessionShape::default()), 0),
            workload_name: "reference".to_owned(),
            sessions: 8,
            rate: None,
            duration: Duration::from_secs(18),
            drain: Duration::from_secs(30),
            timeout: Duration::from_secs(300),
            abort_share: 0.0,
            speed: 1.0,
            seed: 0,
            first_session: 0,
            label: String::new(),
            round: 0,
            progress: false,
        }
    }

    /// Whether sessions come at times of their own.
    fn is_open(&self) -> bool {
        self.rate.is_some() || self.workload.is_open()
    }

    fn check(&self) -> Result<()> {
        ensure!(self.is_open() || self.sessions > 0, "there are no sessions to run: give --sessions at least 1");
        ensure!(self.speed.is_finite() && self.speed > 0.0, "the speed is {}: give a number above 0", self.speed);
        ensure!((0.0..=1.0).contains(&self.abort_share), "--abort-share is {}: give a share from 0 to 1", self.abort_share);
        if let Some(rate) = self.rate {
            ensure!(rate.is_finite() && rate > 0.0, "--rate is {rate}: give sessions a minute, above 0");
        }
        let anthropic = self.api == Api::Anthropic;
        ensure!(
            anthropic || self.header_style != HeaderStyle::UserId,
            "--header-style user-id is a field of Anthropic's API: add --api anthropic"
        );
        ensure!(!(anthropic && self.ignore_eos), "--ignore-eos is no field of Anthropic's API: leave it out or add --api openai");
        Ok(())
    }
}

/// Runs the load and reports what it saw.
///
/// # Errors
/// Settings that make no sense, or engines whose metrics cannot be read. Turns that fail are counted in the report.
pub async fn run(config: LoadConfig) -> Result<LoadReport> {
    config.check()?;
    let endpoint = Endpoint::new(&config)?;
    let mut engines = if config.replicas.is_empty() { None } else { Some(Engines::begin(&config.replicas).await?) };
    let cpu_before = cpu::time(std::process::id())?;
    let start = Instant::now();
    let run = Arc::new(Run::new(config, endpoint, start));
    let mut sessions = run.begin();
    let progress = run.config().progress.then(|| progress::Line::begin(Arc::clone(&run)));

    // The sessions of a trace can be over before the run is.
    let mut ended = None;
    {
        let watch = watch(&run, engines.as_mut());
        tokio::pin!(watch);
        tokio::select! {
            () = sleep_until(run.end().into()) => {}
            () = &mut watch => {}
            result = sessions.all() => { result?; ended = Some(Instant::now()); }
        }
    }
    let elapsed = ended.map_or(run.end(), |ended| ended) - start;
    if ended.is_none() {
        // What is still on its way then is dropped, which closes its connection.
        if let Ok(result) = tokio::time::timeout_at((run.end() + run.config().drain).into(), sessions.all()).await {
            result?;
        }
    }
    sessions.stop().await;
    let cpu = cpu::time(std::process::id())?.saturating_sub(cpu_before);
    let counted = match &mut engines {
        Some(engines) => {
            engines.look().await;
            engines.counted()
        }
        None => Counted::default(),
    };
    if let Some(progress) = progress {
        progress.end().await;
    }
    Ok(run.report(elapsed, counted, cpu))
}

/// Looks at the engines over and over; never ends.
async fn watch(run: &Run, engines: Option<&mut Engines>) {
    let Some(engines) = engines else { return std::future::pending().await };
    // Reading its metrics costs a real engine some milliseconds.
    let period = if run.config().speed > 1.0 { Duration::from_millis(100) } else { Duration::from_millis(500) };
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once, when nothing has been sent yet.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let busy = engines.look().await;
        run.tally().looked(busy);
    }
}
