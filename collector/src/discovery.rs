//! Finding the endpoints of a pool, and polling those that there are now.
//!
//! Each source, a name in DNS or a file, has a task that tells the pool what it found. The pool's own task compares that with what
//! is polled: it starts what came and stops what went. A source that finds nothing keeps what it found last, so that neither a
//! DNS server that is away nor a broken file takes replicas out.

mod file_sd;
mod names;
pub(crate) mod watched;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

use self::file_sd::{Target, read_targets};
use self::names::{Names, System};
use self::watched::WatchedFile;
use crate::config::{AddressFamily, DnsConfig, PoolConfig};
use crate::fleet::{Fleet, Pool, SharedEndpoint, lock};
use crate::scrape::Scraper;

/// The time between two look-ups of a name in a file.
const FILE_REFRESH: std::time::Duration = crate::config::DEFAULT_REFRESH;

/// Finds and polls the endpoints of a pool for ever; returns when a part of it failed.
pub(crate) async fn run(fleet: Arc<Fleet>, config: PoolConfig, scraper: Scraper) {
    let pool = &fleet.pools[scraper.pool];
    let mut sources = JoinSet::new();
    for (place, dns) in config.dns.into_iter().enumerate() {
        sources.spawn(follow_name(Arc::clone(&fleet), (scraper.pool, place), dns));
    }
    for (place, path) in (sources.len()..).zip(config.files) {
        sources.spawn(follow_file(Arc::clone(&fleet), (scraper.pool, place), path));
    }
    let mut polls = Polls::default();
    loop {
        let change = pool.reconcile();
        if !polls.stop(pool, &change.removed).await {
            return;
        }
        polls.start(pool, &change.added, &scraper);
        fleet.changed();
        tokio::select! {
            () = pool.sources_changed() => {}
            // Neither ends unless it fails.
            Some(_) = sources.join_next() => return,
            Some(_) = polls.tasks.join_next() => return,
        }
    }
}

/// The tasks that poll.
#[derive(Default)]
struct Polls {
    tasks: JoinSet<()>,
    handles: HashMap<SocketAddr, AbortHandle>,
}

impl Polls {
    fn start(&mut self, pool: &Pool, added: &[SharedEndpoint], scraper: &Scraper) {
        for endpoint in added {
            let address = lock(endpoint).config().address;
            tracing::info!("pool {}: {address} is polled", pool.cluster);
            self.handles.insert(address, self.tasks.spawn(scraper.clone().run(Arc::clone(endpoint))));
        }
    }

    /// Returns once they have ended: one that came back at once would share its metrics with the old one. `false` if one failed.
    async fn stop(&mut self, pool: &Pool, removed: &[SocketAddr]) -> bool {
        let stopped = removed.iter().filter_map(|address| self.handles.remove(address)).map(|handle| handle.abort()).count();
        for address in removed {
            tracing::info!("pool {}: {address} is gone and polled no more", pool.cluster);
        }
        for _ in 0..stopped {
            if !matches!(self.tasks.join_next().await, Some(Err(error)) if error.is_cancelled()) {
                return false;
            }
        }
        true
    }
}

/// Looks a name up for ever.
async fn follow_name(fleet: Arc<Fleet>, (pool, source): (usize, usize), dns: DnsConfig) {
    let targets = [Target::Name { name: dns.name, port: dns.port }];
    let mut names = Names::new(System, dns.family);
    let mut ticks = tokio::time::interval(dns.refresh);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (addresses, problem) = names.resolve(&targets).await;
        fleet.pools[pool].found(source, (!addresses.is_empty()).then_some(addresses), problem);
    }
}

/// Reads a file whenever it changes, and looks the names in it up, for ever.
async fn follow_file(fleet: Arc<Fleet>, (pool, source): (usize, usize), path: std::path::PathBuf) {
    let mut file = WatchedFile::new(Path::new(&path));
    let mut names = Names::new(System, AddressFamily::default());
    let mut targets = None;
    let mut problem = None;
    let mut looked_up = Instant::now();
    loop {
        let has_names = targets.iter().flatten().any(Target::is_name);
        tokio::select! {
            content = file.changed() => match content.and_then(|content| read_targets(&content)) {
                Ok(read) => (targets, problem) = (Some(read), None),
                Err(why) => problem = Some(why),
            },
            () = tokio::time::sleep_until(looked_up + FILE_REFRESH), if has_names => {}
        }
        looked_up = Instant::now();
        let (addresses, unresolved) = match &targets {
            Some(targets) => {
                let (addresses, unresolved) = names.resolve(targets).await;
                (Some(addresses), unresolved)
            }
            None => (None, None),
        };
        fleet.pools[pool].found(source, addresses, problem.clone().or(unresolved));
    }
}
