//! What stands in the configuration file, and the checks that turn it into a [`Config`].

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use homing_routing::sync::MAX_REPLICAS;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_saphyr::Spanned;

use super::affinity::RawAffinity;
use super::discovery::{Leads, RawDns, check_files};
use super::{Config, ControlUrl, EndpointConfig, EnvoyConfig, EnvoyPlace, PoolConfig, ScrapeConfig, TlsConfig, TokenSource};
use crate::vllm::MAX_ENGINES;

/// As many as a server whose ranks are on several nodes may well have.
const DEFAULT_MAX_RANKS: u32 = 64;

/// The configuration of homing-collector.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "homing-collector")]
pub(super) struct RawConfig {
    /// Where the console, its API and the metrics listen, ip:port.
    #[serde(default = "default_listen", deserialize_with = "address")]
    #[schemars(with = "String")]
    listen: SocketAddr,
    /// Who may change something by the API. Without it the API only reads.
    #[schemars(with = "Option<RawApi>")]
    api: Option<Spanned<RawApi>>,
    /// A file with a YAML list of replicas to drain, as ip:port or ip:port#rank; read again when it changes.
    drain_file: Option<PathBuf>,
    /// Names to open the console under, besides `localhost` and IP addresses.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    allowed_hosts: Vec<Spanned<String>>,
    /// How replicas are polled.
    #[serde(default)]
    scrape: ScrapeConfig,
    /// Where the homes of conversations are kept, besides in memory.
    affinity: Option<RawAffinity>,
    /// The Envoys that get the snapshots.
    #[serde(default)]
    #[schemars(with = "Vec<RawEnvoy>")]
    envoys: Vec<Spanned<RawEnvoy>>,
    /// The pools, at least one.
    #[schemars(with = "Vec<RawPool>", length(min = 1))]
    pools: Spanned<Vec<RawPool>>,
}

/// The token that callers of the API must show to change something: `token` or `token_file`, not both.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Api")]
struct RawApi {
    /// The token itself.
    #[schemars(with = "Option<String>")]
    token: Option<Spanned<String>>,
    /// A file that holds it; read again at every call.
    token_file: Option<PathBuf>,
}

/// One Envoy that runs the filter, or all that a name leads to: either `url` or `dns` is needed.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Envoy", extend("oneOf" = [{ "required": ["url"] }, { "required": ["dns"] }]))]
struct RawEnvoy {
    /// Its control listener, `http://ip:port`, `https://ip:port` or `unix:/path/to.sock`.
    #[schemars(with = "Option<String>")]
    url: Option<Spanned<ControlUrl>>,
    /// A name, such as a headless service's, of which every address is an Envoy's control listener.
    #[schemars(with = "Option<RawDns>")]
    dns: Option<Spanned<RawDns>>,
    /// The control listener's bearer token.
    #[schemars(with = "Option<String>")]
    token: Option<Spanned<String>>,
    /// A file that holds the token; read again when the listener refuses it.
    token_file: Option<PathBuf>,
    /// How it is reached over TLS; `url` must say https, and what `dns` finds is then reached over https.
    #[schemars(with = "Option<TlsConfig>")]
    tls: Option<Spanned<TlsConfig>>,
}

/// The replicas behind one Envoy cluster. At least one of `replicas`, `dns` and `files` is needed.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Pool", extend("anyOf" = [{ "required": ["replicas"] }, { "required": ["dns"] }, { "required": ["files"] }]))]
struct RawPool {
    /// The Envoy cluster's name, 1 to 256 bytes.
    #[schemars(with = "String", length(min = 1, max = 256))]
    cluster: Spanned<String>,
    /// vLLM's `--max-num-seqs`, which it reports nowhere.
    #[schemars(with = "Option<u32>", range(min = 1, max = 65_536))]
    max_num_seqs: Option<Spanned<u32>>,
    /// The most data-parallel ranks behind one endpoint; engines that it reports beyond them are no replicas.
    #[schemars(with = "Option<u32>", range(min = 1, max = 256), extend("default" = DEFAULT_MAX_RANKS))]
    max_ranks: Option<Spanned<u32>>,
    /// The bearer token that replicas ask for at `/metrics`.
    #[schemars(with = "Option<String>")]
    token: Option<Spanned<String>>,
    /// A file that holds the token; read again when a replica refuses it.
    token_file: Option<PathBuf>,
    /// Polls over HTTPS, with these settings.
    #[schemars(with = "Option<TlsConfig>")]
    tls: Option<Spanned<TlsConfig>>,
    /// Endpoints that do not change.
    #[schemars(with = "Option<Vec<RawEndpoint>>")]
    replicas: Option<Spanned<Vec<RawEndpoint>>>,
    /// Names whose addresses are endpoints, looked up again and again.
    #[serde(default)]
    dns: Vec<RawDns>,
    /// Files with endpoints in the format of Prometheus' `file_sd`, JSON or YAML; read again when they change.
    #[serde(default)]
    #[schemars(with = "Vec<PathBuf>")]
    files: Vec<Spanned<PathBuf>>,
}

