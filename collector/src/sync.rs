//! Pushing snapshots, and homes of conversations between them: one task an Envoy, each at its own pace, so that one that is away holds up
//! no other.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use homing_routing::binding::Bindings;
use homing_routing::sync::{MAX_SYNC_BYTES, SYNC_VERSION, SyncAnswer, SyncRequest, version_of};
use hyper::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::affinity::{Batch, Place, Teller};
use crate::config::{ControlUrl, EnvoyConfig, EnvoyPlace};
use crate::control_client::{self, ControlClient, ControlConnector};
use crate::endpoint::whole_ms;
use crate::fleet::{Envoy, Fleet, now_ms};
use crate::http_client::{Bearer, refuses_token};
use crate::telemetry::Telemetry;
use crate::text::one_line;

/// How long one exchange may take.
pub const SYNC_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest pause between two attempts at an Envoy that does not take snapshots; one that restarts must not wait for its
/// conversations.
pub const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// The least time from one exchange to the next that brings what others told; what is told meanwhile goes together.
const NEWS_PAUSE: Duration = Duration::from_millis(100);

/// The same while more is waiting than one exchange carries.
const BACKLOG_PAUSE: Duration = Duration::from_millis(30);

/// Different problems of one Envoy that are logged until it answers again; one that keeps finding new ones must not fill the log.
const MAX_COMPLAINTS: usize = 16;

/// Why an exchange failed, with what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SyncFailure {
    /// Nothing answered.
    #[error("it cannot be reached ({0}); is it running, and is envoys[].url or dns its control listener?")]
    Unreachable(String),
    /// The answer took too long.
    #[error(
        "no answer within {} s: does the filter with `role: control` have `allow_on_headers_stop_iteration: true`? If so, its listener is \
         overloaded",
        SYNC_TIMEOUT.as_secs()
    )]
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
        "its answer is not one of the filter's control role ({0}); is envoys[].url or dns its control listener, and of the same version?"
    )]
    Answer(String),
    /// The snapshot is longer than the control listener reads.
    #[error("the snapshot has {0} bytes and the control listener reads {MAX_SYNC_BYTES}; spread the pools over several collectors")]
    TooLarge(usize),
    /// The token cannot be sent.
    #[error("{0}")]
    Token(String),
}

impl SyncFailure {
    /// Every reason.
    pub(crate) const REASONS: [&'static str; 6] = ["unreachable", "timeout", "refused", "answer", "too_large", "token"];

    /// A short name, for a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Timeout => "timeout",
            Self::Refused { .. } => "refused",
            Self::Answer(_) => "answer",
            Self::TooLarge(_) => "too_large",
            Self::Token(_) => "token",
        }
    }

    fn refused(status: StatusCode, body: &[u8]) -> Self {
        let advice = match status.as_u16() {
            401 | 403 => "set envoys[].token or token_file to the control listener's token",
            404 | 405 => "give envoys[].url or dns the listener whose filter has `role: control`",
            400 if body.windows(14).any(|part| part == b"older than the") => {
                "another collector of the same start time pushes to it; restart one of them"
            }
            413 => "raise the control listener's body limit, or spread the pools over several collectors",
            500.. => "look into this Envoy's log",
            _ => "run the collector and the filter at the same version",
        };
        Self::Refused { status: status.as_u16(), body: one_line(&String::from_utf8_lossy(body)), advice }
    }
}

/// How the Envoys of one entry of the configuration are reached.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    connector: ControlConnector,
    bearer: Bearer,
}

impl Access {
    /// Reads the token and the certificates, if there are some.
    pub(crate) fn new(config: &EnvoyConfig) -> anyhow::Result<Self> {
        let context = || match &config.place {
            EnvoyPlace::Url(url) => format!("envoy {url}"),
            EnvoyPlace::Dns(dns) => format!("envoys at {dns}"),
        };
        let bearer = Bearer::read(config.token.as_ref()).map_err(anyhow::Error::msg).with_context(context)?;
        let access = Self { connector: control_client::connector(config).with_context(context)?, bearer };
        if let EnvoyPlace::Url(url) = &config.place {
            // What is wrong with it shows at the start.
            access.control(url).with_context(context)?;
        }
        Ok(access)
    }

    /// The way to one of them.
    fn control(&self, url: &ControlUrl) -> anyhow::Result<Control> {
        Ok(Control { client: ControlClient::new(url, &self.connector)?, bearer: self.bearer.clone() })
    }
}

/// The way to one Envoy's control listener.
struct Control {
    client: ControlClient,
    bearer: Bearer,
}

