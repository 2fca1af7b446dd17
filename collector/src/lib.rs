//! The collector of Homing: it polls the metrics of every replica and pushes what it saw to every Envoy.
//!
//! One direction: replicas -> [`scrape`] -> [`fleet`] -> [`sync`] -> Envoys; the Envoys' answers come back into the fleet, and
//! [`status`] puts it together and [`history`] keeps an hour of it, which [`console`] and [`telemetry`] show over [`http`]. Each endpoint and each Envoy has a task of its own, so that nothing slow holds up anything else.
#![forbid(unsafe_code)]

pub mod capacity;
pub mod config;
pub mod console;
pub mod endpoint;
pub mod exposition;
pub mod fleet;
pub mod history;
pub mod hit_rate;
pub mod http;
mod http_client;
pub mod scrape;
pub mod status;
pub mod sync;
pub mod telemetry;
pub mod vllm;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::config::Config;
use crate::console::Live;
use crate::fleet::Fleet;
use crate::history::History;
use crate::telemetry::Telemetry;

/// A running collector; dropping it ends it.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    tasks: JoinSet<()>,
}

impl Collector {
    /// Starts polling, pushing and listening.
    ///
    /// Fails when it cannot listen, or when an Envoy's token cannot be read. A replica or an Envoy that is away is no failure.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(config.listen).await.with_context(|| {
            format!("cannot listen on {}; set `listen` to a free address of this machine, or to port 0", config.listen)
        })?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                "listening on {address}, which is not loopback: whoever reaches it sees addresses, load and what Envoys answer; nothing \
                 asks for a password"
            );
        }
        let fleet = Arc::new(Fleet::new(config));
        let history = Arc::new(History::default());
        let live = Arc::new(Live::new(Arc::clone(&fleet), Arc::clone(&history)));
        let telemetry = Arc::new(Telemetry::new(Arc::clone(&fleet), Arc::clone(&live)));
        let client = scrape::client(config.scrape)?;
        let controls: Vec<_> = config.envoys.iter().map(sync::Control::new).collect::<Result<_, _>>()?;

        let mut tasks = JoinSet::new();
        let interval = config.scrape.interval;
        for (pool, endpoints) in fleet.pools.iter().map(fleet::Pool::len).enumerate() {
            for endpoint in 0..endpoints {
                let place = (pool, endpoint);
                tasks.spawn(scrape::run(Arc::clone(&fleet), place, client.clone(), interval, Arc::clone(&telemetry)));
            }
        }
        for (index, control) in controls.into_iter().enumerate() {
            tasks.spawn(sync::run(Arc::clone(&fleet), index, control, interval, Arc::clone(&telemetry)));
        }
        tasks.spawn(history::run(fleet, history));
        tasks.spawn(console::publish(Arc::clone(&live)));
        let router = http::router(live, telemetry, config.allowed_hosts.clone());
        tasks.spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!("the collector's HTTP server ended: {error}");
            }
        });
        Ok(Self { address, tasks })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until a part of it ends, which none does but by a defect.
    pub async fn failed(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await {
            Some(Err(error)) => anyhow::anyhow!("a part of the collector failed: {error}"),
            _ => anyhow::anyhow!("a part of the collector ended; see the log above"),
        }
    }
}
