//! One pool: where its endpoints are found, and what is known of each.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use homing_routing::estimate::{Estimator, Totals};
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{MAX_REPLICAS, ReplicaState};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::lock;
use super::source::Source;
use crate::config::{EndpointConfig, PoolConfig};
use crate::drain::Drains;
use crate::endpoint::{Endpoint, Replica};
use crate::vllm::PromptCacheSource;

/// An endpoint, which its poll and whoever asks for it share. Do not wait for anything while it is locked.
pub type SharedEndpoint = Arc<Mutex<Endpoint>>;

/// The endpoints of one pool.
#[derive(Debug)]
pub struct Pool {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// The most sequences each engine runs at once; 0 when unknown.
    pub max_num_seqs: u32,
    /// The most engines of one endpoint that are replicas.
    max_ranks: usize,
    /// Where endpoints are found beside the configuration's own.
    pub sources: Vec<Source>,
    /// Learns what its texts are like.
    pub(super) texts: Mutex<Texts>,
    configured: Vec<EndpointConfig>,
    drains: Arc<Drains>,
    members: RwLock<Members>,
    sources_changed: Notify,
}

/// Learns what a pool's texts are like.
#[derive(Debug, Default)]
pub(super) struct Texts {
    estimator: Estimator,
    counted: Counted,
}

/// Whose counters are in a pool's totals.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Engines that were read: how often the server restarted, and which of its counters tell what the cache had.
    pub(super) engines: Vec<(ReplicaName, u64, Option<PromptCacheSource>)>,
    /// Envoys by their numbers, and since when each counts.
    pub(super) envoys: Vec<(u64, Option<u64>)>,
}

/// The endpoints there are, as [`Pool::reconcile`] last left them.
#[derive(Debug, Default)]
struct Members {
    endpoints: Vec<SharedEndpoint>,
    /// Whether every source had been asked.
    all_asked: bool,
    /// Whether every source had found something, be it that there are none.
    all_found: bool,
}

/// Endpoints that came and went.
#[derive(Debug, Default)]
pub(crate) struct Change {
    pub(crate) added: Vec<SharedEndpoint>,
    pub(crate) removed: Vec<SocketAddr>,
}

// === impl Texts ===

impl Texts {
    /// Takes the totals as they are now, and whose they are: where others are counted than before, the sums say nothing of what came since.
    pub(super) fn update(&mut self, totals: &Totals, counted: Counted) -> &Estimator {
        if self.counted != counted {
            self.estimator.begin_window();
            self.counted = counted;
        }
        self.estimator.update(totals);
        &self.estimator
    }
}

// === impl Pool ===

impl Pool {
    /// A pool with no endpoints yet: [`Pool::reconcile`] makes those of the configuration, too.
    pub(crate) fn new(config: &PoolConfig, drains: Arc<Drains>) -> Self {
        let files = config.files.iter().map(|path| Source::file(path));
        Self {
            cluster: config.cluster.clone(),
            max_num_seqs: config.max_num_seqs.unwrap_or(0),
            max_ranks: config.max_ranks as usize,
            sources: config.dns.iter().map(Source::dns).chain(files).collect(),
            texts: Mutex::default(),
            configured: config.replicas.clone(),
            drains,
            members: RwLock::default(),
            sources_changed: Notify::new(),
        }
    }

    /// Every endpoint there is now.
    pub fn endpoints(&self) -> Vec<SharedEndpoint> {
        self.members().endpoints.clone()
    }

    fn members(&self) -> RwLockReadGuard<'_, Members> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what the source at `source` found; `None` when it found nothing and what it found before holds.
    pub(crate) fn found(&self, source: usize, addresses: Option<Vec<SocketAddr>>, problem: Option<String>) {
        if self.sources[source].found(&format!("pool {}", self.cluster), addresses, problem) {
            self.sources_changed.notify_one();
        }
    }

    /// Waits until some source found something else than before.
    pub(crate) async fn sources_changed(&self) {
        self.sources_changed.notified().await;
    }

