//! Polling: one task an endpoint, each at its own pace, so that a slow one delays no other.

use std::sync::Arc;
use std::time::Duration;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::ReplicaState;
use reqwest::{Client, StatusCode, Url};
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::ScrapeConfig;
use crate::endpoint::ScrapeFailure;
use crate::fleet::Fleet;
use crate::http_client::{self, BodyError};
use crate::telemetry::Telemetry;
use crate::vllm::{Engines, read_engines};

/// The longest answer that is read, in bytes; vLLM's are 45 to 80 KB.
pub const MAX_METRICS_BYTES: usize = 8 << 20;

/// The client all polls share.
pub(crate) fn client(config: ScrapeConfig) -> reqwest::Result<Client> {
    http_client::builder(config.timeout).build()
}

/// Polls the endpoint at `pool` and `endpoint` of the fleet for ever.
pub(crate) async fn run(
    fleet: Arc<Fleet>,
    (pool, endpoint): (usize, usize),
    client: Client,
    interval: Duration,
    telemetry: Arc<Telemetry>,
) {
    let pool = &fleet.pools[pool];
    let address = pool.endpoint(endpoint).config().address;
    let telemetry = telemetry.endpoint(&pool.cluster, address);
    let url = metrics_url(address);
    // Endpoints start at different moments of the interval, so that their answers do not all come at once.
    tokio::time::sleep(interval.mul_f64(rand::random_range(0.0..1.0))).await;
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut first = true;
    loop {
        ticks.tick().await;
        let started = Instant::now();
        let result = scrape(&client, url.clone()).await;
        let now = Instant::now();
        telemetry.scraped(now.duration_since(started), result.as_ref().err());
        let mut endpoint = pool.endpoint(endpoint);
        let before = endpoint.states();
        let reason = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        match result {
            Ok(engines) => endpoint.read(now, &engines),
            Err(failure) => endpoint.failed(failure),
        }
        let after = endpoint.states();
        drop(endpoint);
        if before != after || first {
            log_states(&pool.cluster, &after, &reason);
            pool.warn_of_too_many();
        }
        if first {
            fleet.first_poll_ended();
            first = false;
        }
    }
}

fn metrics_url(address: std::net::SocketAddr) -> Url {
    format!("http://{address}/metrics").parse().expect("an address makes a URL")
}

/// One poll.
async fn scrape(client: &Client, url: Url) -> Result<Engines, ScrapeFailure> {
    let response = client.get(url).send().await.map_err(|error| match error {
        error if error.is_timeout() => ScrapeFailure::Timeout,
        error if http_client::is_refused(&error) => ScrapeFailure::Refused,
        error if error.is_connect() => ScrapeFailure::Connect(http_client::root_cause(&error)),
        error => ScrapeFailure::Broken(http_client::root_cause(&error)),
    })?;
    if response.status() != StatusCode::OK {
        return Err(ScrapeFailure::Status(response.status().as_u16()));
    }
    let body = http_client::read_body(response, MAX_METRICS_BYTES).await.map_err(|error| match error {
        BodyError::TooLarge => ScrapeFailure::TooLarge,
        BodyError::Broken(error) if error.is_timeout() => ScrapeFailure::Timeout,
        BodyError::Broken(error) => ScrapeFailure::Broken(http_client::root_cause(&error)),
    })?;
    let engines = read_engines(&body);
    if engines.is_empty() { Err(ScrapeFailure::NotVllm) } else { Ok(engines) }
}

fn log_states(cluster: &str, states: &[(ReplicaName, ReplicaState)], reason: &str) {
    for (replica, state) in states {
        match state {
            ReplicaState::Ready => tracing::info!("pool {cluster}: {replica} is ready"),
            ReplicaState::Draining => tracing::info!("pool {cluster}: {replica} is draining, as configured"),
            ReplicaState::Asleep => tracing::warn!("pool {cluster}: {replica} sleeps; wake it up or take it out"),
            ReplicaState::Down => tracing::warn!("pool {cluster}: {replica} is down: {reason}"),
        }
    }
}
