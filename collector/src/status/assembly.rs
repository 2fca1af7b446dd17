//! How the status is put together: what the pools know, with what every Envoy last answered.

use std::collections::HashMap;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::{OutcomeCounts, PoolAnswer, ReplicaAnswer, ReplicaState};
use tokio::time::Instant;

use super::{Affinity, AffinityStatus, EnvoyStatus, PoolStatus, ReplicaStatus, Routing, SourceStatus, Span, Status};
use crate::admission::{Active, Admission};
use crate::capacity::{Capacity, tokens};
use crate::endpoint::{Replica, whole_ms};
use crate::fleet::{Envoy, Fleet, Pool, Source, now_ms};
use crate::history::History;
use crate::sync::misconfigured;

// === impl Status ===

impl Status {
    /// The fleet at `now`.
    pub fn of(fleet: &Fleet, history: &History, now: Instant) -> Self {
        let envoys: Vec<_> = fleet.envoys().iter().map(|envoy| EnvoyStatus::of(fleet, envoy, now)).collect();
        let pools = fleet.pools.iter().map(|pool| PoolStatus::of(pool, &envoys, history, now)).collect();
        let drain_file_problem = fleet.drains.read().file_problem.clone();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            generation: fleet.generation,
            at_ms: now_ms(),
            pools,
            envoys,
            envoy_sources: fleet.envoy_sources().map(SourceStatus::of).collect(),
            affinity: AffinityStatus::of(fleet),
            drain_file_problem,
        }
    }
}

impl PoolStatus {
    fn of(pool: &Pool, envoys: &[EnvoyStatus], history: &History, now: Instant) -> Self {
        let mut answers = Answers::of(&pool.cluster, envoys);
        let bytes_per_token = pool.bytes_per_token();
        let replicas = pool.replicas(now).into_iter().map(|replica| {
            let seen = answers.replicas.get(&replica.report.replica);
            ReplicaStatus::of(replica, seen, bytes_per_token)
        });
        let replicas: Vec<_> = replicas.collect();
        // One that sleeps has given its cache up.
        let has_cache = |replica: &&ReplicaStatus| !matches!(replica.report.state, ReplicaState::Down | ReplicaState::Asleep);
        let up = || replicas.iter().filter(has_cache);
        let cache_tokens = up().map(|replica| replica.report.cache_tokens).fold(0, u64::saturating_add);
        if let Some(admission) = &mut answers.admission {
            let active = |replica: &ReplicaStatus| answers.replicas.get(&replica.report.replica)?.active;
            up().for_each(|replica| admission.add_replica(active(replica).unwrap_or_default(), replica.report.cache_tokens));
        }
        let hour = history.hour(&pool.cluster);
        let capacity = total(&replicas, |replica| replica.recent_conversations)
            .zip(total(&replicas, |replica| replica.recent_context_tokens))
            .and_then(|(conversations, tokens)| Capacity::of(conversations, tokens, cache_tokens, hour.latest_cached_share));
        let sources = pool.sources.iter().map(SourceStatus::of).collect();
        let Answers { routing, admission, .. } = answers;
        Self { cluster: pool.cluster.clone(), routing, capacity, admission, hour, replicas, sources }
    }
}

/// The sum of what replicas have of something; `None` when none has it.
fn total(replicas: &[ReplicaStatus], of: impl Fn(&ReplicaStatus) -> Option<u64>) -> Option<u64> {
    replicas.iter().filter_map(of).reduce(u64::saturating_add)
}

impl ReplicaStatus {
    fn of(replica: Replica, seen: Option<&Seen>, bytes_per_token: f32) -> Self {
        let seen = seen.copied().unwrap_or_default();
        let problem = replica.problem();
        let report = replica.report;
        let context_tokens = seen.recent_context_bytes.map(|bytes| tokens(bytes, bytes_per_token));
        let capacity = seen.recent_conversations.zip(context_tokens).and_then(|(conversations, tokens)| {
            Capacity::of(conversations, tokens, report.cache_tokens, report.prefix_hit_rate.map(f64::from))
        });
        Self {
            report,
            prompt_tokens: replica.metrics.prompt_tokens,
            cached_prompt_tokens: replica.metrics.prompt_cache.map(|cache| cache.hits),
            generation_tokens: replica.metrics.generation_tokens,
            preemptions: replica.metrics.preemptions,
            in_flight: seen.in_flight,
            held_conversations: seen.held_conversations,
            recent_conversations: seen.recent_conversations,
            recent_context_tokens: context_tokens,
            context_level: capacity.map(|capacity| capacity.level),
            active_conversations: seen.active.map(|active| active.conversations),
            active_context_tokens: seen.active.map(|active| active.context_tokens),
            requests: seen.requests,
            problem,
            drained_by: replica.drained_by,
            restarts: replica.restarts,
            missing: replica.metrics.missing,
        }
    }
}

impl SourceStatus {
    fn of(source: &Source) -> Self {
        let state = source.state();
        let endpoints = state.addresses.as_ref().map(Vec::len);
        Self { kind: source.kind, name: source.name.clone(), endpoints, problem: state.problem.clone() }
    }
}

