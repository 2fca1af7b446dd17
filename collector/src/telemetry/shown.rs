//! What the console shows, as metrics. It is read from the status whenever the metrics are asked for, so that a replica that is gone
//! leaves nothing behind.

use std::fmt;
use std::sync::Arc;

use homing_routing::sync::ReplicaState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{EndpointLabels, EnvoyLabels, PoolLabels};
use crate::admission::Admission;
use crate::console::Live;
use crate::fleet::{Fleet, lock};
use crate::status::{Affinity, EnvoyStatus, PoolStatus, ReplicaStatus, SourceStatus, Status, StoreStatus};

/// Every state, as the API writes it too.
const STATES: [(ReplicaState, &str); 4] = [
    (ReplicaState::Ready, "ready"),
    (ReplicaState::Down, "down"),
    (ReplicaState::Draining, "draining"),
    (ReplicaState::Asleep, "asleep"),
];

#[derive(Debug)]
pub(super) struct Shown {
    pub(super) fleet: Arc<Fleet>,
    pub(super) live: Arc<Live>,
}

#[derive(Clone, EncodeLabelSet)]
struct StateLabels {
    pool: String,
    replica: String,
    state: &'static str,
}

#[derive(Clone, EncodeLabelSet)]
struct OutcomeLabels {
    pool: String,
    replica: String,
    outcome: &'static str,
}

#[derive(Clone, EncodeLabelSet)]
struct ReasonLabels {
    pool: String,
    reason: &'static str,
}

#[derive(Clone, EncodeLabelSet)]
struct SourceLabels {
    pool: String,
    replica: String,
    source: &'static str,
}

#[derive(Clone, EncodeLabelSet)]
struct DiscoveryLabels {
    pool: String,
    source: String,
}

#[derive(Clone, EncodeLabelSet)]
struct EnvoySourceLabels {
    source: String,
}

#[derive(Clone, EncodeLabelSet)]
struct InfoLabels {
    envoy: String,
    version: String,
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = self.live.status();
        let mut to = Encoder(&mut encoder);
        pools(&mut to, &status)?;
        replicas(&mut to, &status)?;
        envoys(&mut to, &status)?;
        let endpoints = self.fleet.pools.iter().flat_map(|pool| {
            pool.endpoints().into_iter().map(|endpoint| {
                let endpoint = lock(&endpoint);
                let replica = endpoint.config().address.to_string();
                (EndpointLabels { pool: pool.cluster.clone(), replica }, endpoint.restarts())
            })
        });
        to.counters("endpoint_restarts", "How often a server's counters fell, so that it must have restarted", endpoints)?;
        sources(&mut to, &status)?;
        envoy_sources(&mut to, &status)?;
        affinity(&mut to, &status)
    }
}

fn pools(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let each = |value: fn(&PoolStatus) -> Option<f64>| {
        status.pools.iter().filter_map(move |pool| Some((PoolLabels { pool: pool.cluster.clone() }, value(pool)?)))
    };
    let affinity = each(|pool| pool.routing.affinity.map(|affinity| if affinity == Affinity::On { 1.0 } else { 0.0 }));
    to.gauges("pool_affinity", "1 when conversations keep their homes, on every connected Envoy", affinity)?;
    let threshold = each(|pool| pool.routing.spill_threshold.map(|span| span.max.into()));
    to.gauges("pool_spill_threshold", "The load above which a home is full; the greatest of the pool's replicas", threshold)?;
    let margin = each(|pool| pool.routing.spill_margin.map(|span| span.max.into()));
    to.gauges("pool_spill_margin", "How much lower another replica's load must be; the greatest of the pool's replicas", margin)?;
    let usage = each(|pool| pool.capacity.as_ref().map(|capacity| capacity.usage));
    to.gauges(
        "pool_context_ratio",
        "The context of recent conversations divided by the caches, an estimate; above 1 they do not fit",
        usage,
    )?;
    let is_ready = |replica: &&ReplicaStatus| replica.report.state == ReplicaState::Ready;
    let ready = status
        .pools
        .iter()
        .map(|pool| (PoolLabels { pool: pool.cluster.clone() }, pool.replicas.iter().filter(is_ready).count() as f64));
    to.gauges("ready_replicas", "Replicas that take turns; 0 also where none was found", ready)?;
    let routing = each(|pool| Some(pool.routing.envoys_routing as f64));
    to.gauges("pool_envoys", "Connected Envoys that route the pool", routing)?;
    admission(to, status)
}