/// One endpoint; data-parallel ranks behind it are found in its metrics.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Endpoint")]
struct RawEndpoint {
    /// Where vLLM listens, ip:port.
    #[schemars(with = "String")]
    address: Spanned<Address>,
    /// What is in flight finishes, nothing new arrives.
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

pub(super) fn require<T>(
    holds: bool,
    at: &Spanned<T>,
    key: impl FnOnce() -> String,
    message: impl FnOnce() -> String,
) -> Result<(), Fault> {
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
        let mut places = HashSet::new();
        let mut envoys = Vec::new();
        for (index, envoy) in self.envoys.into_iter().enumerate() {
            envoys.push(check_envoy(envoy, index, &mut places)?);
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
        let api = match self.api {
            None => None,
            Some(api) => {
                let key = |name: &str| format!("api.{name}");
                let given = api.value.token.is_some() || api.value.token_file.is_some();
                require(
                    given,
                    &api,
                    || "api".to_owned(),
                    || "set `token` or `token_file`; without `api` the API only reads".to_owned(),
                )?;
                token(api.value.token, api.value.token_file, key)?
            }
        };
        let affinity = self.affinity.map(RawAffinity::check).transpose()?;
        Ok(Config {
            listen: self.listen,
            allowed_hosts,
            api,
            drain_file: self.drain_file,
            scrape: self.scrape,
            affinity,
            envoys,
            pools,
        })
    }
}

/// Checks an entry of `envoys`; `places` are those that entries before it name.
fn check_envoy(envoy: Spanned<RawEnvoy>, index: usize, places: &mut HashSet<String>) -> Result<EnvoyConfig, Fault> {
    let key = |name: &str| format!("envoys[{index}].{name}");
    let once = || "an Envoy may be named only once; remove this entry".to_owned();
    let neither = Fault { at: envoy.referenced, key: format!("envoys[{index}]"), message: "give `url` or `dns`".to_owned() };
    let RawEnvoy { url, dns, token: inline, token_file, tls } = envoy.value;
    let token = token(inline, token_file, key)?;
    let tls = checked_tls(tls, || key("tls"))?;
    let place = match (url, dns) {
        (Some(url), None) => {
            require(places.insert(url.value.to_string()), &url, || key("url"), once)?;
            let is_https = matches!(url.value, ControlUrl::Tls(_));
            require(tls.is_none() || is_https, &url, || key("url"), || "`tls` is set: write https://ip:port".to_owned())?;
            EnvoyPlace::Url(url.value)
        }
        (url, Some(Spanned { value, referenced, .. })) => {
            let fault = |message: String| Fault { at: referenced, key: key("dns"), message };
            if url.is_some() {
                return Err(fault("give `url` or `dns`, not both".to_owned()));
            }
            let dns = value.check(&key("dns"), Leads::ToEnvoys)?;
            if !places.insert(dns.to_string()) {
                return Err(fault(once()));
            }
            EnvoyPlace::Dns(dns)
        }
        (None, None) => return Err(neither),
    };
    Ok(EnvoyConfig { place, token, tls })
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
        let key = |name: &str| format!("pools[{index}].{name}");
        if let Some(ranks) = &self.max_ranks {
            let allowed = (1..=MAX_ENGINES).contains(&(ranks.value as usize));
            let message = || format!("{} is not from 1 to {MAX_ENGINES}; give vLLM's --data-parallel-size", ranks.value);
            require(allowed, ranks, || key("max_ranks"), message)?;
        }
        let has_sources = !self.dns.is_empty() || !self.files.is_empty();
        let missing = || "no replicas: give `replicas`, `dns` or `files`".to_owned();
        require(self.replicas.is_some() || has_sources, &self.cluster, || format!("pools[{index}]"), missing)?;
        let replicas = self.replicas.map(|replicas| check_replicas(replicas, index, has_sources)).transpose()?;
        Ok(PoolConfig {
            cluster: self.cluster.value,
            max_num_seqs: self.max_num_seqs.map(|seqs| seqs.value),
            max_ranks: self.max_ranks.map_or(DEFAULT_MAX_RANKS, |ranks| ranks.value),
            token: token(self.token, self.token_file, key)?,
            tls: checked_tls(self.tls, || key("tls"))?,
            replicas: replicas.unwrap_or_default(),
            dns: self
                .dns
                .into_iter()
                .enumerate()
                .map(|(at, dns)| dns.check(&format!("pools[{index}].dns[{at}]"), Leads::ToReplicas))
                .collect::<Result<_, _>>()?,
            files: check_files(self.files, index)?,
        })
    }
}

