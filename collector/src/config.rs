//! The collector's configuration file: YAML, checked as a whole before anything starts.
//!
//! Every mistake is reported with its place (`file:line:column`), the key it belongs to (`pools[0].replicas[1].address`) and what
//! is allowed there.

mod affinity;
mod control_url;
mod discovery;
mod file;
mod token;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::affinity::AffinityConfig;
pub use self::control_url::ControlUrl;
pub use self::discovery::{AddressFamily, DnsConfig};
pub(crate) use self::discovery::{DEFAULT_REFRESH, is_host_name};
use self::file::RawConfig;
pub use self::token::TokenSource;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// Where the collector's own HTTP server listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The token that lets a caller of the API change something; without it the API only reads.
    pub api: Option<TokenSource>,
    /// A file that lists replicas to drain.
    pub drain_file: Option<PathBuf>,
    /// Names under which browsers may reach it, besides `localhost` and IP addresses; lower case, without a port.
    pub allowed_hosts: Vec<String>,
    /// How replicas are polled.
    pub scrape: ScrapeConfig,
    /// Where the homes of conversations are kept besides in memory.
    pub affinity: Option<AffinityConfig>,
    /// The Envoys that get the snapshots, and where to find more; may be empty.
    pub envoys: Vec<EnvoyConfig>,
    /// The pools, each with at least one replica or a way to find some.
    pub pools: Vec<PoolConfig>,
}

/// How replicas are polled. Snapshots are pushed at the same interval.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScrapeConfig {
    /// The time between two polls of an endpoint, 50ms to 10s.
    #[schemars(with = "String")]
    #[serde(deserialize_with = "file::interval", serialize_with = "as_text")]
    pub interval: Duration,
    /// How long one poll may take, from connecting to the last byte, 50ms to 30s.
    #[schemars(with = "String")]
    #[serde(deserialize_with = "file::timeout", serialize_with = "as_text")]
    pub timeout: Duration,
}

impl Default for ScrapeConfig {
    fn default() -> Self {
        Self { interval: Duration::from_millis(250), timeout: Duration::from_secs(1) }
    }
}

/// One Envoy that runs the filter, or all that a name leads to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvoyConfig {
    /// Where the control listener is.
    #[serde(flatten)]
    pub place: EnvoyPlace,
    /// What it asks for as `Authorization: Bearer`, if it asks.
    pub token: Option<TokenSource>,
    /// How it is reached over TLS, where its URL says https; a name's are reached over TLS if this is set.
    pub tls: Option<TlsConfig>,
}

/// Where control listeners are; as JSON `{"url": ...}` or `{"dns": ...}`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvoyPlace {
    /// One at a place that does not change.
    Url(ControlUrl),
    /// One at every address of a name.
    Dns(DnsConfig),
}

/// One pool: the replicas behind one Envoy cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolConfig {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// The most sequences each engine runs at once, since vLLM reports it nowhere.
    pub max_num_seqs: Option<u32>,
    /// The most engines of one endpoint that are replicas.
    pub max_ranks: u32,
    /// What its endpoints ask for as `Authorization: Bearer`, if they ask.
    pub token: Option<TokenSource>,
    /// How its endpoints are reached over TLS; without it they are reached over plain HTTP.
    pub tls: Option<TlsConfig>,
    /// Endpoints named here.
    pub replicas: Vec<EndpointConfig>,
    /// Names whose addresses are endpoints.
    pub dns: Vec<DnsConfig>,
    /// Files that list endpoints, in the format of Prometheus' `file_sd`.
    pub files: Vec<PathBuf>,
}

/// How endpoints or an Envoy are reached over TLS.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// The certificates, PEM, that theirs must come from; the system's if there is none.
    pub ca_file: Option<PathBuf>,
    /// The name that their certificates must have, instead of the address.
    pub server_name: Option<String>,
    /// The certificate, PEM, that the collector shows; needs `key_file`.
    pub cert_file: Option<PathBuf>,
    /// Its private key, PEM; needs `cert_file`.
    pub key_file: Option<PathBuf>,
    /// Accepts any certificate: whoever can answer at the address can then claim anything.
    #[serde(default)]
    pub insecure: bool,
}

/// One endpoint; the ranks behind it are found in its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EndpointConfig {
    /// Where its HTTP server listens.
    pub address: SocketAddr,
    /// Whether it takes no new turns.
    pub drain: bool,
}

