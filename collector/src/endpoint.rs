//! What the collector knows of one endpoint and of the replicas behind it. Pure: it is told what a poll brought.

use std::time::Duration;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::{Peers, ReplicaReport, ReplicaState};
use tokio::time::Instant;

use crate::config::EndpointConfig;
use crate::drain::{Drained, DrainedBy};
use crate::hit_rate::HitRate;
use crate::vllm::{EngineMetrics, Engines, Missing};

/// Polls that must fail in a row before an endpoint counts as down; a refused connection counts at once, since nothing listens.
pub const FAILURES_UNTIL_DOWN: u32 = 2;

/// Why a poll brought nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScrapeFailure {
    /// Nothing listens there.
    #[error("the connection was refused; is vLLM running, and is the port right?")]
    Refused,
    /// No connection, for another reason.
    #[error("no connection: {0}")]
    Connect(String),
    /// It took longer than `scrape.timeout`.
    #[error("no answer within scrape.timeout")]
    Timeout,
    /// An HTTP status other than 200. Redirects are not followed: they could lead anywhere.
    #[error("HTTP status {0} instead of 200; {advice}", advice = status_advice(*.0))]
    Status(u16),
    /// The token that it asks for cannot be read.
    #[error("{0}; see pools[].token_file")]
    Token(String),
    /// The answer is longer than the collector reads.
    #[error("the answer is longer than {} MiB", crate::scrape::MAX_METRICS_BYTES >> 20)]
    TooLarge,
    /// The answer broke off.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// The answer holds no engine's metrics.
    #[error("the answer holds no vllm: metrics; is this a vLLM server started without --disable-log-stats?")]
    NotVllm,
}

/// Engines of an endpoint that are no replicas, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it reports {count} engines, of which the first {allowed} are replicas; if it has as many ranks as that, raise pools[].max_ranks"
)]
pub struct TooManyRanks {
    /// How many it reports.
    pub count: usize,
    /// How many may be replicas.
    pub allowed: usize,
}

/// One endpoint: a vLLM server with one engine or several.
#[derive(Debug)]
pub struct Endpoint {
    config: EndpointConfig,
    max_ranks: usize,
    engines: Vec<Engine>,
    too_many: Option<TooManyRanks>,
    down: bool,
    failures: u32,
    failure: Option<ScrapeFailure>,
    read_at: Option<Instant>,
    restarts: u64,
}

/// One engine of an endpoint: a replica.
#[derive(Debug)]
struct Engine {
    label: u32,
    replica: ReplicaName,
    metrics: EngineMetrics,
    hit_rate: HitRate,
}

/// A replica with all that is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    /// What Envoys are told.
    pub report: ReplicaReport,
    /// What its engine last reported.
    pub metrics: EngineMetrics,
    /// Why the endpoint's last poll failed, if it did.
    pub failure: Option<ScrapeFailure>,
    /// Whether its endpoint reports more engines than may be replicas.
    pub too_many: Option<TooManyRanks>,
    /// Who drains it.
    pub drained_by: Vec<DrainedBy>,
    /// How often the endpoint restarted.
    pub restarts: u64,
}

// === impl Replica ===

impl Replica {
    /// Whether the count of prompt tokens is its engine's, which was read and tells it.
    pub(crate) fn counts_prompt_tokens(&self) -> bool {
        self.report.age_ms.is_some() && !self.metrics.missing.contains(Missing::PROMPT_TOKENS)
    }

    /// What is wrong with it, and what to do.
    pub(crate) fn problem(&self) -> Option<String> {
        let failure = self.failure.as_ref().map(ToString::to_string);
        failure.or_else(|| self.too_many.map(|too_many| too_many.to_string()))
    }
}

// === impl ScrapeFailure ===

impl ScrapeFailure {
    /// Every [`ScrapeFailure::reason`].
    pub(crate) const REASONS: [&'static str; 8] =
        ["refused", "connect", "timeout", "status", "token", "too_large", "broken", "not_vllm"];

    /// A short name, for a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Connect(_) => "connect",
            Self::Timeout => "timeout",
            Self::Status(_) => "status",
            Self::Token(_) => "token",
            Self::TooLarge => "too_large",
            Self::Broken(_) => "broken",
            Self::NotVllm => "not_vllm",
        }
    }
}

