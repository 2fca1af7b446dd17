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
use crate::vllm::{MAX_ENGINES, Missing, read_engines};

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
    has_too_many: bool,
    missing: HashSet<ReplicaName>,
}

impl Log {
    fn after_poll(&mut self, pool: &Pool, endpoint: &SharedEndpoint) {
        let (address, states, missing, reason, too_many) = {
            let endpoint = lock(endpoint);
            let (address, missing) = (endpoint.config().address, endpoint.missing().collect::<Vec<_>>());
            (address, pool.states(&endpoint), missing, endpoint.failure().map(ToString::to_string), endpoint.too_many())
        };
        if let Some(too_many) = too_many.filter(|_| !self.has_too_many) {
            tracing::warn!("pool {}: {address}: {too_many}", pool.cluster);
        }
        self.has_too_many = too_many.is_some();
        for (replica, missing) in missing {
            self.missing(&pool.cluster, replica, missing);
        }
        if states != self.states {
            log_states(&pool.cluster, changed(&self.states, &states), &reason.unwrap_or_default());
            pool.warn_of_too_many();
            self.states = states;
        }
    }

    /// Once a replica: an old vLLM stays as it is. One whose ranks have other names at every poll is not logged for ever.
    fn missing(&mut self, cluster: &str, replica: ReplicaName, missing: Missing) {
        if !missing.is_empty() && self.missing.len() < MAX_ENGINES && self.missing.insert(replica) {
            tracing::warn!("pool {cluster}: {replica} reports no {missing}; what it means is then unknown, see the console");
        }
    }
}

/// The replicas whose state is another than before, or that were not there.
fn changed<'a>(
    before: &'a [(ReplicaName, ReplicaState)],
    now: &'a [(ReplicaName, ReplicaState)],
) -> impl Iterator<Item = &'a (ReplicaName, ReplicaState)> {
    now.iter().filter(|state| !before.contains(state))
}

fn log_states<'a>(cluster: &str, states: impl Iterator<Item = &'a (ReplicaName, ReplicaState)>, reason: &str) {
    for (replica, state) in states {
        match state {
            ReplicaState::Ready => tracing::info!("pool {cluster}: {replica} is ready"),
            ReplicaState::Draining => tracing::info!("pool {cluster}: {replica} is draining"),
            ReplicaState::Asleep => tracing::warn!("pool {cluster}: {replica} sleeps; wake it up or take it out"),
            ReplicaState::Down => tracing::warn!("pool {cluster}: {replica} is down: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranks_whose_state_is_another_are_logged() {
        let rank = |rank, state| (ReplicaName { address: ([10, 0, 0, 1], 80).into(), rank: Some(rank) }, state);
        let before = [rank(0, ReplicaState::Ready), rank(1, ReplicaState::Ready)];
        let now = [rank(0, ReplicaState::Ready), rank(1, ReplicaState::Asleep), rank(2, ReplicaState::Ready)];
        assert_eq!(changed(&before, &now).copied().collect::<Vec<_>>(), [now[1], now[2]]);
    }
}
