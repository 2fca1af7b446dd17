//! The collector's own metrics, `homing_collector_*`, in the Prometheus text format.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use homing_routing::sync::ReplicaState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::endpoint::{Replica, ScrapeFailure};
use crate::fleet::{Fleet, Pool, Source, lock};
use crate::sync::SyncFailure;

/// The type of what [`Telemetry::text`] returns.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Upper bounds of the scrape duration's buckets, in seconds: vLLM answers in 7 to 180 ms.
const SCRAPE_BUCKETS: [f64; 10] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];

/// Counters of polling and pushing, and gauges read from the fleet when they are asked for.
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
struct StateLabels {
    pool: String,
    replica: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    pool: String,
    source: String,
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
    /// The metrics of a fleet.
    pub fn new(fleet: Arc<Fleet>) -> Self {
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
        registry.register("sync_exchanges", "Snapshots sent to an Envoy", exchanges.clone());
        registry.register("sync_failures", "Snapshots that an Envoy did not take, by reason", sync_failures.clone());
        registry.register_collector(Box::new(FleetGauges(fleet)));
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

impl EnvoyTelemetry {
    pub(crate) fn exchanged(&self, failure: Option<&SyncFailure>) {
        self.exchanges.inc();
        if let Some(failure) = failure {
            let envoy = self.labels.envoy.clone();
            self.owner.sync_failures.get_or_create(&SyncFailureLabels { envoy, reason: failure.reason() }).inc();
        }
    }
}

// === gauges ===

/// Reads the fleet whenever the metrics are asked for, so that a replica that is gone leaves no gauge behind.
#[derive(Debug)]
struct FleetGauges(Arc<Fleet>);

impl Collector for FleetGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = Instant::now();
        let replicas: Vec<(EndpointLabels, Replica)> = self
            .0
            .pools
            .iter()
            .flat_map(|pool| pool.replicas(now).into_iter().map(|replica| (pool.cluster.clone(), replica)))
            .map(|(pool, replica)| (EndpointLabels { pool, replica: replica.report.replica.to_string() }, replica))
            .collect();
        let states = replicas.iter().flat_map(|(labels, replica)| {
            STATES.iter().map(move |&state| {
                let EndpointLabels { pool, replica: name } = labels.clone();
                let on = u32::from(replica.report.state == state);
                (StateLabels { pool, replica: name, state: state_name(state) }, on)
            })
        });
        gauges(&mut encoder, "replica_state", "1 for the state a replica is in", states)?;
        let each = |value: fn(&Replica) -> Option<f64>| {
            replicas.iter().filter_map(move |(labels, replica)| Some((labels.clone(), value(replica)?)))
        };
        let age = each(|replica| replica.report.age_ms.map(|age| age as f64 / 1000.0));
        gauges(&mut encoder, "snapshot_age_seconds", "The time since a replica's figures were read", age)?;
        let running = each(|replica| Some(f64::from(replica.report.running)));
        gauges(&mut encoder, "replica_running", "Requests a replica's engine runs", running)?;
        let waiting = each(|replica| Some(f64::from(replica.report.waiting)));
        gauges(&mut encoder, "replica_waiting", "Requests that wait inside a replica's engine", waiting)?;
        let usage = each(|replica| Some(f64::from(replica.report.kv_usage)));
        gauges(&mut encoder, "replica_kv_usage", "The share of the KV cache that running requests hold, 0 to 1", usage)?;
        let hits = each(|replica| replica.report.prefix_hit_rate.map(f64::from));
        gauges(&mut encoder, "replica_prefix_hit_rate", "Prompt tokens found in the cache over the last minute, 0 to 1", hits)?;
        let answered = self.0.envoys.iter().filter_map(|envoy| {
            let answered_at = envoy.exchanges().answered_at?;
            Some((EnvoyLabels { envoy: envoy.config.url.to_string() }, now.duration_since(answered_at).as_secs_f64()))
        });
        gauges(&mut encoder, "sync_answer_age_seconds", "The time since an Envoy last took a snapshot", answered)?;
        let sources = || self.0.pools.iter().flat_map(|pool| pool.sources.iter().map(move |source| (pool, source)));
        let labels = |pool: &Pool, source: &Source| SourceLabels { pool: pool.cluster.clone(), source: source.name.clone() };
        let found =
            sources().filter_map(|(pool, source)| Some((labels(pool, source), source.state().addresses.as_ref()?.len() as u64)));
        gauges(&mut encoder, "discovery_endpoints", "Endpoints that a name or a file last gave", found)?;
        let failing = sources().map(|(pool, source)| (labels(pool, source), u32::from(source.state().problem.is_some())));
        gauges(
            &mut encoder,
            "discovery_failing",
            "1 while a name or a file gives no endpoints, and the last ones are kept",
            failing,
        )?;
        let mut restarts = encoder.encode_descriptor(
            "endpoint_restarts",
            "How often a server's counters fell, so that it must have restarted",
            None,
            MetricType::Counter,
        )?;
        for pool in &self.0.pools {
            for endpoint in pool.endpoints() {
                let (address, count) = {
                    let endpoint = lock(&endpoint);
                    (endpoint.config().address, endpoint.restarts())
                };
                let labels = EndpointLabels { pool: pool.cluster.clone(), replica: address.to_string() };
                ConstCounter::new(count).encode(restarts.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue + Copy>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (L, V)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

const STATES: [ReplicaState; 4] = [ReplicaState::Ready, ReplicaState::Down, ReplicaState::Draining, ReplicaState::Asleep];

/// A state as the exchange and the metrics write it.
pub fn state_name(state: ReplicaState) -> &'static str {
    match state {
        ReplicaState::Ready => "ready",
        ReplicaState::Down => "down",
        ReplicaState::Draining => "draining",
        ReplicaState::Asleep => "asleep",
    }
}