impl Control {
    /// One exchange. After a 401 or 403 the token is read again, since a token file may have been changed.
    ///
    /// Returns the answer, and the bytes of both sides.
    async fn exchange(&mut self, request: &SyncRequest) -> Result<(SyncAnswer, [u64; 2]), SyncFailure> {
        let body = serde_json::to_vec(request).map_err(|error| SyncFailure::Answer(error.to_string()))?;
        if body.len() > MAX_SYNC_BYTES {
            return Err(SyncFailure::TooLarge(body.len()));
        }
        let sent = body.len() as u64;
        let exchange = self.client.post(body, self.bearer.header(), MAX_SYNC_BYTES);
        let (status, answer) = tokio::time::timeout(SYNC_TIMEOUT, exchange).await.map_err(|_| SyncFailure::Timeout)??;
        if refuses_token(status.as_u16()) {
            self.bearer.read_again().map_err(SyncFailure::Token)?;
        }
        if status != StatusCode::OK {
            return Err(SyncFailure::refused(status, &answer));
        }
        Ok((read_answer(&answer)?, [sent, answer.len() as u64]))
    }
}

/// Reads an answer's body.
pub(crate) fn read_answer(body: &[u8]) -> Result<SyncAnswer, SyncFailure> {
    if let Some(version) = version_of(body).filter(|version| *version != SYNC_VERSION) {
        return Err(SyncFailure::Answer(format!("version {version} instead of {SYNC_VERSION}")));
    }
    serde_json::from_slice(body).map_err(|error| SyncFailure::Answer(one_line(&error.to_string())))
}

/// The exchanges with one Envoy: what it has been sent, and what has been read of it.
struct Session {
    fleet: Arc<Fleet>,
    envoy: Arc<Envoy>,
    interval: Duration,
    /// When it began to count, which tells it from the one that was there before; nothing before the first answer.
    counting_since_ms: Option<Option<u64>>,
    place: Place,
    /// Up to where its journal has been read.
    journal: Vec<u64>,
    /// The bucket of its table to read next, while all of it is read.
    recall: Option<u32>,
    /// Whether there is more of its journal.
    more: bool,
    /// Whether there is more of what others told than it has been sent.
    behind: bool,
    standby: bool,
    complaints: HashSet<String>,
}

impl Session {
    /// What it is sent now: with the snapshot if that is due; without it, what others told of conversations. The batch is the last part of
    /// a hand-over if everybody else had been read before it was taken, and it has all of that.
    fn request(&self, sequence: u64, with_pools: bool, batch: &Batch, has_read_others: bool) -> SyncRequest {
        let now = Instant::now();
        let request = if with_pools { self.fleet.snapshot(&self.envoy, sequence, now) } else { self.fleet.request(sequence) };
        SyncRequest {
            pause_ms: whole_ms(self.interval),
            bindings: Bindings(batch.bindings.clone()),
            handed_over: self
                .counting_since_ms
                .flatten()
                .filter(|_| has_read_others && batch.place.is_handed_over() && !batch.more),
            journal: self.journal.clone(),
            recall: self.recall,
            ..request
        }
    }

    /// What it is to be sent of conversations; nothing while another collector sends it, or before it is known who it is.
    fn batch(&self) -> Batch {
        if self.standby || self.counting_since_ms.is_none() {
            return Batch { place: self.place, ..Batch::default() };
        }
        self.fleet.affinity.batch(self.envoy.number, self.place)
    }

    /// Whether the next exchange should follow at once.
    fn has_backlog(&self) -> bool {
        self.more || self.behind || self.recall.is_some() || (!self.standby && !self.place.is_handed_over())
    }