/// What is wrong with a configuration file, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}{place}: {message}", place = self.place())]
pub struct ConfigError {
    /// The file as it was named.
    pub file: String,
    /// Line and column, both from 1.
    pub line_column: Option<(u64, u64)>,
    /// The key, such as `pools[0].cluster`; empty when the mistake belongs to none.
    pub key: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

// === impl Config ===

impl Config {
    /// Reads and checks `file`.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| ConfigError {
            file: name.clone(),
            line_column: None,
            key: String::new(),
            message: format!("cannot be read: {error}; name a readable YAML file"),
        })?;
        Self::parse(&text, &name)
    }

    /// Checks a configuration's text; `file` is only used in messages.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        // A byte order mark is no part of YAML's content and would shift the columns.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with('#')) {
            let message = "holds no configuration; at least `pools` is needed".to_owned();
            return Err(ConfigError { file: file.to_owned(), line_column: None, key: String::new(), message });
        }
        let options = serde_saphyr::options! { with_snippet: false };
        let mut key = String::new();
        let raw = serde_saphyr::with_deserializer_from_str_with_options(text, options, |de| {
            serde_path_to_error::deserialize::<_, RawConfig>(de).map_err(|error| {
                // `Spanned` shows as a step of its own; no key of ours is called `value`.
                // A place without a name shows as `?`.
                key = error.path().to_string().replace(".value", "").replace(".?", "");
                if key == "." {
                    key.clear();
                }
                error.into_inner()
            })
        })
        .map_err(|error| ConfigError {
            file: file.to_owned(),
            line_column: error.location().map(|at| (at.line(), at.column())),
            key: key.clone(),
            message: explain(&error.to_string()),
        })?;
        raw.check().map_err(|fault| ConfigError {
            file: file.to_owned(),
            line_column: Some((fault.at.line(), fault.at.column())),
            key: fault.key,
            message: fault.message,
        })
    }

    /// The JSON schema of the file.
    pub fn schema() -> schemars::Schema {
        schemars::schema_for!(RawConfig)
    }

    /// What the collector understood, for people.
    pub fn summary(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        let interval = humantime::format_duration(self.scrape.interval);
        let timeout = humantime::format_duration(self.scrape.timeout);
        let _ = writeln!(text, "listens on {}; polls every {interval}, each poll at most {timeout}", self.listen);
        let _ = match &self.api {
            None => writeln!(text, "the API only reads: no `api.token_file` is set"),
            Some(token) => writeln!(text, "the API drains replicas for {token}"),
        };
        if let Some(file) = &self.drain_file {
            let _ = writeln!(text, "drains the replicas in {}", file.display());
        }
        if let Some(affinity) = &self.affinity {
            let _ = writeln!(text, "keeps conversations' homes in {affinity}");
        }
        for pool in &self.pools {
            text.push_str(&pool.summary());
        }
        for envoy in &self.envoys {
            let token = envoy.token.as_ref().map_or("no token".to_owned(), ToString::to_string);
            let _ = match &envoy.place {
                EnvoyPlace::Url(url) => writeln!(text, "envoy {url}: {token}"),
                EnvoyPlace::Dns(dns) => {
                    let tls = envoy.tls.as_ref().map_or("", TlsConfig::summary);
                    writeln!(text, "envoys at {}: {token}{tls}", dns.summary())
                }
            };
        }
        if self.envoys.is_empty() {
            text.push_str("no envoys: nothing is pushed; the collector only shows what it sees\n");
        }
        text
    }
}

// === impl PoolConfig ===

impl PoolConfig {
    fn summary(&self) -> String {
        use std::fmt::Write as _;
        let seqs = self.max_num_seqs.map_or("not given".to_owned(), |n| n.to_string());
        let tls = self.tls.as_ref().map_or("", TlsConfig::summary);
        let token = self.token.as_ref().map_or(String::new(), |token| format!(", {token}"));
        let mut text = format!("pool {}: max_num_seqs {seqs}{tls}{token}\n", self.cluster);
        for endpoint in &self.replicas {
            let _ = writeln!(text, "  {}{}", endpoint.address, if endpoint.drain { " (draining)" } else { "" });
        }
        for dns in &self.dns {
            let _ = writeln!(text, "  {}", dns.summary());
        }
        for file in &self.files {
            let _ = writeln!(text, "  the targets in {}", file.display());
        }
        text
    }
}

// === impl TlsConfig ===

impl TlsConfig {
    fn summary(&self) -> &'static str {
        if self.insecure { ", TLS with any certificate" } else { ", TLS" }
    }
}

// === impl ConfigError ===

impl ConfigError {
    /// Where in the file, as `:line:column: key`, as far as it is known.
    fn place(&self) -> String {
        let at = self.line_column.map(|(line, column)| format!(":{line}:{column}")).unwrap_or_default();
        if self.key.is_empty() { at } else { format!("{at}: {}", self.key) }
    }
}

/// The parser's message in the user's words, without the place, which the error carries in front already.
fn explain(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let message = match message.strip_prefix("line ") {
        Some(rest) => rest.split_once(": ").map_or(message, |(_, rest)| rest),
        None => message.rsplit_once(" at line ").map_or(message, |(text, _)| text),
    };
    match message {
        "invalid u32" | "invalid u16" => "a whole number is needed".to_owned(),
        "invalid boolean" => "write true or false".to_owned(),
        "expected sequence start" => "a list is needed, its entries begin with `- `".to_owned(),
        "expected mapping start" => "keys with values are needed, such as `key: value`".to_owned(),
        _ => match message.strip_prefix("duplicate mapping key: ") {
            Some(rest) => format!("`{}` is given twice; keep one", rest.split(',').next().unwrap_or(rest)),
            None => message.to_owned(),
        },
    }
}

// === how values are shown ===

fn as_text<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*duration))
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_corpus_has_configurations_that_are_right() {
        for seed in seeds("collector") {
            Config::parse(std::str::from_utf8(seed).expect("UTF-8"), "seed").expect("a configuration");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_configuration_or_an_error_that_names_a_place_in_it(text in mutated(seeds("collector"))) {
            let text = text.text();
            match Config::parse(&text, "test") {
                Ok(config) => {
                    let summary = config.summary();
                    prop_assert!(config.pools.iter().all(|pool| summary.contains(&pool.cluster)));
                    // What the configuration allows, the collector can start with.
                    let fleet = crate::fleet::Fleet::new(&config);
                    prop_assert_eq!(fleet.pools.len(), config.pools.len());
                }
                Err(error) => {
                    prop_assert!(!error.message.is_empty());
                    if let Some((line, column)) = error.line_column {
                        let lines = text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count() as u64;
                        prop_assert!((1..=lines + 1).contains(&line) && (1..=text.len() as u64 + 1).contains(&column), "{}", error);
                    } else {
                        prop_assert!(error.message.contains("holds no configuration") || !error.key.is_empty(), "{}", error);
                    }
                }
            }
        }
    }
}
