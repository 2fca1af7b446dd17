//! The parts of the configuration that say where endpoints and Envoys are found.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_saphyr::Spanned;

use super::file::{self, Fault, require};

/// The time between two look-ups of a name unless it is configured.
pub(crate) const DEFAULT_REFRESH: Duration = Duration::from_secs(5);

/// A name whose addresses are endpoints or control listeners.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DnsConfig {
    /// The name, as the system's resolver takes it: its search domains and hosts file count.
    pub name: String,
    /// The port at each address: vLLM's, or the control listener's.
    pub port: u16,
    /// Which of its addresses count.
    pub family: AddressFamily,
    /// The time between two look-ups.
    #[serde(serialize_with = "super::as_text")]
    pub refresh: Duration,
}

/// Which addresses of a name count, with the names and meanings of Envoy's `dns_lookup_family`, since the Envoy cluster must come
/// to the same addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AddressFamily {
    /// IPv6 if there is any, else IPv4.
    #[default]
    Auto,
    /// IPv4.
    V4Only,
    /// IPv6.
    V6Only,
    /// IPv4 if there is any, else IPv6.
    V4Preferred,
    /// Both: a server that listens on both is then two replicas.
    All,
}

/// A name whose addresses are endpoints, or Envoys' control listeners.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Dns")]
pub(super) struct RawDns {
    /// The name, such as a headless service's; the system's search domains and hosts file count.
    #[schemars(with = "String", length(min = 1, max = 253))]
    name: Spanned<String>,
    /// The port at each address: the one vLLM listens on, or the control listener's.
    #[schemars(with = "u16", range(min = 1))]
    port: Spanned<u16>,
    /// Which of its addresses count; for replicas give the Envoy cluster's `dns_lookup_family`.
    #[serde(default)]
    family: AddressFamily,
    /// The time between two look-ups, 1s to 1h.
    #[serde(default = "default_refresh", deserialize_with = "file::refresh", serialize_with = "super::as_text")]
    #[schemars(with = "String")]
    refresh: Duration,
}

/// What a name leads to.
#[derive(Clone, Copy)]
pub(super) enum Leads {
    ToReplicas,
    ToEnvoys,
}

// === impl RawDns ===

impl RawDns {
    pub(super) fn check(self, key: &str, leads: Leads) -> Result<DnsConfig, Fault> {
        let (instead, whose_port) = match leads {
            Leads::ToReplicas => ("`replicas`", "port vLLM listens on"),
            Leads::ToEnvoys => ("`url`", "control listener's port"),
        };
        let name = &self.name.value;
        let key_of = |part: &str| format!("{key}.{part}");
        let is_address = name.parse::<IpAddr>().is_ok();
        require(!is_address, &self.name, || key_of("name"), || format!("{name} is an address; give it under {instead}"))?;
        let message =
            || "a host name is needed, 1 to 253 letters, digits, dots, hyphens and underscores, without a port".to_owned();
        require(is_host_name(name), &self.name, || key_of("name"), message)?;
        require(self.port.value != 0, &self.port, || key_of("port"), || format!("give the {whose_port}, 1 to 65535"))?;
        Ok(DnsConfig { name: self.name.value, port: self.port.value, family: self.family, refresh: self.refresh })
    }
}

/// Whether `text` can be the name of a host.
pub(crate) fn is_host_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    (1..=253).contains(&text.len()) && text.bytes().all(allowed) && text.bytes().any(|byte| byte.is_ascii_alphanumeric())
}

pub(super) fn check_files(files: Vec<Spanned<PathBuf>>, pool: usize) -> Result<Vec<PathBuf>, Fault> {
    let mut named = HashSet::new();
    for (at, file) in files.iter().enumerate() {
        let key = || format!("pools[{pool}].files[{at}]");
        let path = &file.value;
        require(named.insert(path.clone()), file, key, || "a file may be named only once in a pool; remove this entry".to_owned())?;
    }
    Ok(files.into_iter().map(|file| file.value).collect())
}

fn default_refresh() -> Duration {
    DEFAULT_REFRESH
}

// === impl DnsConfig ===

impl DnsConfig {
    pub(super) fn summary(&self) -> String {
        format!("the addresses of {self}, every {}", humantime::format_duration(self.refresh))
    }
}

/// `name:port`
impl fmt::Display for DnsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.port)
    }
}

// === impl AddressFamily ===

impl AddressFamily {
    /// Those of `addresses` that count.
    pub fn select(self, addresses: impl IntoIterator<Item = IpAddr>) -> Vec<IpAddr> {
        let (v4, v6): (Vec<_>, Vec<_>) = addresses.into_iter().partition(IpAddr::is_ipv4);
        let or = |first: Vec<IpAddr>, second: Vec<IpAddr>| if first.is_empty() { second } else { first };
        match self {
            Self::Auto => or(v6, v4),
            Self::V4Only => v4,
            Self::V6Only => v6,
            Self::V4Preferred => or(v4, v6),
            Self::All => v4.into_iter().chain(v6).collect(),
        }
    }
}
