//! The load generator: agent sessions against an OpenAI-compatible endpoint.
//!
//! Sessions are a closed loop: a session's next turn starts when the last has ended, its history then has the real answer, and a session
//! that has done its turns is replaced by a new one. At the end of the run, requests in flight are cut and not counted.

mod client;
mod engines;
mod report;
mod shape;

pub use report::LoadReport;
pub use shape::{Session, SessionShape};

use anyhow::{Context, Result, ensure};
use client::{Endpoint, Message};
use engines::Engines;
use report::{Tally, ratio};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

/// Before a new session, after one that failed: an endpoint that refuses at once is not hammered.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// What to run.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// Base URL of the endpoint.
    pub url: String,
    /// Base URLs of the engines behind it, for their metrics; may be empty.
    pub replicas: Vec<String>,
    /// The model's name.
    pub model: String,
    /// Sessions at once, at least 1.
    pub sessions: usize,
    /// How long, in real time.
    pub duration: Duration,
    /// How many times faster than real time the engines run; figures are in their time.
    pub speed: f64,
    /// The sessions' shape.
    pub shape: SessionShape,
    /// Texts and session ids depend on it and on the session's number alone.
    pub seed: u64,
    /// The number of the first session: another run of the same seed that starts elsewhere has the same system prompt, and
    /// sessions of its own.
    pub first_session: u64,
    /// A line a second on stderr.
    pub progress: bool,
}

impl LoadConfig {
    /// Eight sessions of the default shape for 18 s, against engines in real time.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            replicas: Vec::new(),
            model: "qwen3-4b".to_owned(),
            sessions: 8,
            duration: Duration::from_secs(18),
            speed: 1.0,
            shape: SessionShape::default(),
            seed: 0,
            first_session: 0,
            progress: false,
        }
    }
}

/// Runs the load and reports what it saw.
///
/// # Errors
/// Settings that make no sense, or engines whose metrics cannot be read. Turns that fail are counted in the report.
pub async fn run(config: LoadConfig) -> Result<LoadReport> {
    ensure!(config.sessions > 0, "there are no sessions to run: give --sessions at least 1");
    ensure!(
        config.shape.turns > 0 && config.shape.max_tokens > 0,
        "a session needs turns and tokens: give --turns and --max-tokens"
    );
    ensure!(config.speed.is_finite() && config.speed > 0.0, "the speed is {}: give a number above 0", config.speed);
    let engines = Engines::new(&config.replicas)?;
    let before = match &engines {
        Some(engines) => engines.prompt_tokens().await?,
        None => Default::default(),
    };

    let run = Arc::new(Run {
        endpoint: Endpoint::new(&config)?,
        tally: Mutex::default(),
        next_session: Mutex::new(config.first_session),
        config,
    });
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..run.config.sessions {
        tasks.spawn(Arc::clone(&run).sessions());
    }
    if let Some(engines) = engines.clone() {
        let run = Arc::clone(&run);
        tasks.spawn(async move {
            engines
                .watch(|busy| {
                    let mut tally = run.tally();
                    tally.looks += 1;
                    tally.busy += busy as u64;
                })
                .await;
        });
    }
    if run.config.progress {
        tasks.spawn(Arc::clone(&run).report_progress(start));
    }
    tokio::select! {
        () = sleep_until((start + run.config.duration).into()) => {}
        // The tasks never end by themselves.
        Some(Err(error)) = tasks.join_next() => return Err(error).context("a session's task failed"),
    }
    let (tally, elapsed) = (run.tally().clone(), start.elapsed());
    tasks.shutdown().await;

    let prefix_hits = match &engines {
        Some(engines) => {
            let after = engines.prompt_tokens().await?;
            ratio(100.0 * (after.cached - before.cached), after.all - before.all)
        }
        None => None,
    };
    Ok(tally.report(run.config.sessions, run.config.speed, elapsed, prefix_hits))
}

/// What the sessions of a run share.
struct Run {
    config: LoadConfig,
    endpoint: Endpoint,
    tally: Mutex<Tally>,
    next_session: Mutex<u64>,
}

impl Run {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One session after the other.
    async fn sessions(self: Arc<Self>) {
        loop {
            let number = {
                let mut next = self.next_session.lock().unwrap_or_else(PoisonError::into_inner);
                *next += 1;
                *next
            };
            match self.session(Session::new(self.config.shape, self.config.seed, number)).await {
                Ok(()) => self.tally().sessions_completed += 1,
                Err(error) => {
                    *self.tally().errors.entry(error.to_string()).or_default() += 1;
                    sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    }

    async fn session(&self, session: Session) -> Result<(), client::TurnError> {
        let id = session.id();
        let mut history = vec![Message { role: "system", content: session.system() }];
        let mut served_by: Option<String> = None;
        for turn in 0..self.config.shape.turns {
            history.push(Message { role: "user", content: session.message(turn) });
            let answer = self.endpoint.turn(&id, &history).await?;
            history.push(Message { role: "assistant", content: answer.text });

            let mut tally = self.tally();
            tally.first_tokens.push(answer.first_token);
            tally.output_tokens += answer.output_tokens;
            if let (Some(before), Some(now)) = (&served_by, &answer.replica) {
                tally.followed += 1;
                tally.stayed += u64::from(before == now);
            }
            served_by = answer.replica;
        }
        Ok(())
    }

    /// On a terminal the line is written over; elsewhere each is a line of its own.
    async fn report_progress(self: Arc<Self>, start: Instant) {
        let (before, after) = if io::stderr().is_terminal() { ("\r", "\x1b[K") } else { ("", "\n") };
        loop {
            sleep(Duration::from_secs(1)).await;
            let (turns, sessions, errors) = {
                let tally = self.tally();
                (tally.first_tokens.len(), tally.sessions_completed, tally.errors.values().sum::<u64>())
            };
            let (passed, all) = (start.elapsed().as_secs(), self.config.duration.as_secs());
            eprint!("{before}{passed} of {all} s: {turns} turns, {sessions} sessions done, {errors} errors{after}");
            let _ = io::stderr().flush();
        }
    }
}
