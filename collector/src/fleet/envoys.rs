//! The Envoys there are: those that the configuration names, and those that are found at the addresses of a name.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use homing_routing::sync::SyncAnswer;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::lock;
use super::source::Source;
use crate::config::{ControlUrl, EnvoyConfig, EnvoyPlace};

/// How long ago an Envoy's last answer may be for it to count as connected.
const CONNECTED: Duration = Duration::from_secs(3);

/// One Envoy and the exchanges with it.
#[derive(Debug)]
pub struct Envoy {
    /// Its number in this collector, which no other ever has: not even one that is found later at the same address.
    pub number: u64,
    /// Its control listener.
    pub url: ControlUrl,
    /// The entry of the configuration's `envoys` that it comes from.
    pub(crate) entry: usize,
    exchanges: Mutex<Exchanges>,
}

/// The exchanges with one Envoy so far.
#[derive(Clone, Debug, Default)]
pub struct Exchanges {
    /// Exchanges that it answered.
    pub answered: u64,
    /// Exchanges that failed.
    pub failed: u64,
    /// What it last answered, without the bindings.
    pub answer: Option<SyncAnswer>,
    /// When it did.
    pub answered_at: Option<Instant>,
    /// After how many seconds without a turn it forgets a conversation, as it last said.
    pub(crate) idle_s: Option<u32>,
    /// Bindings that it told, over all answers.
    pub bindings: u64,
    /// Bindings of others that it was sent and took.
    pub bindings_sent: u64,
    /// Bytes that it was sent and that it answered, without HTTP's headers.
    pub bytes: [u64; 2],
    /// Since when its count of requests that went to other addresses than the chosen ones has been growing, and when it last grew.
    pub(crate) mismatched: Option<[Instant; 2]>,
    /// Since when it has had none of the pools that it is told, of all there are.
    pub(crate) without_pools: Option<Instant>,
    /// Whether all that it knows has been read: its journal, and its table if some of the journal was overwritten.
    pub is_read: bool,
    /// What is wrong with it now, and what to do.
    pub problem: Option<String>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Envoys {
    /// Where they are, an entry of the configuration each.
    entries: Vec<Entry>,
    members: RwLock<Members>,
    sources_changed: Notify,
}

#[derive(Debug)]
enum Entry {
    Url(ControlUrl),
    Name { source: Source, is_https: bool },
}

/// The Envoys as [`Envoys::reconcile`] last left them.
#[derive(Debug, Default)]
struct Members {
    envoys: Vec<Arc<Envoy>>,
    /// The number of the next one.
    next: u64,
    /// Whether every name had been looked up.
    all_asked: bool,
}

/// Envoys that came and went.
#[derive(Debug, Default)]
pub(crate) struct EnvoyChange {
    pub(crate) added: Vec<Arc<Envoy>>,
    pub(crate) removed: Vec<Arc<Envoy>>,
}

// === impl Envoy ===

impl Envoy {
    /// The exchanges so far. Do not wait for anything while holding them.
    pub fn exchanges(&self) -> MutexGuard<'_, Exchanges> {
        lock(&self.exchanges)
    }
}

// === impl Exchanges ===

impl Exchanges {
    /// Whether what it last answered is still true at `now`: of what it has in flight, holds, and is set up with. One exchange that fails
    /// changes nothing of that.
    pub fn is_connected(&self, now: Instant) -> bool {
        self.answered_at.is_some_and(|at| now.duration_since(at) < CONNECTED)
    }
}

// === impl Envoys ===

impl Envoys {
    /// Those of a configuration; none is found yet.
    pub(super) fn new(config: &[EnvoyConfig]) -> Self {
        let entries = config.iter().map(|envoy| match &envoy.place {
            EnvoyPlace::Url(url) => Entry::Url(url.clone()),
            EnvoyPlace::Dns(dns) => Entry::Name { source: Source::dns(dns), is_https: envoy.tls.is_some() },
        });
        let envoys = Self { entries: entries.collect(), members: RwLock::default(), sources_changed: Notify::new() };
        envoys.reconcile();
        envoys
    }

