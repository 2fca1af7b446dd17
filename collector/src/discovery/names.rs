//! Names and their addresses, by the system's resolver: its search domains, its hosts file, A and AAAA.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};

use super::file_sd::Target;
use crate::config::AddressFamily;

/// How long a look-up may take: longer than the system's resolver waits for one server (5 s).
const TIMEOUT: Duration = Duration::from_secs(8);

/// Names that are looked up at once: a name that does not answer must not hold up those after it.
const AT_ONCE: usize = 16;

/// What looks names up.
pub trait Lookup: Send + Sync {
    /// Every address of a name.
    fn addresses(&self, name: &str) -> impl Future<Output = io::Result<Vec<IpAddr>>> + Send;
}

/// The system's resolver.
#[derive(Clone, Copy, Debug)]
pub struct System;

impl Lookup for System {
    async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let found = tokio::time::timeout(TIMEOUT, tokio::net::lookup_host((name, 0))).await;
        Ok(found.map_err(|_| io::Error::other("no answer"))??.map(|address| address.ip()).collect())
    }
}

/// Names and the addresses each had when it last had any.
pub(crate) struct Names<L> {
    lookup: L,
    family: AddressFamily,
    known: HashMap<String, Vec<IpAddr>>,
}

impl<L: Lookup> Names<L> {
    pub(crate) fn new(lookup: L, family: AddressFamily) -> Self {
        Self { lookup, family, known: HashMap::new() }
    }

    /// The addresses of `targets`, each once, and what is wrong with a name. A name that has no address now, whatever the reason,
    /// keeps those it had.
    pub(crate) async fn resolve(&mut self, targets: &[Target]) -> (Vec<SocketAddr>, Option<String>) {
        let names: BTreeSet<&String> = targets.iter().filter_map(Target::name).collect();
        let lookup = &self.lookup;
        let lookups: Vec<_> = names.into_iter().map(|name| async move { (name, lookup.addresses(name).await) }).collect();
        let found: Vec<_> = stream::iter(lookups).buffer_unordered(AT_ONCE).collect().await;
        let mut problems = BTreeMap::new();
        let mut resolved = HashMap::new();
        for (name, found) in found {
            let mut addresses = match found {
                Ok(addresses) => self.family.select(addresses),
                Err(error) => {
                    problems.insert(name, error.to_string());
                    Vec::new()
                }
            };
            // A server may give them in another order every time.
            addresses.sort_unstable();
            addresses.dedup();
            if addresses.is_empty() {
                problems.entry(name).or_insert_with(|| "it has no address of the family asked for".to_owned());
                addresses = self.known.remove(name).unwrap_or_default();
            }
            resolved.insert(name.clone(), addresses);
        }
        self.known = resolved;
        (self.expand(targets), describe(&problems))
    }

    fn expand(&self, targets: &[Target]) -> Vec<SocketAddr> {
        let mut seen = std::collections::HashSet::new();
        let mut addresses = Vec::new();
        for target in targets {
            match target {
                Target::Address(address) => addresses.push(*address),
                Target::Name { name, port } => {
                    addresses.extend(self.known.get(name).into_iter().flatten().map(|ip| SocketAddr::new(*ip, *port)));
                }
            }
        }
        addresses.retain(|address| seen.insert(*address));
        addresses
    }
}