fn admission(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let pools: Vec<_> = status.pools.iter().filter_map(|pool| Some((&pool.cluster, pool.admission.as_ref()?))).collect();
    let each = |value: fn(&Admission) -> Option<f64>| {
        pools.iter().filter_map(move |(pool, admission)| Some((PoolLabels { pool: pool.to_string() }, value(admission)?)))
    };
    let held = pools.iter().flat_map(|(pool, admission)| {
        admission.by_reason.named().map(|(reason, count)| (ReasonLabels { pool: pool.to_string(), reason }, count as f64))
    });
    to.gauges("pool_held_requests", "Requests that admission holds now, by why they were held when they came", held)?;
    let oldest = each(|admission| Some(admission.oldest_held_ms.unwrap_or(0) as f64 / 1000.0));
    to.gauges("pool_oldest_held_seconds", "For how long the first of them has been held; 0 when none is", oldest)?;
    let usage = each(|admission| admission.usage);
    to.gauges("pool_active_context_ratio", "The context of conversations with a place divided by the caches, an estimate", usage)
}

fn replicas(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let replicas: Vec<(EndpointLabels, &ReplicaStatus)> = status
        .pools
        .iter()
        .flat_map(|pool| pool.replicas.iter().map(|replica| (pool.cluster.clone(), replica)))
        .map(|(pool, replica)| (EndpointLabels { pool, replica: replica.report.replica.to_string() }, replica))
        .collect();
    let states = replicas.iter().flat_map(|(labels, replica)| {
        STATES.iter().map(move |&(state, as_text)| {
            let EndpointLabels { pool, replica: name } = labels.clone();
            (StateLabels { pool, replica: name, state: as_text }, f64::from(u8::from(replica.report.state == state)))
        })
    });
    to.gauges("replica_state", "1 for the state a replica is in", states)?;
    type Figure = (&'static str, &'static str, fn(&ReplicaStatus) -> Option<f64>);
    const FIGURES: [Figure; 12] = [
        ("snapshot_age_seconds", "The time since a replica's figures were read", |r| Some(r.report.age_ms? as f64 / 1000.0)),
        ("replica_running", "Requests a replica's engine runs", |r| Some(r.report.running.into())),
        ("replica_waiting", "Requests that wait inside a replica's engine", |r| Some(r.report.waiting.into())),
        ("replica_kv_usage", "The share of the KV cache that running requests hold, 0 to 1", |r| Some(r.report.kv_usage.into())),
        ("replica_prefix_hit_rate", "Prompt tokens found in the cache over the last minute, 0 to 1", |r| {
            r.report.prefix_hit_rate.map(f64::from)
        }),
        ("replica_cache_tokens", "The size of the KV cache in tokens", |r| {
            (r.report.cache_tokens > 0).then_some(r.report.cache_tokens as f64)
        }),
        ("replica_in_flight", "Requests that connected Envoys have sent there and that have not ended", |r| {
            r.in_flight.map(|n| n as f64)
        }),
        ("replica_held_conversations", "Conversations at home there and active within the idle time", |r| {
            r.held_conversations.map(|n| n as f64)
        }),
        ("replica_recent_conversations", "Those of them that were active in the last two minutes", |r| {
            r.recent_conversations.map(|n| n as f64)
        }),
        ("replica_recent_context_tokens", "Tokens of the last requests of these, an estimate", |r| {
            r.recent_context_tokens.map(|n| n as f64)
        }),
        ("replica_active_conversations", "Conversations that admission has given a place there", |r| {
            r.active_conversations.map(|n| n as f64)
        }),
        ("replica_active_context_tokens", "Tokens of the contexts of these, an estimate", |r| {
            r.active_context_tokens.map(|n| n as f64)
        }),
    ];
    for (name, help, value) in FIGURES {
        to.gauges(name, help, replicas.iter().filter_map(|(labels, replica)| Some((labels.clone(), value(replica)?))))?;
    }
    let requests = replicas.iter().flat_map(|(labels, replica)| {
        replica.requests.named().map(|(outcome, count)| {
            let EndpointLabels { pool, replica } = labels.clone();
            (OutcomeLabels { pool, replica, outcome }, count)
        })
    });
    to.counters("replica_requests", "Requests that ended there, by outcome, as all Envoys counted them", requests)?;
    let prompt = replicas.iter().flat_map(|(labels, replica)| {
        // What the engine did not measure counts as computed.
        let cached = replica.cached_prompt_tokens.unwrap_or(0).min(replica.prompt_tokens);
        [("cached", cached), ("computed", replica.prompt_tokens - cached)].map(|(source, count)| {
            let EndpointLabels { pool, replica } = labels.clone();
            (SourceLabels { pool, replica, source }, count)
        })
    });
    to.counters("replica_prompt_tokens", "Prompt tokens since the engine started, from its cache or computed", prompt)?;
    let generated = replicas.iter().map(|(labels, replica)| (labels.clone(), replica.generation_tokens));
    to.counters("replica_generation_tokens", "Generated tokens since the engine started", generated)?;
    let preemptions = replicas.iter().map(|(labels, replica)| (labels.clone(), replica.preemptions));
    to.counters(
        "replica_preemptions",
        "Requests put out of the running batch for want of cache, since the engine started",
        preemptions,
    )
}