    /// Those that there are now, in the configuration's order.
    pub(super) fn all(&self) -> Vec<Arc<Envoy>> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).envoys.clone()
    }

    pub(super) fn all_asked(&self) -> bool {
        self.members.read().unwrap_or_else(PoisonError::into_inner).all_asked
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Url(_) => None,
            Entry::Name { source, .. } => Some(source),
        })
    }

    /// Takes in what the name of an entry led to; `None` when it led nowhere and what it led to before holds.
    pub(super) fn found(&self, entry: usize, addresses: Option<Vec<SocketAddr>>, problem: Option<String>) {
        if let Entry::Name { source, .. } = &self.entries[entry]
            && source.found("envoys", addresses, problem)
        {
            self.sources_changed.notify_one();
        }
    }

    pub(super) async fn sources_changed(&self) {
        self.sources_changed.notified().await;
    }

    /// Makes the Envoys those of every entry, in this order, each control listener once. One that stays is the same.
    pub(super) fn reconcile(&self) -> EnvoyChange {
        let mut all_asked = true;
        let mut wanted = Vec::new();
        for (entry, place) in self.entries.iter().enumerate() {
            match place {
                Entry::Url(url) => wanted.push((entry, url.clone())),
                Entry::Name { source, is_https } => {
                    let url = if *is_https { ControlUrl::Tls } else { ControlUrl::Tcp };
                    let state = source.state();
                    all_asked &= state.was_asked;
                    wanted.extend(state.addresses.iter().flatten().map(|&address| (entry, url(address))));
                }
            }
        }
        let mut seen = HashSet::new();
        wanted.retain(|(_, url)| seen.insert(url.clone()));

        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.all_asked = all_asked;
        let mut before = std::mem::take(&mut members.envoys);
        let mut change = EnvoyChange::default();
        for (entry, url) in wanted {
            // An entry has a token and certificates of its own.
            let known = before.iter().position(|envoy| envoy.entry == entry && envoy.url == url);
            let envoy = known.map(|place| before.swap_remove(place)).unwrap_or_else(|| {
                let envoy = Arc::new(Envoy { number: members.next, url, entry, exchanges: Mutex::default() });
                members.next += 1;
                change.added.push(Arc::clone(&envoy));
                envoy
            });
            members.envoys.push(envoy);
        }
        change.removed = before;
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn envoys(entries: &str) -> Envoys {
        let text = format!("envoys: [{entries}]\npools: [{{cluster: a, replicas: [{{address: '10.0.0.1:1'}}]}}]");
        Envoys::new(&Config::parse(&text, "test").expect("a configuration").envoys)
    }

    fn found(envoys: &Envoys, entry: usize, last: &[u8]) -> EnvoyChange {
        envoys.found(entry, Some(last.iter().map(|&last| ([10, 0, 0, last], 9901).into()).collect()), None);
        envoys.reconcile()
    }

    fn urls(envoys: &Envoys) -> Vec<String> {
        envoys.all().iter().map(|envoy| envoy.url.to_string()).collect()
    }

    #[test]
    fn envoys_are_those_of_each_entry_in_the_configurations_order_and_each_once() {
        let envoys = envoys("{dns: {name: a, port: 9901}}, {url: 'http://10.0.0.9:9901'}, {dns: {name: b, port: 9901}, tls: {}}");
        assert_eq!(urls(&envoys), ["http://10.0.0.9:9901"], "what is named is there at once");
        assert!(!envoys.all_asked());
        found(&envoys, 2, &[2]);
        found(&envoys, 0, &[1, 9]);
        assert_eq!(urls(&envoys), ["http://10.0.0.1:9901", "http://10.0.0.9:9901", "https://10.0.0.2:9901"]);
        assert!(envoys.all_asked());
    }

    #[test]
    fn one_that_stays_is_the_same_and_one_that_comes_back_is_another() {
        let envoys = envoys("{dns: {name: a, port: 9901}}");
        found(&envoys, 0, &[1, 2]);
        let [first, second] = &envoys.all()[..] else { panic!("two") };
        let change = found(&envoys, 0, &[2, 3]);
        assert!(matches!(&change.removed[..], [gone] if Arc::ptr_eq(gone, first)));
        assert!(Arc::ptr_eq(&envoys.all()[0], second));
        let change = found(&envoys, 0, &[1, 2, 3]);
        assert!(change.removed.is_empty());
        assert!(change.added[0].url == first.url && change.added[0].number > 2, "{change:?}");
    }

    #[test]
    fn a_name_that_fails_keeps_its_envoys() {
        let envoys = envoys("{dns: {name: a, port: 9901}}");
        envoys.found(0, None, Some("NXDOMAIN".to_owned()));
        envoys.reconcile();
        assert!(envoys.all_asked() && urls(&envoys).is_empty());
        found(&envoys, 0, &[1]);
        envoys.found(0, None, Some("NXDOMAIN".to_owned()));
        assert!(envoys.reconcile().removed.is_empty());
        assert_eq!(urls(&envoys), ["http://10.0.0.1:9901"]);
        assert_eq!(envoys.sources().next().and_then(|source| source.state().problem.clone()).as_deref(), Some("NXDOMAIN"));
    }
}
