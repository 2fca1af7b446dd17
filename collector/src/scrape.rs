//! Polling: one task an endpoint, each at its own pace, so that a slow one delays no other.

pub(crate) mod client;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::ReplicaState;
use tokio::time::{Instant, MissedTickBehavior};

pub use self::client::MAX_METRICS_BYTES;
use self::client::ScrapeClient;
use crate::endpoint::ScrapeFailure;
use crate::fleet::{Fleet, Pool, SharedEndpoint, lock};
use crate::telemetry::Telemetry;
use crate::vllm::{Missing, read_engines};

/// What polls the endpoints of one pool.
#[derive(Clone, Debug)]
pub(crate) struct Scraper {
    pub(crate) fleet: Arc<Fleet>,
    /// The pool's place in the fleet.
    pub(crate) pool: usize,
    pub(crate) client: ScrapeClient,
    pub(crate) interval: Duration,
    pub(crate) telemetry: Arc<Telemetry>,
}

impl Scraper {
    /// Polls an endpoint for ever.
    pub(crate) async fn run(mut self, endpoint: SharedEndpoint) {
        let pool = &self.fleet.pools[self.pool];
        let address = lock(&endpoint).config().address;
        let telemetry = self.telemetry.endpoint(&pool.cluster, address);
        let url = self.client.url(address);
        // Endpoints start at different moments of the interval, so that their answers do not all come at once.
        tokio::time::sleep(self.interval.mul_f64(rand::random_range(0.0..1.0))).await;
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = Vec::new();
        let mut log = Log::default();
        loop {
            ticks.tick().await;
            let started = Instant::now();
            let result = self.client.get(url.clone(), &mut buffer).await;
            let result = result.and_then(|()| match read_engines(&buffer) {
                engines if engines.is_empty() => Err(ScrapeFailure::NotVllm),
                engines => Ok(engines),
            });
            let now = Instant::now();
            telemetry.scraped(now.duration_since(started), result.as_ref().err());
            let is_new = {
                let mut endpoint = lock(&endpoint);
                let was_known = endpoint.is_known();
                match result {
                    Ok(engines) => endpoint.read(now, &engines),
                    Err(failure) => endpoint.failed(failure),
                }
                !was_known && endpoint.is_known()
            };
            log.after_poll(pool, &endpoint);
            if is_new {
                self.fleet.changed();
            }
        }
    }
}

/// What was logged of an endpoint already.
#[derive(Default)]
struct Log {
    states: Vec<(ReplicaName, ReplicaState)>,
    missing: HashSet<ReplicaName>,
}

impl Log {
    fn after_poll(&mut self, pool: &Pool, endpoint: &SharedEndpoint) {
        let (states, missing, reason) = {
            let endpoint = lock(endpoint);
            (pool.states(&endpoint), endpoint.missing().collect::<Vec<_>>(), endpoint.failure().map(ToString::to_string))
        };
        for (replica, missing) in missing {
            self.missing(&pool.cluster, replica, missing);
        }
        if states != self.states {
            log_states(&pool.cluster, &states, &reason.unwrap_or_default());
            pool.warn_of_too_many();
            self.states = states;
        }
    }

    /// Once a replica: an old vLLM stays as it is.
    fn missing(&mut self, cluster: &str, replica: ReplicaName, missing: Missing) {
        if !missing.is_empty() && self.missing.insert(replica) {
            tracing::warn!("pool {cluster}: {replica} reports no {missing}; what it means is then unknown, see the console");
        }
    }
}

fn log_states(cluster: &str, states: &[(ReplicaName, ReplicaState)], reason: &str) {
    for (replica, state) in states {
        match state {
            ReplicaState::Ready => tracing::info!("pool {cluster}: {replica} is ready"),
            ReplicaState::Draining => tracing::info!("pool {cluster}: {replica} is draining"),
            ReplicaState::Asleep => tracing::warn!("pool {cluster}: {replica} sleeps; wake it up or take it out"),
            ReplicaState::Down => tracing::warn!("pool {cluster}: {replica} is down: {reason}"),
        }
    }
}
