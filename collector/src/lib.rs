//! The collector of Homing: it polls the metrics of every replica and pushes what it saw to every Envoy.
//!
//! One direction: replicas, which [`discovery`] finds as it does Envoys -> [`scrape`] -> [`fleet`] -> [`sync`] -> Envoys; the Envoys' answers come back into
//! the fleet, and [`status`] puts it together and [`history`] keeps an hour of it, which [`console`] and [`telemetry`] show over [`http`].
//! Each endpoint and each Envoy has a task of its own, so that nothing slow holds up anything else.
#![forbid(unsafe_code)]

pub mod admission;
pub mod affinity;
pub mod api;
pub mod capacity;
pub mod config;
pub mod console;
mod control_client;
pub mod discovery;
pub mod drain;
pub mod endpoint;
pub mod exposition;
pub mod fleet;
pub mod history;
pub mod hit_rate;
pub mod http;
mod http_client;
pub mod scrape;
mod server;
pub mod status;
pub mod sync;
pub mod telemetry;
mod text;
mod tls;
pub mod vllm;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::api::Changes;
use crate::config::Config;
use crate::console::Live;
use crate::discovery::envoys::Exchanger;
use crate::discovery::{Lookup, System};
use crate::fleet::Fleet;
use crate::history::History;
use crate::scrape::Scraper;
use crate::scrape::client::ScrapeClient;
use crate::sync::Access;
use crate::telemetry::Telemetry;

/// How often conversations that are idle are forgotten.
const FORGET_EVERY: Duration = Duration::from_secs(10);

/// A running collector; dropping it ends it.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    tasks: JoinSet<()>,
}

impl Collector {
    /// Starts polling, pushing and listening.
    ///
    /// Fails when it cannot listen, or when a token or certificates cannot be read. A replica or an Envoy that is away is no failure.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_with(config, System).await
    }

    /// As [`Self::start`], with names looked up by something else than the system's resolver.
    pub async fn start_with(config: &Config, lookup: impl Lookup + Clone + 'static) -> anyhow::Result<Self> {
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
        let access = config.envoys.iter().map(Access::new).collect::<Result<_, _>>()?;
        if let Some(token) = &config.api {
            token.read().map_err(|error| anyhow::anyhow!("api: {error}"))?;
        }
        let interval = config.scrape.interval;
        let mut scrapers = Vec::new();
        for (place, pool) in config.pools.iter().enumerate() {
            let client = ScrapeClient::new(pool, config.scrape.timeout)?;
            let (fleet, telemetry) = (Arc::clone(&fleet), Arc::clone(&telemetry));
            scrapers.push((pool.clone(), Scraper { fleet, pool: place, client, interval, telemetry }));
        }

        let mut tasks = JoinSet::new();
        if let Some(path) = config.drain_file.clone() {
            let fleet = Arc::clone(&fleet);
            tasks.spawn(async move { fleet.drains.follow(&path, || fleet.changed()).await });
        }
        for (pool, scraper) in scrapers {
            tasks.spawn(discovery::run(Arc::clone(&fleet), pool, scraper, lookup.clone()));
        }
        let exchanges = Exchanger { fleet: Arc::clone(&fleet), access, interval, telemetry: Arc::clone(&telemetry) };
        tasks.spawn(exchanges.run(config.envoys.clone(), lookup));
        if let Some(link) = fleet.store.clone() {
            let (affinity, writer) = (Arc::clone(&fleet.affinity), rand::random());
            tasks.spawn(affinity::store::run(affinity, link, writer));
        }
        tasks.spawn(forget_idle(Arc::clone(&fleet)));
        tasks.spawn(history::run(Arc::clone(&fleet), history));
        tasks.spawn(console::publish(Arc::clone(&live)));
        let changes = Changes { fleet, token: config.api.clone() };
        let router = http::router(live, telemetry, changes, config.allowed_hosts.clone());
        tasks.spawn(server::serve(listener, router, server::MAX_CONNECTIONS));
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

async fn forget_idle(fleet: Arc<Fleet>) {
    loop {
        tokio::time::sleep(FORGET_EVERY).await;
        // An Envoy may have left.
        fleet.hold_longest();
        fleet.affinity.forget_idle(fleet::now_ms());
    }
}