    fn answered(&mut self, request: &SyncRequest, batch: &Batch, mut answer: SyncAnswer, bytes: [u64; 2]) {
        let affinity = Arc::clone(&self.fleet.affinity);
        // Before what it tells is taken in, of which nothing that it still holds may be left out.
        if answer.idle_s.is_some() {
            self.envoy.exchanges().idle_s = answer.idle_s;
            self.fleet.hold_longest();
        }
        let told = std::mem::take(&mut answer.bindings).0;
        affinity.learn(Teller::Envoy(self.envoy.number), &told, now_ms(), !answer.standby);
        self.journal = std::mem::take(&mut answer.journal);
        self.more = answer.more;
        self.behind = batch.more && !answer.standby;
        // What was overwritten in its journal is in its table.
        self.recall = if answer.missed { Some(0) } else { answer.recall };
        if self.counting_since_ms != Some(answer.counting_since_ms) {
            self.counting_since_ms = Some(answer.counting_since_ms);
            self.place = affinity.from_start();
        } else if !answer.standby {
            self.place = batch.place;
        }
        if self.standby && !answer.standby {
            self.place = affinity.from_takeover();
            affinity.tell_store();
        }
        if self.standby != answer.standby {
            let what = if answer.standby { "has a later collector: this one stands by" } else { "is told by this collector now" };
            tracing::info!("envoy {} {what}", self.envoy.url);
        }
        self.standby = answer.standby;
        let is_read = !self.more && self.recall.is_none();
        let mut exchanges = self.envoy.exchanges();
        if exchanges.answer.is_none() || exchanges.problem.is_some() {
            tracing::info!("envoy {} {}", self.envoy.url, if answer.standby { "answers" } else { "takes snapshots" });
        }
        exchanges.answered += 1;
        exchanges.answered_at = Some(Instant::now());
        exchanges.bindings += told.len() as u64;
        exchanges.bindings_sent += if answer.standby { 0 } else { batch.bindings.len() as u64 };
        exchanges.is_read = is_read;
        exchanges.bytes = [exchanges.bytes[0] + bytes[0], exchanges.bytes[1] + bytes[1]];
        if let Some(before) = exchanges.answer.take() {
            if before.counting_since_ms == answer.counting_since_ms && answer.mismatches > before.mismatches {
                let now = Instant::now();
                let since = exchanges.mismatched.filter(|[_, last]| last.elapsed() < MISMATCHED).map_or(now, |[since, _]| since);
                exchanges.mismatched = Some([since, now]);
            }
            if request.pools.is_empty() {
                // Of pools it was not asked.
                answer.pools = before.pools;
            }
        }
        if request.pools.len() == self.fleet.pools.len() {
            let has_none = answer.pools.is_empty() && !request.pools.is_empty() && !answer.standby;
            let since = exchanges.without_pools.unwrap_or_else(Instant::now);
            exchanges.without_pools = has_none.then_some(since);
        }
        exchanges.answer = Some(answer);
        exchanges.problem = None;
        drop(exchanges);
        let problem = misconfigured(&self.fleet, &self.envoy);
        self.complaints.retain(|complaint| problem.as_ref() == Some(complaint));
        if let Some(problem) = problem.filter(|problem| self.complaints.insert(problem.clone())) {
            tracing::warn!("envoy {}: {problem}", self.envoy.url);
        }
    }

    fn failed(&mut self, failure: &SyncFailure) {
        let text = failure.to_string();
        if self.complaints.len() < MAX_COMPLAINTS && self.complaints.insert(text.clone()) {
            tracing::warn!("envoy {}: {text}", self.envoy.url);
        }
        let mut exchanges = self.envoy.exchanges();
        exchanges.failed += 1;
        exchanges.is_read = false;
        exchanges.problem = Some(text);
    }