fn status_advice(status: u16) -> &'static str {
    match status {
        401 | 403 => "set pools[].token or token_file to the token it asks for",
        _ => "is this vLLM's own port?",
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// An endpoint that was never reached: one replica, down. It says itself how many engines it has; of those the first `max_ranks` are
    /// replicas, or it could have as large a share of the pool's requests as it likes.
    pub fn new(config: EndpointConfig, max_ranks: usize) -> Self {
        let replica = ReplicaName::endpoint(config.address);
        let engine = Engine { label: 0, replica, metrics: EngineMetrics::default(), hit_rate: HitRate::default() };
        let engines = vec![engine];
        Self { config, max_ranks, engines, too_many: None, down: true, failures: 0, failure: None, read_at: None, restarts: 0 }
    }

    /// Where it is.
    pub fn config(&self) -> EndpointConfig {
        self.config
    }

    /// Whether polls have told its state. One that failed has not: a collector that starts would call a replica down that has only been
    /// slow once, and Envoys would give its conversations other homes.
    pub fn is_known(&self) -> bool {
        self.read_at.is_some() || self.failures >= FAILURES_UNTIL_DOWN || self.failure == Some(ScrapeFailure::Refused)
    }

    /// Why the last poll failed, if it did.
    pub fn failure(&self) -> Option<&ScrapeFailure> {
        self.failure.as_ref()
    }

    /// Whether it last reported more engines than may be replicas.
    pub fn too_many(&self) -> Option<TooManyRanks> {
        self.too_many
    }

    /// The replicas there.
    pub fn names(&self) -> impl Iterator<Item = ReplicaName> {
        self.engines.iter().map(|engine| engine.replica)
    }

    /// What each replica does not report.
    pub fn missing(&self) -> impl Iterator<Item = (ReplicaName, Missing)> {
        self.engines.iter().map(|engine| (engine.replica, engine.metrics.missing))
    }

    /// How often the server must have restarted, since counters fell.
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Takes in what a poll read.
    ///
    /// One engine is the endpoint itself. Several are ranks, numbered from the smallest `engine` label there: across nodes vLLM
    /// labels ranks globally, while the header that picks one takes the index on its node.
    pub fn read(&mut self, now: Instant, engines: &Engines) {
        let Some(first) = engines.keys().next().copied() else { return self.failed(ScrapeFailure::NotVllm) };
        let mut before = std::mem::take(&mut self.engines);
        let mut restarted = false;
        for (&label, &metrics) in engines.iter().take(self.max_ranks) {
            let rank = match (engines.len(), u16::try_from(label - first)) {
                (1, _) => None,
                (_, Ok(rank)) => Some(rank),
                // No server has that many ranks: a stray series.
                (_, Err(_)) => continue,
            };
            let replica = ReplicaName { address: self.config.address, rank };
            let known = before.iter_mut().find(|engine| engine.label == label);
            restarted |= known.as_ref().is_some_and(|engine| metrics.restarted_since(&engine.metrics));
            let mut hit_rate = known.map(|engine| std::mem::take(&mut engine.hit_rate)).unwrap_or_default();
            restarted |= hit_rate.observe(now, metrics.prompt_cache);
            self.engines.push(Engine { label, replica, metrics, hit_rate });
        }
        let (count, allowed) = (engines.len(), self.max_ranks);
        self.too_many = (count > allowed).then_some(TooManyRanks { count, allowed });
        // One server is one restart, however many ranks it has.
        self.restarts += u64::from(restarted);
        self.read_at = Some(now);
        self.down = false;
        self.failures = 0;
        self.failure = None;
    }

    /// Takes in that a poll failed. The last figures stay, with their age.
    pub fn failed(&mut self, failure: ScrapeFailure) {
        self.failures = self.failures.saturating_add(1);
        self.down |= failure == ScrapeFailure::Refused || self.failures >= FAILURES_UNTIL_DOWN;
        self.failure = Some(failure);
    }

    /// The state of each replica, given what drains.
    pub fn states(&self, drained: &Drained) -> Vec<(ReplicaName, ReplicaState)> {
        self.engines.iter().map(|engine| (engine.replica, self.state(engine, drained))).collect()
    }

    /// Every replica there; `max_num_seqs` is the pool's, 0 when unknown.
    pub fn replicas(&self, now: Instant, max_num_seqs: u32, drained: &Drained) -> impl Iterator<Item = Replica> {
        let age_ms = self.read_at.map(|read_at| now.duration_since(read_at)).map(whole_ms);
        self.engines.iter().map(move |engine| Replica {
            report: ReplicaReport {
                replica: engine.replica,
                state: self.state(engine, drained),
                running: engine.metrics.running,
                waiting: engine.metrics.waiting,
                kv_usage: engine.metrics.kv_usage,
                cache_tokens: engine.metrics.cache_tokens,
                max_num_seqs,
                prefix_hit_rate: engine.hit_rate.rate(now),
                age_ms,
                peers: Peers::default(),
            },
            metrics: engine.metrics,
            failure: self.failure.clone(),
            too_many: self.too_many,
            drained_by: drained.by(engine.replica, self.config.drain),
            restarts: self.restarts,
        })
    }

    /// Down before asleep before draining: what keeps a replica from answering is said first.
    fn state(&self, engine: &Engine, drained: &Drained) -> ReplicaState {
        if self.down {
            ReplicaState::Down
        } else if engine.metrics.asleep {
            ReplicaState::Asleep
        } else if self.config.drain || drained.contains(engine.replica) {
            ReplicaState::Draining
        } else {
            ReplicaState::Ready
        }
    }
}

