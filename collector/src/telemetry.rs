//! The collector's own metrics, `homing_collector_*`, in the Prometheus text format: what it did itself, and what the console shows.

mod shown;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use self::shown::Shown;
use crate::console::Live;
use crate::endpoint::ScrapeFailure;
use crate::fleet::Fleet;
use crate::sync::SyncFailure;

/// The type of what [`Telemetry::text`] returns.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Upper bounds of the scrape duration's buckets, in seconds: vLLM answers in 7 to 180 ms.
const SCRAPE_BUCKETS: [f64; 10] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];

/// Counters of polling and pushing, and what is read from the status when it is asked for.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    scrapes: Family<EndpointLabels, Counter>,
    scrape_failures: Family<ScrapeFailureLabels, Counter>,
    scrape_seconds: Family<PoolLabels, Histogram, fn() -> Histogram>,
    exchanges: Family<EnvoyLabels, Counter>,
    sync_failures: Family<SyncFailureLabels, Counter>,
}

/// The counters of one endpoint.
pub(crate) struct EndpointTelemetry {
    owner: Arc<Telemetry>,
    labels: EndpointLabels,
    scrapes: Counter,
    seconds: Histogram,
}

/// The counters of one Envoy.
pub(crate) struct EnvoyTelemetry {
    owner: Arc<Telemetry>,
    labels: EnvoyLabels,
    exchanges: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabels {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabels {
    pool: String,
    replica: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScrapeFailureLabels {
    pool: String,
    replica: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EnvoyLabels {
    envoy: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SyncFailureLabels {
    envoy: String,
    reason: &'static str,
}

// === impl Telemetry ===

impl Telemetry {
    /// The metrics of a fleet and of what the console shows of it.
    pub fn new(fleet: Arc<Fleet>, live: Arc<Live>) -> Self {
        let mut registry = Registry::with_prefix("homing_collector");
        let histogram: fn() -> Histogram = || Histogram::new(SCRAPE_BUCKETS);
        let scrapes = Family::default();
        let scrape_failures = Family::default();
        let scrape_seconds = Family::new_with_constructor(histogram);
        let exchanges = Family::default();
        let sync_failures = Family::default();
        registry.register("scrapes", "Polls of an endpoint", scrapes.clone());
        registry.register("scrape_failures", "Polls of an endpoint that brought nothing, by reason", scrape_failures.clone());
        registry.register("scrape_duration_seconds", "The time a poll took, failed ones included", scrape_seconds.clone());
        registry.register(
            "sync_exchanges",
            "Exchanges with an Envoy, with a snapshot or with conversations' homes alone",
            exchanges.clone(),
        );
        registry.register("sync_failures", "Exchanges that failed, by reason", sync_failures.clone());
        registry.register_collector(Box::new(Shown { fleet, live }));
        Self { registry, scrapes, scrape_failures, scrape_seconds, exchanges, sync_failures }
    }

    /// All metrics as they are now; its type is [`CONTENT_TYPE`].
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    pub(crate) fn endpoint(self: &Arc<Self>, pool: &str, address: SocketAddr) -> EndpointTelemetry {
        let labels = EndpointLabels { pool: pool.to_owned(), replica: address.to_string() };
        EndpointTelemetry {
            scrapes: self.scrapes.get_or_create_owned(&labels),
            seconds: self.scrape_seconds.get_or_create_owned(&PoolLabels { pool: pool.to_owned() }),
            labels,
            owner: Arc::clone(self),
        }
    }

    pub(crate) fn envoy(self: &Arc<Self>, url: &str) -> EnvoyTelemetry {
        let labels = EnvoyLabels { envoy: url.to_owned() };
        EnvoyTelemetry { exchanges: self.exchanges.get_or_create_owned(&labels), labels, owner: Arc::clone(self) }
    }
}

impl EndpointTelemetry {
    pub(crate) fn scraped(&self, took: Duration, failure: Option<&ScrapeFailure>) {
        self.scrapes.inc();
        self.seconds.observe(took.as_secs_f64());
        if let Some(failure) = failure {
            let EndpointLabels { pool, replica } = self.labels.clone();
            self.owner.scrape_failures.get_or_create(&ScrapeFailureLabels { pool, replica, reason: failure.reason() }).inc();
        }
    }
}

/// An endpoint that is gone leaves no counters behind, or a fleet that comes and goes would fill the memory.
impl Drop for EndpointTelemetry {
    fn drop(&mut self) {
        self.owner.scrapes.remove(&self.labels);
        let EndpointLabels { pool, replica } = &self.labels;
        for reason in ScrapeFailure::REASONS {
            self.owner.scrape_failures.remove(&ScrapeFailureLabels { pool: pool.clone(), replica: replica.clone(), reason });
        }
    }
}

/// As an endpoint that is gone.
impl Drop for EnvoyTelemetry {
    fn drop(&mut self) {
        self.owner.exchanges.remove(&self.labels);
        for reason in SyncFailure::REASONS {
            self.owner.sync_failures.remove(&SyncFailureLabels { envoy: self.labels.envoy.clone(), reason });
        }
    }
}

impl EnvoyTelemetry {
    pub(crate) fn exchanged(&self, failure: Option<&SyncFailure>) {
        self.exchanges.inc();
        if let Some(failure) = failure {
            let envoy = self.labels.envoy.clone();
            self.owner.sync_failures.get_or_create(&SyncFailureLabels { envoy, reason: failure.reason() }).inc();
        }
    }
}