fn check_replicas(replicas: Spanned<Vec<RawEndpoint>>, index: usize, has_sources: bool) -> Result<Vec<EndpointConfig>, Fault> {
    let count = replicas.value.len();
    require(
        count <= MAX_REPLICAS && (count > 0 || has_sources),
        &replicas,
        || format!("pools[{index}].replicas"),
        || format!("{count} replicas; 1 to {MAX_REPLICAS} are allowed"),
    )?;
    let mut addresses = HashSet::new();
    let mut checked = Vec::new();
    for (at, replica) in replicas.value.into_iter().enumerate() {
        let Address(address) = replica.address.value;
        let key = || format!("pools[{index}].replicas[{at}].address");
        require(address.port() != 0, &replica.address, key, || "port 0 is no place; give the port vLLM listens on".to_owned())?;
        require(addresses.insert(address), &replica.address, key, || {
            format!("{address} is named twice in this pool; one entry an endpoint, its ranks are found in its metrics")
        })?;
        checked.push(EndpointConfig { address, drain: replica.drain });
    }
    Ok(checked)
}

/// TLS settings that belong together.
fn checked_tls(tls: Option<Spanned<TlsConfig>>, key: impl Fn() -> String) -> Result<Option<TlsConfig>, Fault> {
    let Some(tls) = tls else { return Ok(None) };
    let pair = tls.value.cert_file.is_some() == tls.value.key_file.is_some();
    require(pair, &tls, key, || "set both `cert_file` and `key_file`, or neither".to_owned())?;
    Ok(Some(tls.value))
}

/// A token that is given in one of the two ways, or in none.
fn token(
    inline: Option<Spanned<String>>,
    file: Option<PathBuf>,
    key: impl Fn(&str) -> String,
) -> Result<Option<TokenSource>, Fault> {
    let Some(token) = inline else { return Ok(file.map(TokenSource::File)) };
    let source = TokenSource::Inline(token.value.clone());
    require(file.is_none(), &token, || key("token"), || "set `token` or `token_file`, not both".to_owned())?;
    let read = source.read();
    require(read.is_ok(), &token, || key("token"), || read.clone().err().unwrap_or_default())?;
    Ok(Some(source))
}

// === values ===

fn default_listen() -> SocketAddr {
    (IpAddr::V4(Ipv4Addr::LOCALHOST), 9900).into()
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        serde::de::Error::custom(format!(
            "`{text}` is not an address: write ip:port or [ipv6]:port; names are not resolved here; give `dns` for a name"
        ))
    })
}

pub(super) fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration(deserializer, Duration::from_millis(50), Duration::from_secs(10))
}

pub(super) fn timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration(deserializer, Duration::from_millis(50), Duration::from_secs(30))
}

pub(super) fn refresh<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    duration(deserializer, Duration::from_secs(1), Duration::from_secs(3600))
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