impl AffinityStatus {
    fn of(fleet: &Fleet) -> Self {
        let affinity = &fleet.affinity;
        Self { conversations: affinity.count(), store: fleet.store.as_ref().map(|store| store.status(affinity.dropped())) }
    }
}

impl EnvoyStatus {
    fn of(fleet: &Fleet, envoy: &Envoy, now: Instant) -> Self {
        let misconfigured = misconfigured(fleet, envoy);
        let exchanges = envoy.exchanges().clone();
        let connected = exchanges.is_connected(now);
        let age = exchanges.answered_at.map(|at| now.duration_since(at));
        let answer = exchanges.answer.unwrap_or_default();
        Self {
            url: envoy.url.to_string(),
            connected,
            standby: answer.standby,
            filter_version: answer.filter_version,
            counting_since_ms: answer.counting_since_ms,
            answered: exchanges.answered,
            failed: exchanges.failed,
            answer_age_ms: age.map(whole_ms),
            problem: exchanges.problem.or(misconfigured),
            bindings: exchanges.bindings,
            bindings_sent: exchanges.bindings_sent,
            sync_bytes: exchanges.bytes,
            bindings_dropped: answer.bindings_dropped,
            pools: answer.pools,
        }
    }
}

// === what the Envoys say of one pool ===

/// All answers of one pool, put together.
#[derive(Default)]
struct Answers {
    routing: Routing,
    admission: Option<Admission>,
    replicas: HashMap<ReplicaName, Seen>,
}

/// One replica in all of them.
#[derive(Clone, Copy, Default)]
struct Seen {
    in_flight: Option<u64>,
    held_conversations: Option<u64>,
    recent_conversations: Option<u64>,
    recent_context_bytes: Option<u64>,
    active: Option<Active>,
    requests: OutcomeCounts,
}

impl Answers {
    fn of(cluster: &str, envoys: &[EnvoyStatus]) -> Self {
        let mut all = Self::default();
        all.routing.envoys = envoys.len();
        for envoy in envoys {
            all.routing.envoys_connected += usize::from(envoy.connected);
            if let Some(pool) = envoy.pools.iter().find(|pool| pool.cluster == cluster) {
                all.add(envoy, pool);
            }
        }
        let Routing { requests, .. } = all.routing;
        all.routing.sticky_share = (requests.total() > 0).then(|| requests.sticky as f64 / requests.total() as f64);
        all
    }

    fn add(&mut self, envoy: &EnvoyStatus, pool: &PoolAnswer) {
        let routing = &mut self.routing;
        routing.counting_since_ms = routing.counting_since_ms.into_iter().chain(envoy.counting_since_ms).min();
        if envoy.connected {
            routing.envoys_routing += 1;
            let affinity = if pool.affinity { Affinity::On } else { Affinity::Off };
            routing.affinity = Some(routing.affinity.filter(|known| *known != affinity).map_or(affinity, |_| Affinity::Mixed));
            routing.spill_threshold_auto = both(routing.spill_threshold_auto, pool.spill_threshold_auto);
            routing.spill_margin_auto = both(routing.spill_margin_auto, pool.spill_margin_auto);
        }
        for answer in &pool.replicas {
            routing.requests = routing.requests.and(&answer.requests);
            if envoy.connected {
                // Also what was sent to an endpoint without a rank, which is no replica's.
                routing.in_flight = Some(routing.in_flight.unwrap_or(0).saturating_add(answer.in_flight));
                widen(&mut routing.spill_threshold, Some(answer.spill_threshold));
                widen(&mut routing.spill_margin, answer.spill_margin);
            }
            self.replicas.entry(answer.replica).or_default().add(answer, envoy.connected);
        }
        if let Some(line) = pool.admission.as_ref().filter(|_| envoy.connected) {
            self.admission.get_or_insert_default().add(line);
            for answer in &pool.replicas {
                self.replicas.entry(answer.replica).or_default().add_active(answer, line.shared_tokens);
            }
        }
    }
}

impl Seen {
    fn add(&mut self, answer: &ReplicaAnswer, connected: bool) {
        self.requests = self.requests.and(&answer.requests);
        if connected {
            self.in_flight = Some(self.in_flight.unwrap_or(0).saturating_add(answer.in_flight));
            // Every Envoy knows every conversation; one that has just started may not know all yet.
            self.held_conversations = self.held_conversations.max(answer.held_conversations);
            self.recent_conversations = self.recent_conversations.max(answer.recent_conversations);
            self.recent_context_bytes = self.recent_context_bytes.max(answer.recent_context_bytes);
        }
    }

    fn add_active(&mut self, answer: &ReplicaAnswer, shared_tokens: u32) {
        let all = self.active.into_iter().chain(Active::of(answer));
        self.active = all.reduce(|known, more| known.and(more, shared_tokens));
    }
}

/// True where both are, as far as they are known.
fn both(known: Option<bool>, more: Option<bool>) -> Option<bool> {
    known.into_iter().chain(more).reduce(|both, value| both && value)
}

fn widen(span: &mut Option<Span>, value: Option<u32>) {
    if let Some(value) = value {
        let known = span.unwrap_or(Span { min: value, max: value });
        *span = Some(Span { min: known.min.min(value), max: known.max.max(value) });
    }
}