/// A duration in whole milliseconds.
pub(crate) fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn endpoint(drain: bool) -> Endpoint {
        Endpoint::new(EndpointConfig { address: "10.0.0.1:8000".parse().expect("an address"), drain }, 4)
    }

    fn engines(labels: &[u32]) -> Engines {
        labels.iter().map(|&label| (label, EngineMetrics { running: label + 1, ..EngineMetrics::default() })).collect()
    }

    fn reports(endpoint: &Endpoint) -> Vec<ReplicaReport> {
        endpoint.replicas(Instant::now(), 32, &Drained::default()).map(|replica| replica.report).collect()
    }

    fn state(endpoint: &Endpoint) -> ReplicaState {
        endpoint.states(&Drained::default())[0].1
    }

    #[tokio::test(start_paused = true)]
    async fn before_the_first_reading_a_replica_is_down_and_its_figures_have_no_age() {
        let reports = reports(&endpoint(false));
        assert_eq!(reports.len(), 1);
        assert_eq!((reports[0].state, reports[0].age_ms), (ReplicaState::Down, None));
        assert_eq!(reports[0].replica.to_string(), "10.0.0.1:8000");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_makes_it_ready_and_ages() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[0]));
        advance(Duration::from_millis(700)).await;
        let report = &reports(&endpoint)[0];
        assert_eq!((report.state, report.running, report.max_num_seqs, report.age_ms), (ReplicaState::Ready, 1, 32, Some(700)));
    }

    #[tokio::test(start_paused = true)]
    async fn one_failure_is_forgiven_and_two_in_a_row_are_not() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[0]));
        endpoint.failed(ScrapeFailure::Timeout);
        assert_eq!(state(&endpoint), ReplicaState::Ready);
        endpoint.read(Instant::now(), &engines(&[0]));
        endpoint.failed(ScrapeFailure::Timeout);
        assert_eq!(state(&endpoint), ReplicaState::Ready, "the reading in between counts");
        endpoint.failed(ScrapeFailure::Status(500));
        assert_eq!(state(&endpoint), ReplicaState::Down);
        endpoint.read(Instant::now(), &engines(&[0]));
        assert_eq!(state(&endpoint), ReplicaState::Ready);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_failure_does_not_tell_a_state_and_the_second_does() {
        let mut endpoint = endpoint(false);
        assert!(!endpoint.is_known());
        endpoint.failed(ScrapeFailure::Timeout);
        assert!(!endpoint.is_known());
        endpoint.failed(ScrapeFailure::Timeout);
        assert!(endpoint.is_known());
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_connection_and_a_reading_tell_it_at_once() {
        let mut refused = endpoint(false);
        refused.failed(ScrapeFailure::Refused);
        let mut slow_once = endpoint(false);
        slow_once.failed(ScrapeFailure::Timeout);
        slow_once.read(Instant::now(), &engines(&[0]));
        assert!(refused.is_known() && slow_once.is_known());
        assert_eq!((state(&refused), state(&slow_once)), (ReplicaState::Down, ReplicaState::Ready));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_connection_is_down_at_once_and_the_last_figures_keep_their_age() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[4]));
        advance(Duration::from_millis(250)).await;
        endpoint.failed(ScrapeFailure::Refused);
        let report = &reports(&endpoint)[0];
        assert_eq!((report.state, report.running, report.age_ms), (ReplicaState::Down, 5, Some(250)));
    }

    #[tokio::test(start_paused = true)]
    async fn text_without_engines_is_a_failure() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &Engines::new());
        assert_eq!(endpoint.failure, Some(ScrapeFailure::NotVllm));
        assert_eq!(state(&endpoint), ReplicaState::Down);
    }

    #[tokio::test(start_paused = true)]
    async fn draining_wins_over_ready_and_over_nothing_else() {
        let mut endpoint = endpoint(true);
        assert_eq!(state(&endpoint), ReplicaState::Down);
        endpoint.read(Instant::now(), &engines(&[0]));
        assert_eq!(state(&endpoint), ReplicaState::Draining);
        let asleep = EngineMetrics { asleep: true, ..EngineMetrics::default() };
        endpoint.read(Instant::now(), &Engines::from([(0, asleep)]));
        assert_eq!(state(&endpoint), ReplicaState::Asleep);
    }

    #[tokio::test(start_paused = true)]
    async fn each_rank_sleeps_on_its_own() {
        let mut endpoint = endpoint(false);
        let mut both = engines(&[0, 1]);
        both.entry(1).or_default().asleep = true;
        endpoint.read(Instant::now(), &both);
        let states: Vec<_> = endpoint.states(&Drained::default()).into_iter().map(|(_, state)| state).collect();
        assert_eq!(states, [ReplicaState::Ready, ReplicaState::Asleep]);
    }

    #[tokio::test(start_paused = true)]
    async fn one_engine_is_the_endpoint_whatever_its_label() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[3]));
        assert_eq!(reports(&endpoint)[0].replica.to_string(), "10.0.0.1:8000");
    }

    #[tokio::test(start_paused = true)]
    async fn several_engines_are_ranks_counted_from_the_smallest_label() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[2, 3]));
        let names: Vec<_> = reports(&endpoint).iter().map(|report| (report.replica.to_string(), report.running)).collect();
        assert_eq!(names, [("10.0.0.1:8000#0".to_owned(), 3), ("10.0.0.1:8000#1".to_owned(), 4)]);
        endpoint.failed(ScrapeFailure::Refused);
        assert_eq!(endpoint.names().count(), 2, "the ranks are known while the endpoint is down");
    }

    #[tokio::test(start_paused = true)]
    async fn engines_beyond_the_allowed_ones_are_no_replicas_and_the_others_say_so() {
        let mut endpoint = endpoint(false);
        endpoint.read(Instant::now(), &engines(&[7, 6, 5, 4, 3, 2, 60_000]));
        let replicas: Vec<_> = endpoint.replicas(Instant::now(), 32, &Drained::default()).collect();
        assert_eq!(replicas.iter().map(|replica| replica.report.running).collect::<Vec<_>>(), [3, 4, 5, 6], "by order of label");
        for replica in replicas {
            let problem = replica.problem().expect("a problem");
            assert!(problem.contains("7 engines") && problem.contains("max_ranks"), "{problem}");
        }
        endpoint.read(Instant::now(), &engines(&[2, 3, 4, 5]));
        assert_eq!(endpoint.replicas(Instant::now(), 32, &Drained::default()).find_map(|replica| replica.problem()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_is_seen_and_the_hit_rate_begins_anew() {
        use crate::vllm::{PromptCache, PromptCacheSource::BySource};
        let mut endpoint = endpoint(false);
        let mut read = |tokens, hits| {
            let prompt_cache = Some(PromptCache { source: BySource, tokens, hits });
            endpoint.read(Instant::now(), &Engines::from([(0, EngineMetrics { prompt_cache, ..EngineMetrics::default() })]));
            (reports(&endpoint)[0].prefix_hit_rate, endpoint.restarts())
        };
        assert_eq!(read(100, 0), (None, 0));
        advance(Duration::from_millis(250)).await;
        assert_eq!(read(200, 25), (Some(0.25), 0));
        advance(Duration::from_millis(250)).await;
        assert_eq!(read(0, 0), (None, 1));
        advance(Duration::from_millis(250)).await;
        assert_eq!(read(100, 50), (Some(0.5), 1));
    }
}