    /// Waits until there is something to send it that others told.
    async fn news(&mut self, changes: &mut watch::Receiver<u64>) {
        loop {
            let batch = self.batch();
            if !batch.bindings.is_empty() {
                return;
            }
            // What it told itself is behind it.
            self.place = batch.place;
            if self.standby || changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// How long a request that went to another address than the chosen one is remembered, and for how long such requests must have come before
/// that is said: where replicas come and go, Envoy and the collector learn it at different times.
const MISMATCHED: Duration = Duration::from_secs(60);
const STILL_MISMATCHED: Duration = Duration::from_secs(10);

/// How long an Envoy that starts may have a control listener and no filter that routes.
const STARTING: Duration = Duration::from_secs(5);

/// What is wrong with an Envoy that answers but routes nothing of what it is told, or is set up otherwise than most, so that it does not
/// agree with them.
pub(crate) fn misconfigured(fleet: &Fleet, envoy: &Envoy) -> Option<String> {
    routes_nothing(fleet, envoy).or_else(|| mismatches(envoy).or_else(|| differs(fleet, envoy)).map(str::to_owned))
}

fn mismatches(envoy: &Envoy) -> Option<&'static str> {
    let goes_on = |[since, last]: &[Instant; 2]| last.elapsed() < MISMATCHED && last.duration_since(*since) >= STILL_MISMATCHED;
    envoy.exchanges().mismatched.filter(goes_on).map(|_| {
        "requests go to other addresses than the filter chose. Its cluster lacks an address that the collector has: give both the same \
         ip:port (Envoy's /clusters has those that it resolved). Or the choice does not reach the load balancer: that takes override_host \
         in the cluster, and header_to_metadata behind the filter"
    })
}

fn routes_nothing(fleet: &Fleet, envoy: &Envoy) -> Option<String> {
    let exchanges = envoy.exchanges();
    let answer = exchanges.answer.as_ref().filter(|_| exchanges.without_pools.is_some_and(|since| since.elapsed() > STARTING))?;
    if answer.key_check.is_none() {
        return Some(
            "it takes snapshots, but no filter with `role: route` reads them: give that filter the vm_id of the one with `role: control`"
                .to_owned(),
        );
    }
    let pools: Vec<_> = fleet.pools.iter().map(|pool| format!("`{}`", pool.cluster)).collect();
    Some(format!(
        "it takes snapshots, but its filter has no pool of the names that it is told ({}): the filter's pools[].cluster, the collector's and \
         the name of Envoy's cluster must be the same",
        pools.join(", ")
    ))
}

fn differs(fleet: &Fleet, envoy: &Envoy) -> Option<&'static str> {
    let (key_check, idle_s) = envoy.exchanges().answer.as_ref().map(|answer| (answer.key_check.clone(), answer.idle_s))?;
    if key_check.is_some() && key_check != fleet.of_most(|answer| answer.key_check.clone()) {
        return Some(
            "its hash_key is another than the other Envoys': it will never agree with them on a conversation's home; give every Envoy the \
             same hash_key",
        );
    }
    if idle_s.is_some() && idle_s != fleet.of_most(|answer| answer.idle_s) {
        return Some(
            "its idle_timeout is another than the other Envoys': conversations that pause have a home there and none elsewhere, or the \
             other way round; give every Envoy the same idle_timeout",
        );
    }
    None
}

/// Pushes snapshots to an Envoy of the fleet for ever, one every `interval`, and between them what others told of
/// conversations.
///
/// It begins when every source of endpoints was asked, every endpoint's state is known and the drain file was read, or a collector that
/// restarts would tell a running Envoy that replicas are down, or ready which drain.
/// An Envoy that is new or restarted is handed everything over that is known of conversations.
pub(crate) async fn run(fleet: Arc<Fleet>, envoy: Arc<Envoy>, access: Access, interval: Duration, telemetry: Arc<Telemetry>) {
    let telemetry = telemetry.envoy(&envoy.url.to_string());
    let mut control = match access.control(&envoy.url) {
        Ok(control) => control,
        Err(error) => return tracing::error!("envoy {}: {error:#}", envoy.url),
    };
    fleet.settled().await;
    let mut changes = fleet.affinity.watch();
    let mut session = Session {
        fleet,
        envoy,
        interval,
        counting_since_ms: None,
        place: Place::default(),
        journal: Vec::new(),
        recall: None,
        more: false,
        behind: false,
        standby: false,
        complaints: HashSet::new(),
    };
    let mut pause = interval;
    let mut snapshot_due = Instant::now();
    for sequence in 1.. {
        let started = Instant::now();
        let with_pools = started >= snapshot_due;
        let has_read_others = session.fleet.has_read_others(&session.envoy, started);
        let batch = session.batch();
        let request = session.request(sequence, with_pools, &batch, has_read_others);
        let result = control.exchange(&request).await;
        telemetry.exchanged(result.as_ref().err());
        match result {
            Ok((answer, bytes)) => {
                session.answered(&request, &batch, answer, bytes);
                pause = interval;
            }
            Err(failure) => {
                session.failed(&failure);
                pause = (pause * 2).min(MAX_BACKOFF).max(interval);
                tokio::time::sleep_until(started + pause).await;
                snapshot_due = started;
                continue;
            }
        }
        if with_pools {
            snapshot_due = started + interval;
        }
        let floor = if session.has_backlog() { BACKLOG_PAUSE } else { NEWS_PAUSE };
        tokio::time::sleep_until((started + floor).min(snapshot_due)).await;
        if !session.has_backlog() {
            // Whichever comes first.
            let _ = tokio::time::timeout_at(snapshot_due, session.news(&mut changes)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use homing_routing::control::SyncError;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_refusal_for_an_older_snapshot_is_recognised_by_what_the_filter_says() {
        let said = SyncError::Older { newest: (1, 2) }.to_string();
        let failure = SyncFailure::refused(StatusCode::BAD_REQUEST, said.as_bytes());
        assert!(failure.to_string().contains("another collector of the same start time"), "{failure}");
    }

    proptest! {
        #[test]
        fn any_answer_is_of_this_version_or_a_failure_of_one_short_line(status in 100_u16..600, body in mutated(seeds("answer"))) {
            let refused = SyncFailure::refused(StatusCode::from_u16(status).expect("a status"), &body);
            for failure in read_answer(&body).err().into_iter().chain([refused]) {
                let said = failure.to_string();
                prop_assert!(said.chars().count() < 800 && !said.contains(char::is_control), "{:?}", said);
            }
            if let Ok(answer) = read_answer(&body) {
                prop_assert_eq!(answer.version, SYNC_VERSION);
            }
        }
    }
}
