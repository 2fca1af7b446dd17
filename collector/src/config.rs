//! The collector's configuration file: YAML, checked as a whole before anything starts.
//!
//! Every mistake is reported with its place (`file:line:column`), the key it belongs to (`pools[0].replicas[1].address`) and what
//! is allowed there.

mod file;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use self::file::RawConfig;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// Where the collector's own HTTP server listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Names under which browsers may reach it, besides `localhost` and IP addresses; lower case, without a port.
    pub allowed_hosts: Vec<String>,
    /// How replicas are polled.
    pub scrape: ScrapeConfig,
    /// The Envoys that get the snapshots; may be empty.
    pub envoys: Vec<EnvoyConfig>,
    /// The pools, each with at least one replica.
    pub pools: Vec<PoolConfig>,
}

/// How replicas are polled. Snapshots are pushed at the same interval.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScrapeConfig {
    /// The time between two polls of an endpoint.
    #[serde(deserialize_with = "file::interval", serialize_with = "as_text")]
    pub interval: Duration,
    /// How long one poll may take, from connecting to the last byte.
    #[serde(deserialize_with = "file::timeout", serialize_with = "as_text")]
    pub timeout: Duration,
}

impl Default for ScrapeConfig {
    fn default() -> Self {
        Self { interval: Duration::from_millis(250), timeout: Duration::from_secs(1) }
    }
}

/// One Envoy that runs the filter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvoyConfig {
    /// Its control listener.
    pub url: ControlUrl,
    /// What it asks for as `Authorization: Bearer`, if it asks.
    pub token: Option<TokenSource>,
}

/// The address of an Envoy's control listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ControlUrl {
    /// `http://ip:port`
    Tcp(SocketAddr),
    /// `unix:/path/to.sock`
    Unix(PathBuf),
}

/// Where a bearer token comes from.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSource {
    /// It stands in the configuration.
    #[serde(rename = "token", serialize_with = "hidden")]
    Inline(String),
    /// It is the content of a file, without the white space around it.
    #[serde(rename = "token_file")]
    File(PathBuf),
}

/// One pool: the replicas behind one Envoy cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolConfig {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// The most sequences each engine runs at once, since vLLM reports it nowhere.
    pub max_num_seqs: Option<u32>,
    /// Its endpoints.
    pub replicas: Vec<EndpointConfig>,
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

    /// What the collector understood, for people.
    pub fn summary(&self) -> String {
        use fmt::Write as _;
        let mut text = String::new();
        let interval = humantime::format_duration(self.scrape.interval);
        let timeout = humantime::format_duration(self.scrape.timeout);
        let _ = writeln!(text, "listens on {}; polls every {interval}, each poll at most {timeout}", self.listen);
        for pool in &self.pools {
            let seqs = pool.max_num_seqs.map_or("not given".to_owned(), |n| n.to_string());
            let _ = writeln!(text, "pool {}: max_num_seqs {seqs}", pool.cluster);
            for endpoint in &pool.replicas {
                let _ = writeln!(text, "  {}{}", endpoint.address, if endpoint.drain { " (draining)" } else { "" });
            }
        }
        for envoy in &self.envoys {
            let token = match &envoy.token {
                None => "no token".to_owned(),
                Some(TokenSource::Inline(_)) => "a token from this file".to_owned(),
                Some(TokenSource::File(path)) => format!("a token from {}", path.display()),
            };
            let _ = writeln!(text, "envoy {}: {token}", envoy.url);
        }
        if self.envoys.is_empty() {
            text.push_str("no envoys: nothing is pushed; the collector only shows what it sees\n");
        }
        text
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
        "invalid u32" => "a whole number is needed".to_owned(),
        "invalid boolean" => "write true or false".to_owned(),
        "expected sequence start" => "a list is needed, its entries begin with `- `".to_owned(),
        "expected mapping start" => "keys with values are needed, such as `key: value`".to_owned(),
        _ => match message.strip_prefix("duplicate mapping key: ") {
            Some(rest) => format!("`{}` is given twice; keep one", rest.split(',').next().unwrap_or(rest)),
            None => message.to_owned(),
        },
    }
}

// === impl ControlUrl ===

impl fmt::Display for ControlUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl std::str::FromStr for ControlUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = "write http://ip:port or unix:/path/to.sock";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(format!("the socket's path must be absolute: {allowed}"))
            };
        }
        if text.starts_with("https:") {
            return Err(format!("https is not supported, put the listener on loopback or behind a sidecar: {allowed}"));
        }
        let address = text.strip_prefix("http://").map(|rest| rest.strip_suffix('/').unwrap_or(rest));
        match address.and_then(|address| address.parse::<SocketAddr>().ok()) {
            Some(address) if address.port() != 0 => Ok(Self::Tcp(address)),
            _ => Err(format!("`{text}` is not a control listener: {allowed}")),
        }
    }
}

impl<'de> Deserialize<'de> for ControlUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for ControlUrl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

// === impl TokenSource ===

impl TokenSource {
    /// Reads the token.
    pub fn read(&self) -> Result<String, String> {
        let token = match self {
            Self::Inline(token) => token.clone(),
            Self::File(path) => std::fs::read_to_string(path)
                .map_err(|error| format!("the token file {} cannot be read: {error}", path.display()))?
                .trim()
                .to_owned(),
        };
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token is one or more visible ASCII characters without spaces".to_owned());
        }
        Ok(token)
    }
}

/// Shows where a token comes from and never the token.
impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

// === how values are shown ===

fn as_text<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*duration))
}

fn hidden<S: serde::Serializer>(_: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str("(hidden)")
}
