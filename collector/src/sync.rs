//! Pushing snapshots: one task an Envoy, each at its own pace, so that one that is away holds up no other.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use homing_routing::sync::{MAX_SYNC_BYTES, SYNC_VERSION, SyncAnswer};
use hyper::StatusCode;
use tokio::time::Instant;

use crate::config::EnvoyConfig;
use crate::control_client::ControlClient;
use crate::fleet::{Envoy, Fleet};
use crate::http_client::Bearer;
use crate::telemetry::Telemetry;

/// How long one exchange may take.
pub const SYNC_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest pause between two attempts at an Envoy that does not take snapshots. An Envoy that restarts knows no replica until it
/// has one, and leaves its requests to its fallback so long.
pub const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// Different problems of one Envoy that are logged until it answers again; one that keeps finding new ones must not fill the log.
const MAX_COMPLAINTS: usize = 16;

/// Why an exchange failed, with what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SyncFailure {
    /// Nothing answered.
    #[error("it cannot be reached ({0}); is it running, and is envoys[].url its control listener?")]
    Unreachable(String),
    /// The answer took too long.
    #[error("no answer within {} s; is its control listener overloaded?", SYNC_TIMEOUT.as_secs())]
    Timeout,
    /// It refused the snapshot.
    #[error("it refused the snapshot with HTTP status {status}{}: {advice}", if body.is_empty() { String::new() } else { format!(" ({body})") })]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The beginning of what it said.
        body: String,
        /// What to do.
        advice: &'static str,
    },
    /// It answered something else.
    #[error(
        "its answer is not one of the filter's control role ({0}); is envoys[].url its control listener, and of the same version?"
    )]
    Answer(String),
    /// Its snapshot comes from a later collector.
    #[error(
        "it holds a snapshot of generation {0}, later than this collector's; let one collector push to it, and if this machine's \
         clock went back, restart the collector once it is right"
    )]
    Superseded(u64),
    /// The snapshot is longer than the control listener reads.
    #[error("the snapshot has {0} bytes and the control listener reads {MAX_SYNC_BYTES}; spread the pools over several collectors")]
    TooLarge(usize),
    /// The token cannot be sent.
    #[error("{0}")]
    Token(String),
}

impl SyncFailure {
    /// A short name, for a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Timeout => "timeout",
            Self::Refused { .. } => "refused",
            Self::Answer(_) => "answer",
            Self::Superseded(_) => "superseded",
            Self::TooLarge(_) => "too_large",
            Self::Token(_) => "token",
        }
    }

    fn refused(status: StatusCode, body: &[u8]) -> Self {
        let advice = match status.as_u16() {
            401 | 403 => "set envoys[].token or token_file to the control listener's token",
            404 | 405 => "give envoys[].url the listener whose filter has `role: control`",
            400 if body.windows(14).any(|part| part == b"older than the") => {
                "let one collector push to an Envoy; after a restart with its clock set back it is heard again in ten seconds"
            }
            413 => "raise the control listener's body limit, or spread the pools over several collectors",
            500.. => "look into this Envoy's log",
            _ => "run the collector and the filter at the same version",
        };
        // The text is another program's: its beginning is kept, on one line.
        let text = String::from_utf8_lossy(body);
        let body = text.chars().take(300).map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        Self::Refused { status: status.as_u16(), body: body.trim().to_owned(), advice }
    }
}

/// The way to one Envoy's control listener.
pub(crate) struct Control {
    client: ControlClient,
    bearer: Bearer,
}

impl Control {
    /// Reads the token and the certificates, if there are some.
    pub(crate) fn new(config: &EnvoyConfig) -> anyhow::Result<Self> {
        let context = || format!("envoy {}", config.url);
        let bearer = Bearer::read(config.token.as_ref()).map_err(anyhow::Error::msg).with_context(context)?;
        Ok(Self { client: ControlClient::new(config).with_context(context)?, bearer })
    }

    /// One exchange. After a 401 the token is read again, since a token file may have been changed.
    async fn exchange(&mut self, fleet: &Fleet, sequence: u64) -> Result<SyncAnswer, SyncFailure> {
        let snapshot = fleet.snapshot(sequence, Instant::now());
        let body = serde_json::to_vec(&snapshot).map_err(|error| SyncFailure::Answer(error.to_string()))?;
        if body.len() > MAX_SYNC_BYTES {
            return Err(SyncFailure::TooLarge(body.len()));
        }
        let exchange = self.client.post(body, self.bearer.header(), MAX_SYNC_BYTES);
        let (status, answer) = tokio::time::timeout(SYNC_TIMEOUT, exchange).await.map_err(|_| SyncFailure::Timeout)??;
        if status == StatusCode::UNAUTHORIZED {
            self.bearer.read_again().map_err(SyncFailure::Token)?;
        }
        if status != StatusCode::OK {
            return Err(SyncFailure::refused(status, &answer));
        }
        let answer: SyncAnswer = serde_json::from_slice(&answer).map_err(|error| SyncFailure::Answer(error.to_string()))?;
        match answer {
            answer if answer.version != SYNC_VERSION => {
                Err(SyncFailure::Answer(format!("version {} instead of {SYNC_VERSION}", answer.version)))
            }
            answer if answer.generation > snapshot.generation => Err(SyncFailure::Superseded(answer.generation)),
            answer => Ok(answer),
        }
    }
}

/// Pushes snapshots to the Envoy at `index` of the fleet for ever, one every `interval`.
///
/// It begins when every source of endpoints was asked and every endpoint was polled once, or a collector that restarts would tell a running Envoy that all replicas are down.
/// An Envoy that restarted needs nothing special: it gets the next snapshot like any other.
pub(crate) async fn run(fleet: Arc<Fleet>, index: usize, mut control: Control, interval: Duration, telemetry: Arc<Telemetry>) {
    let envoy = &fleet.envoys[index];
    let telemetry = telemetry.envoy(&envoy.config.url.to_string());
    fleet.settled().await;
    let mut complaints = HashSet::new();
    let mut pause = interval;
    for sequence in 1.. {
        let started = Instant::now();
        let result = control.exchange(&fleet, sequence).await;
        telemetry.exchanged(result.as_ref().err());
        pause = match &result {
            Ok(_) => interval,
            Err(_) => (pause * 2).min(MAX_BACKOFF).max(interval),
        };
        keep(envoy, result, &mut complaints);
        tokio::time::sleep_until(started + pause).await;
    }
}

fn keep(envoy: &Envoy, result: Result<SyncAnswer, SyncFailure>, complaints: &mut HashSet<String>) {
    let url = &envoy.config.url;
    let mut exchanges = envoy.exchanges();
    match result {
        Ok(mut answer) => {
            if exchanges.answer.is_none() || exchanges.problem.is_some() {
                tracing::info!("envoy {url} takes snapshots");
            }
            complaints.clear();
            exchanges.answered += 1;
            exchanges.answered_at = Some(Instant::now());
            exchanges.bindings += std::mem::take(&mut answer.bindings).len() as u64;
            exchanges.answer = Some(answer);
            exchanges.problem = None;
        }
        Err(failure) => {
            let text = failure.to_string();
            if complaints.len() < MAX_COMPLAINTS && complaints.insert(text.clone()) {
                tracing::warn!("envoy {url}: {text}");
            }
            exchanges.failed += 1;
            exchanges.problem = Some(text);
        }
    }
}