fn sources(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let sources: Vec<_> = status.pools.iter().flat_map(|pool| pool.sources.iter().map(move |source| (pool, source))).collect();
    let labels =
        |pool: &PoolStatus, source: &SourceStatus| DiscoveryLabels { pool: pool.cluster.clone(), source: source.name.clone() };
    let found = sources.iter().filter_map(|(pool, source)| Some((labels(pool, source), source.endpoints? as f64)));
    to.gauges("discovery_endpoints", "Endpoints that a name or a file last gave", found)?;
    let failing = sources.iter().map(|(pool, source)| (labels(pool, source), f64::from(u8::from(source.problem.is_some()))));
    to.gauges("discovery_failing", "1 while a name or a file gives no endpoints, and the last ones are kept", failing)?;
    let drain_file = std::iter::once(([] as [(&str, &str); 0], f64::from(u8::from(status.drain_file_problem.is_some()))));
    to.gauges("drain_file_failing", "1 while the drain file cannot be read, and what it said last holds", drain_file)
}

fn envoy_sources(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let labels = |source: &SourceStatus| EnvoySourceLabels { source: source.name.clone() };
    let found = status.envoy_sources.iter().filter_map(|source| Some((labels(source), source.endpoints? as f64)));
    to.gauges("envoy_discovery_endpoints", "Envoys that a name last gave", found)?;
    let failing = status.envoy_sources.iter().map(|source| (labels(source), f64::from(u8::from(source.problem.is_some()))));
    to.gauges("envoy_discovery_failing", "1 while a name gives no Envoys, and the last ones are kept", failing)
}

fn affinity(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let one = |value: f64| std::iter::once(([] as [(&str, &str); 0], value));
    to.gauges("affinity_conversations", "Conversations whose home is known", one(status.affinity.conversations as f64))?;
    let store = status.affinity.store.iter();
    let each = |value: fn(&StoreStatus) -> u64| store.clone().map(move |store| ([] as [(&str, &str); 0], value(store)));
    let up = each(|store| store.up.into()).map(|(labels, up)| (labels, up as f64));
    to.gauges("affinity_store_up", "1 while the store of conversations' homes takes them", up)?;
    to.counters("affinity_store_read", "Homes read from the store", each(|store| store.read))?;
    to.counters("affinity_store_written", "Homes written to the store", each(|store| store.written))?;
    to.counters(
        "affinity_store_dropped",
        "Homes that could not wait any longer for a store that was away or slow",
        each(|store| store.dropped),
    )
}

fn envoys(to: &mut Encoder<'_, '_>, status: &Status) -> fmt::Result {
    let labels = |url: &str| EnvoyLabels { envoy: url.to_owned() };
    let connected = status.envoys.iter().map(|envoy| (labels(&envoy.url), f64::from(u8::from(envoy.connected))));
    to.gauges("envoy_connected", "1 while an Envoy answers, be it that it stands by", connected)?;
    let standby = status.envoys.iter().map(|envoy| (labels(&envoy.url), f64::from(u8::from(envoy.standby))));
    to.gauges("envoy_standby", "1 while an Envoy takes another collector's snapshots", standby)?;
    type Count = (&'static str, &'static str, fn(&EnvoyStatus) -> u64);
    const COUNTS: [Count; 4] = [
        ("bindings_told", "Conversations' homes that an Envoy told", |envoy| envoy.bindings),
        ("bindings_sent", "Homes that other Envoys told and that an Envoy was sent", |envoy| envoy.bindings_sent),
        ("sync_sent_bytes", "Bytes of the requests of exchanges with an Envoy", |envoy| envoy.sync_bytes[0]),
        ("sync_received_bytes", "Bytes of its answers", |envoy| envoy.sync_bytes[1]),
    ];
    for (name, help, value) in COUNTS {
        to.counters(name, help, status.envoys.iter().map(|envoy| (labels(&envoy.url), value(envoy))))?;
    }
    let ages = status.envoys.iter().filter_map(|envoy| Some((labels(&envoy.url), envoy.answer_age_ms? as f64 / 1000.0)));
    to.gauges("sync_answer_age_seconds", "The time since an Envoy last answered", ages)?;
    let versions = status.envoys.iter().filter(|envoy| !envoy.filter_version.is_empty());
    let versions = versions.map(|envoy| (InfoLabels { envoy: envoy.url.clone(), version: envoy.filter_version.clone() }, 1.0));
    to.gauges("envoy_filter_info", "1, with the version of an Envoy's filter", versions)
}

/// Writes families whose values are known only now.
struct Encoder<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Encoder<'_, '_> {
    fn gauges<L: EncodeLabelSet>(&mut self, name: &str, help: &str, values: impl Iterator<Item = (L, f64)>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counters<L: EncodeLabelSet>(&mut self, name: &str, help: &str, values: impl Iterator<Item = (L, u64)>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_written_as_in_the_api() {
        for (state, name) in STATES {
            assert_eq!(serde_json::to_value(state).expect("JSON"), name);
        }
    }
}