    /// Makes the endpoints those of the configuration and of every source, in this order, each address once. What is known of an
    /// endpoint that stays, stays.
    pub(crate) fn reconcile(&self) -> Change {
        let mut wanted = self.configured.clone();
        let (mut all_asked, mut all_found) = (true, true);
        for source in &self.sources {
            let state = source.state();
            all_asked &= state.was_asked;
            all_found &= state.addresses.is_some();
            wanted.extend(state.addresses.iter().flatten().map(|&address| EndpointConfig { address, drain: false }));
        }
        let mut seen = HashSet::new();
        wanted.retain(|endpoint| seen.insert(endpoint.address));
        if wanted.len() > MAX_REPLICAS {
            tracing::warn!("pool {} has {} endpoints; those after {MAX_REPLICAS} are left out", self.cluster, wanted.len());
            wanted.truncate(MAX_REPLICAS);
        }

        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        (members.all_asked, members.all_found) = (all_asked, all_found);
        let by_address = |endpoint: SharedEndpoint| {
            let address = lock(&endpoint).config().address;
            (address, endpoint)
        };
        let mut before: Vec<_> = members.endpoints.drain(..).map(by_address).collect();
        before.sort_unstable_by_key(|(address, _)| *address);
        let mut kept = vec![false; before.len()];
        let mut change = Change::default();
        for config in wanted {
            let known = before.binary_search_by_key(&config.address, |(address, _)| *address);
            members.endpoints.push(match known {
                Ok(place) => {
                    kept[place] = true;
                    Arc::clone(&before[place].1)
                }
                Err(_) => {
                    let endpoint = Arc::new(Mutex::new(Endpoint::new(config, self.max_ranks)));
                    change.added.push(Arc::clone(&endpoint));
                    endpoint
                }
            });
        }
        change.removed = before.iter().zip(kept).filter(|(_, kept)| !kept).map(|((address, _), _)| *address).collect();
        change
    }

    /// Whether every source was asked and every endpoint's state is known.
    pub(crate) fn is_settled(&self) -> bool {
        let members = self.members();
        members.all_asked && members.endpoints.iter().all(|endpoint| lock(endpoint).is_known())
    }

    /// Whether it is known which replicas there are: some are, or every source says that there are none.
    pub fn is_known(&self) -> bool {
        let members = self.members();
        !members.endpoints.is_empty() || members.all_found
    }

    /// Every replica of the pool at `now`, at most [`MAX_REPLICAS`].
    pub fn replicas(&self, now: Instant) -> Vec<Replica> {
        let members = self.members();
        let drained = self.drains.read();
        let mut replicas = Vec::with_capacity(members.endpoints.len());
        for endpoint in &members.endpoints {
            replicas.extend(lock(endpoint).replicas(now, self.max_num_seqs, &drained));
        }
        replicas.truncate(MAX_REPLICAS);
        replicas
    }

    /// Bytes of a request's body that make one token of its texts, as far as that has been learned.
    pub(crate) fn bytes_per_token(&self) -> f32 {
        lock(&self.texts).estimator.texts().bytes_per_token
    }

    /// The state of each replica at an endpoint.
    pub(crate) fn states(&self, endpoint: &Endpoint) -> Vec<(ReplicaName, ReplicaState)> {
        endpoint.states(&self.drains.read())
    }

    /// Whether it has this replica, or, for a name without a rank, one behind its address.
    pub(crate) fn has_replica(&self, name: ReplicaName) -> bool {
        self.members().endpoints.iter().any(|endpoint| {
            let endpoint = lock(endpoint);
            endpoint.config().address == name.address && (name.rank.is_none() || endpoint.names().any(|known| known == name))
        })
    }

    /// Whether the configuration drains what is at `address`.
    pub(crate) fn configured_to_drain(&self, address: SocketAddr) -> bool {
        self.configured.iter().any(|endpoint| endpoint.address == address && endpoint.drain)
    }

