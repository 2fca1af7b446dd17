//! Finding the endpoints of a pool, and polling those that there are now; and the same of Envoys, in [`envoys`].
//!
//! Each source, a name in DNS or a file, has a task that tells the pool what it found. The pool's own task compares that with what
//! is polled: it starts what came and stops what went. A source that finds nothing keeps what it found last, so that neither a
//! DNS server that is away nor a broken file takes replicas out.

pub(crate) mod envoys;
mod file_sd;
mod names;
mod tasks;
pub(crate) mod watched;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use self::file_sd::{Target, read_targets};
use self::names::Names;
pub use self::names::{Lookup, System};
use self::tasks::Tasks;
use self::watched::WatchedFile;
use crate::config::{AddressFamily, DnsConfig, PoolConfig};
use crate::fleet::{Fleet, lock};
use crate::scrape::Scraper;

/// The time between two look-ups of a name in a file.
const FILE_REFRESH: std::time::Duration = crate::config::DEFAULT_REFRESH;

/// Finds and polls the endpoints of a pool for ever; returns when a part of it failed.
pub(crate) async fn run<L: Lookup + Clone + 'static>(fleet: Arc<Fleet>, config: PoolConfig, scraper: Scraper, lookup: L) {
    let pool = &fleet.pools[scraper.pool];
    let mut sources = JoinSet::new();
    for (place, dns) in config.dns.into_iter().enumerate() {
        let (found, at) = (Arc::clone(&fleet), scraper.pool);
        let found = move |addresses, problem| found.pools[at].found(place, addresses, problem);
        sources.spawn(follow_name(lookup.clone(), dns, found));
    }
    for (place, path) in (sources.len()..).zip(config.files) {
        sources.spawn(follow_file(Arc::clone(&fleet), (scraper.pool, place), path, lookup.clone()));
    }
    let mut polls = Tasks::default();
    loop {
        let change = pool.reconcile();
        for address in &change.removed {
            tracing::info!("pool {}: {address} is gone and polled no more", pool.cluster);
        }
        if !polls.stop(change.removed).await {
            return;
        }
        for endpoint in change.added {
            let address = lock(&endpoint).config().address;
            tracing::info!("pool {}: {address} is polled", pool.cluster);
            polls.start(address, scraper.clone().run(endpoint));
        }
        fleet.changed();
        tokio::select! {
            () = pool.sources_changed() => {}
            // Neither ends unless it fails.
            Some(_) = sources.join_next() => return,
            () = polls.failed() => return,
        }
    }
}

/// Looks a name up for ever, and tells what was found.
async fn follow_name(lookup: impl Lookup, dns: DnsConfig, found: impl Fn(Option<Vec<SocketAddr>>, Option<String>)) {
    let targets = [Target::Name { name: dns.name, port: dns.port }];
    let mut names = Names::new(lookup, dns.family);
    let mut ticks = tokio::time::interval(dns.refresh);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (addresses, problem) = names.resolve(&targets).await;
        found((!addresses.is_empty()).then_some(addresses), problem);
    }
}

/// Reads a file whenever it changes, and looks the names in it up, for ever.
async fn follow_file(fleet: Arc<Fleet>, (pool, source): (usize, usize), path: std::path::PathBuf, lookup: impl Lookup) {
    let mut file = WatchedFile::new(Path::new(&path));
    let mut names = Names::new(lookup, AddressFamily::default());
    let mut targets = None;
    let mut problem = None;
    let mut looked_up = Instant::now();
    loop {
        let has_names = targets.iter().flatten().any(|target: &Target| target.name().is_some());
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
