//! What stands in the configuration file, and the checks that turn it into a [`Config`].

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use homing_routing::sync::MAX_REPLICAS;
use serde::{Deserialize, Deserializer};
use serde_saphyr::Spanned;

use super::{Config, ControlUrl, EndpointConfig, EnvoyConfig, PoolConfig, ScrapeConfig, TokenSource};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawConfig {
    #[serde(default = "default_listen", deserialize_with = "address")]
    listen: SocketAddr,
    #[serde(default)]
    allowed_hosts: Vec<Spanned<String>>,
    #[serde(default)]
    scrape: ScrapeConfig,
    #[serde(default)]
    envoys: Vec<RawEnvoy>,
    pools: Spanned<Vec<RawPool>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEnvoy {
    url: Spanned<ControlUrl>,
    token: Option<Spanned<String>>,
    token_file: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPool {
    cluster: Spanned<String>,
    max_num_seqs: Option<Spanned<u32>>,
    replicas: Spanned<Vec<RawEndpoint>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEndpoint {
    address: Spanned<Address>,
    #[serde(default)]
    drain: bool,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Address(#[serde(deserialize_with = "address")] SocketAddr);

/// A mistake that only shows when values are compared.
pub(super) struct Fault {
    pub(super) at: serde_saphyr::Location,
    pub(super) key: String,
    pub(super) message: String,
}

fn require<T>(holds: bool, at: &Spanned<T>, key: impl FnOnce() -> String, message: impl FnOnce() -> String) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(Fault { at: at.referenced, key: key(), message: message() }) }
}

impl RawConfig {
    pub(super) fn check(self) -> Result<Config, Fault> {
        let mut allowed_hosts = Vec::new();
        for (index, host) in self.allowed_hosts.into_iter().enumerate() {
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            let valid = !host.value.is_empty() && host.value.chars().all(is_name);
            let key = || format!("allowed_hosts[{index}]");
            require(valid, &host, key, || "a host name is needed, without scheme and port".to_owned())?;
            allowed_hosts.push(host.value.to_ascii_lowercase());
        }
        let mut urls = HashSet::new();
        let mut envoys = Vec::new();
        for (index, envoy) in self.envoys.into_iter().enumerate() {
            let key = |name: &str| format!("envoys[{index}].{name}");
            require(
                urls.insert(envoy.url.value.clone()),
                &envoy.url,
                || key("url"),
                || "an Envoy may be named only once; remove this entry".to_owned(),
            )?;
            let token = match (envoy.token, envoy.token_file) {
                (None, None) => None,
                (None, Some(path)) => Some(TokenSource::File(path)),
                (Some(token), path) => {
                    let source = TokenSource::Inline(token.value.clone());
                    require(path.is_none(), &token, || key("token"), || "set `token` or `token_file`, not both".to_owned())?;
                    let read = source.read();
                    require(read.is_ok(), &token, || key("token"), || read.clone().err().unwrap_or_default())?;
                    Some(source)
                }
            };
            envoys.push(EnvoyConfig { url: envoy.url.value, token });
        }
        let named = !self.pools.value.is_empty();
        require(named, &self.pools, || "pools".to_owned(), || "at least one pool is needed".to_owned())?;
        let mut clusters = HashSet::new();
        let mut pools = Vec::new();
        for (index, pool) in self.pools.value.into_iter().enumerate() {
            let new = clusters.insert(pool.cluster.value.clone());
            let key = || format!("pools[{index}].cluster");
            require(new, &pool.cluster, key, || format!("`{}` is named twice; a cluster is one pool", pool.cluster.value))?;
            pools.push(pool.check(index)?);
        }
        Ok(Config { listen: self.listen, allowed_hosts, scrape: self.scrape, envoys, pools })
    }
}

impl RawPool {
    fn check(self, index: usize) -> Result<PoolConfig, Fault> {
        let name = &self.cluster.value;
        require(
            !name.is_empty() && name.len() <= 256,
            &self.cluster,
            || format!("pools[{index}].cluster"),
            || "the name of an Envoy cluster is needed, 1 to 256 bytes".to_owned(),
        )?;
        if let Some(seqs) = &self.max_num_seqs {
            let allowed = (1..=65_536).contains(&seqs.value);
            require(
                allowed,
                seqs,
                || format!("pools[{index}].max_num_seqs"),
                || format!("{} is not from 1 to 65536; give vLLM's --max-num-seqs", seqs.value),
            )?;
        }
        let count = self.replicas.value.len();
        require(
            (1..=MAX_REPLICAS).contains(&count),
            &self.replicas,
            || format!("pools[{index}].replicas"),
            || format!("{count} replicas; 1 to {MAX_REPLICAS} are allowed"),
        )?;
        let mut addresses = HashSet::new();
        let mut replicas = Vec::new();
        for (at, replica) in self.replicas.value.into_iter().enumerate() {
            let Address(address) = replica.address.value;
            let key = || format!("pools[{index}].replicas[{at}].address");
            require(address.port() != 0, &replica.address, key, || "port 0 is no place; give the port vLLM listens on".to_owned())?;
            require(addresses.insert(address), &replica.address, key, || {
                format!("{address} is named twice in this pool; one entry an endpoint, its ranks are found in its metrics")
            })?;
            replicas.push(EndpointConfig { address, drain: replica.drain });
        }
        Ok(PoolConfig { cluster: self.cluster.value, max_num_seqs: self.max_num_seqs.map(|seqs| seqs.value), replicas })
    }
}

// === values ===

fn default_listen() -> SocketAddr {
    (IpAddr::V4(Ipv4Addr::LOCALHOST), 9900).into()
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        serde::de::Error::custom(format!("`{text}` is not an address: write ip:port or [ipv6]:port; names are not resolved"))
    })
}

pub(super) fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration(deserializer, Duration::from_millis(50), Duration::from_secs(10))
}

pub(super) fn timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration(deserializer, Duration::from_millis(50), Duration::from_secs(30))
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D, least: Duration, most: Duration) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    match humantime::parse_duration(&text) {
        Ok(duration) if (least..=most).contains(&duration) => Ok(duration),
        _ => Err(serde::de::Error::custom(format!(
            "`{text}` is not a duration from {} to {}; write it with its unit, such as 250ms or 1s",
            humantime::format_duration(least),
            humantime::format_duration(most)
        ))),
    }
}