    /// Says so in the log when ranks make the pool larger than it may be.
    pub(crate) fn warn_of_too_many(&self) {
        let count: usize = self.members().endpoints.iter().map(|endpoint| lock(endpoint).names().count()).sum();
        if count > MAX_REPLICAS {
            tracing::warn!("pool {} has {count} replicas with its ranks; those after {MAX_REPLICAS} are left out", self.cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn pool(keys: &str) -> Pool {
        let config = Config::parse(&format!("pools: [{{cluster: a, {keys}}}]"), "test").expect("a configuration");
        Pool::new(&config.pools[0], Arc::default())
    }

    fn address(last: u8) -> SocketAddr {
        ([10, 0, 0, last], 80).into()
    }

    fn addresses(pool: &Pool) -> Vec<SocketAddr> {
        pool.endpoints().iter().map(|endpoint| lock(endpoint).config().address).collect()
    }

    #[test]
    fn endpoints_are_the_configurations_and_then_each_sources_once() {
        let pool = pool("replicas: [{address: '10.0.0.9:80', drain: true}], files: [a.json, b.json]");
        pool.found(1, Some(vec![address(3), address(9), address(1)]), None);
        pool.found(0, Some(vec![address(2), address(1)]), None);
        assert_eq!(pool.reconcile().added.len(), 4);
        assert_eq!(addresses(&pool), [9, 2, 1, 3].map(address));
        assert!(lock(&pool.endpoints()[0]).config().drain, "the configuration's entry wins");
    }

    #[test]
    fn an_endpoint_that_stays_keeps_what_is_known_of_it() {
        let pool = pool("files: [a.json]");
        pool.found(0, Some(vec![address(1), address(2)]), None);
        pool.reconcile();
        let second = Arc::clone(&pool.endpoints()[1]);
        pool.found(0, Some(vec![address(2), address(3)]), None);
        let change = pool.reconcile();
        assert_eq!(change.removed, [address(1)]);
        assert_eq!(change.added.len(), 1);
        assert!(Arc::ptr_eq(&second, &pool.endpoints()[0]));
        assert!(pool.reconcile().added.is_empty(), "nothing changed");
    }

    #[test]
    fn a_source_that_fails_keeps_what_it_found_and_is_right_again_later() {
        let pool = pool("files: [a.json]");
        assert!(!pool.is_known(), "nobody was asked");
        pool.found(0, None, Some("broken".to_owned()));
        pool.reconcile();
        assert!(!pool.is_known(), "it never said which there are");
        pool.found(0, Some(vec![address(1)]), None);
        assert!(!pool.is_known(), "its endpoint is not there yet, and none would be told");
        pool.found(0, None, Some("broken".to_owned()));
        pool.reconcile();
        assert_eq!(addresses(&pool), [address(1)]);
        assert_eq!(pool.sources[0].state().problem.as_deref(), Some("broken"));
        pool.found(0, Some(Vec::new()), None);
        pool.reconcile();
        assert!(addresses(&pool).is_empty() && pool.is_known(), "a list that says there are none is taken at its word");
    }

    #[test]
    fn a_pool_is_settled_when_every_source_was_asked_and_every_endpoint_polled() {
        let pool = pool("files: [a.json, b.json]");
        pool.found(0, Some(vec![address(1)]), None);
        pool.reconcile();
        lock(&pool.endpoints()[0]).failed(crate::endpoint::ScrapeFailure::Refused);
        assert!(!pool.is_settled());
        pool.found(1, None, Some("broken".to_owned()));
        pool.reconcile();
        assert!(pool.is_settled());
    }

    #[test]
    fn endpoints_beyond_the_limit_are_left_out() {
        let pool = pool("files: [a.json]");
        let many = (0..MAX_REPLICAS + 5).map(|index| SocketAddr::from(([127, 0, 0, 1], 1000 + index as u16)));
        pool.found(0, Some(many.collect()), None);
        pool.reconcile();
        assert_eq!(pool.endpoints().len(), MAX_REPLICAS);
    }
}