/// The first problems, since a DNS server that is away gives every name one.
fn describe(problems: &BTreeMap<&String, String>) -> Option<String> {
    let (name, why) = problems.first_key_value()?;
    let others = match problems.len() - 1 {
        0 => String::new(),
        others => format!(", and {others} more names"),
    };
    Some(format!("{name} cannot be looked up ({why}){others}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// What it answers next.
    struct Scripted(Mutex<HashMap<String, Vec<&'static str>>>);

    impl Lookup for &Scripted {
        async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
            let known = self.0.lock().expect("a lock");
            let addresses = known.get(name).ok_or_else(|| io::Error::other("NXDOMAIN"))?;
            Ok(addresses.iter().map(|text| text.parse().expect("an address")).collect())
        }
    }

    impl Scripted {
        fn new(name: &str, addresses: &[&'static str]) -> Self {
            Self(Mutex::new(HashMap::from([(name.to_owned(), addresses.to_vec())])))
        }

        fn set(&self, name: &str, addresses: Option<&[&'static str]>) {
            let mut known = self.0.lock().expect("a lock");
            match addresses {
                Some(addresses) => known.insert(name.to_owned(), addresses.to_vec()),
                None => known.remove(name),
            };
        }
    }

    fn name(name: &str) -> Target {
        Target::Name { name: name.to_owned(), port: 80 }
    }

    fn texts(addresses: &[SocketAddr]) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn a_change_is_seen_and_the_order_of_an_answer_means_nothing() {
        let dns = Scripted::new("gpu", &["10.0.0.2", "10.0.0.1"]);
        let mut names = Names::new(&dns, AddressFamily::Auto);
        assert_eq!(texts(&names.resolve(&[name("gpu")]).await.0), ["10.0.0.1:80", "10.0.0.2:80"]);
        dns.set("gpu", Some(&["10.0.0.1", "10.0.0.3", "10.0.0.1"]));
        assert_eq!(texts(&names.resolve(&[name("gpu")]).await.0), ["10.0.0.1:80", "10.0.0.3:80"]);
    }

    #[tokio::test]
    async fn a_negative_answer_keeps_the_last_addresses_and_is_told() {
        let dns = Scripted::new("gpu", &["10.0.0.1"]);
        let mut names = Names::new(&dns, AddressFamily::Auto);
        assert_eq!(names.resolve(&[name("gpu")]).await.1, None);
        for gone in [None, Some([].as_slice())] {
            dns.set("gpu", gone);
            let (addresses, problem) = names.resolve(&[name("gpu")]).await;
            assert_eq!(texts(&addresses), ["10.0.0.1:80"]);
            assert!(problem.is_some_and(|problem| problem.contains("gpu cannot be looked up")));
        }
        dns.set("gpu", Some(&["10.0.0.2"]));
        let (addresses, problem) = names.resolve(&[name("gpu")]).await;
        assert_eq!((texts(&addresses), problem), (vec!["10.0.0.2:80".to_owned()], None));
    }

    #[tokio::test]
    async fn one_name_without_an_address_hides_no_other() {
        let dns = Scripted::new("gpu", &["10.0.0.1"]);
        let mut names = Names::new(&dns, AddressFamily::Auto);
        let targets = [name("none"), name("gpu"), Target::Address("10.0.0.9:80".parse().expect("an address"))];
        let (addresses, problem) = names.resolve(&targets).await;
        assert_eq!(texts(&addresses), ["10.0.0.1:80", "10.0.0.9:80"]);
        assert!(problem.is_some_and(|problem| problem.contains("none cannot be looked up (NXDOMAIN)")));
    }

    /// It answers after 8 seconds, and counts who waits.
    #[derive(Default)]
    struct Slow {
        waiting: AtomicUsize,
        most: AtomicUsize,
    }

    impl Lookup for &Slow {
        async fn addresses(&self, _: &str) -> io::Result<Vec<IpAddr>> {
            self.most.fetch_max(self.waiting.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(TIMEOUT).await;
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            Err(io::Error::other("no answer"))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn names_are_looked_up_together_and_not_all_at_once() {
        let slow = Slow::default();
        let started = tokio::time::Instant::now();
        let targets: Vec<_> = (0..2 * AT_ONCE).map(|n| name(&format!("gpu-{n}"))).collect();
        let (_, problem) = Names::new(&slow, AddressFamily::Auto).resolve(&targets).await;
        assert!(problem.is_some_and(|problem| problem.contains("and 31 more names")));
        assert_eq!((started.elapsed(), slow.most.into_inner()), (2 * TIMEOUT, AT_ONCE));
    }

    #[tokio::test]
    async fn families_count_as_in_envoy() {
        let dns = Scripted::new("both", &["10.0.0.1", "fd00::1"]);
        dns.set("four", Some(&["10.0.0.4"]));
        let cases = [
            (AddressFamily::Auto, vec!["[fd00::1]:80", "10.0.0.4:80"]),
            (AddressFamily::V4Only, vec!["10.0.0.1:80", "10.0.0.4:80"]),
            (AddressFamily::V6Only, vec!["[fd00::1]:80"]),
            (AddressFamily::V4Preferred, vec!["10.0.0.1:80", "10.0.0.4:80"]),
            (AddressFamily::All, vec!["10.0.0.1:80", "[fd00::1]:80", "10.0.0.4:80"]),
        ];
        for (family, expected) in cases {
            let (addresses, _) = Names::new(&dns, family).resolve(&[name("both"), name("four")]).await;
            assert_eq!(texts(&addresses), expected, "{family:?}");
        }
    }
}
