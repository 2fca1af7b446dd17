//! What a replica is and how it is named.

use core::fmt;
use core::hash::Hasher;
use core::net::SocketAddr;
use core::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use siphasher::sip::SipHasher24;

/// One engine with a KV cache of its own: an endpoint, or one data-parallel rank behind it.
///
/// Written `ip:port` or `ip:port#rank`, the form clients, statistics and the console use. The rank is the *local* index that
/// vLLM accepts in `x-data-parallel-rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaName {
    /// Where the engine's HTTP server listens. Envoy matches it as text, so it is always an IP address.
    pub address: SocketAddr,
    /// The data-parallel rank behind the address, if it has several.
    pub rank: Option<u16>,
}

impl ReplicaName {
    /// A replica that is a whole endpoint.
    pub fn endpoint(address: SocketAddr) -> Self {
        Self { address, rank: None }
    }

    /// The replica's stable identity, the same on every Envoy and after every change of the list.
    pub fn id(&self) -> ReplicaId {
        let mut hasher = SipHasher24::new();
        match self.address.ip() {
            core::net::IpAddr::V4(ip) => hasher.write(&ip.octets()),
            core::net::IpAddr::V6(ip) => hasher.write(&ip.octets()),
        }
        hasher.write(&self.address.port().to_le_bytes());
        if let Some(rank) = self.rank {
            hasher.write(&rank.to_le_bytes());
        }
        // 0 stands for "no replica" in stored entries.
        ReplicaId(hasher.finish().max(1))
    }
}

impl fmt::Display for ReplicaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            None => write!(f, "{}", self.address),
            Some(rank) => write!(f, "{}#{rank}", self.address),
        }
    }
}

/// Why a text names no replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidReplicaName(String);

impl fmt::Display for InvalidReplicaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a replica: write ip:port, [ipv6]:port or ip:port#rank", self.0)
    }
}

impl core::error::Error for InvalidReplicaName {}

impl FromStr for ReplicaName {
    type Err = InvalidReplicaName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidReplicaName(text.chars().take(80).collect());
        let (address, rank) = match text.split_once('#') {
            None => (text, None),
            Some((address, rank)) => (address, Some(rank.parse().map_err(|_| invalid())?)),
        };
        Ok(Self { address: address.parse().map_err(|_| invalid())?, rank })
    }
}

impl Serialize for ReplicaName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ReplicaName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A replica's stable identity: a hash of its address and rank, never an index, since lists change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(pub u64);

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_a_name_that_reads_back_or_refused_with_what_is_allowed(text in mutated(seeds("replicas"))) {
            match text.text().parse::<ReplicaName>() {
                Ok(name) => {
                    prop_assert_eq!(name.to_string().parse(), Ok(name));
                    prop_assert_ne!(name.id(), ReplicaId(0));
                }
                Err(error) => {
                    let said = error.to_string();
                    prop_assert!(said.contains("ip:port") && said.chars().count() < 200, "{}", said);
                }
            }
        }
    }

    #[test]
    fn a_name_reads_back_as_it_is_written() {
        for text in ["10.0.0.1:8000", "10.0.0.1:8000#3", "[::1]:8000", "[fd00::1]:80#0"] {
            let name: ReplicaName = text.parse().expect("a valid name");
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn other_text_is_refused_with_a_reason() {
        for text in ["", "host:8000", "10.0.0.1", "10.0.0.1:99999", "10.0.0.1:80#x", "10.0.0.1:80#-1", "10.0.0.1:80,10.0.0.2:80"] {
            let error = text.parse::<ReplicaName>().expect_err("an invalid name");
            assert!(error.to_string().contains("ip:port"), "{error}");
        }
    }

    #[test]
    fn ids_are_frozen_since_they_are_stored_and_shared() {
        let id = |text: &str| text.parse::<ReplicaName>().expect("a valid name").id().0;
        assert_eq!(id("10.0.0.1:8000"), 6_214_642_757_272_401_151);
        assert_ne!(id("10.0.0.1:8000"), id("10.0.0.1:8000#0"));
        assert_ne!(id("10.0.0.1:8000#0"), id("10.0.0.1:8000#1"));
    }
}
