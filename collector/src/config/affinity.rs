//! Where the homes of conversations are kept.

use std::fmt;
use std::path::PathBuf;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use serde_saphyr::Spanned;

use super::file::{Fault, require};

/// A Redis or Valkey server that keeps the homes of conversations.
#[derive(Clone, PartialEq, Serialize)]
pub struct AffinityConfig {
    /// `redis://[user@]host[:port][/db]` or `rediss://` for TLS; its password is not shown.
    #[serde(serialize_with = "without_password")]
    pub store: String,
    /// A file that holds its password; read again at every connection.
    pub password_file: Option<PathBuf>,
    /// The certificates, PEM, that its certificate must come from; the system's if there is none.
    pub ca_file: Option<PathBuf>,
    /// What its keys begin with, so that several fleets can share a server.
    pub prefix: String,
}

/// Keeps the homes of conversations in Redis or Valkey, for several collectors and for restarts.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Affinity")]
pub(super) struct RawAffinity {
    /// `redis://[user@]host[:port][/db]`, or `rediss://` for TLS.
    #[schemars(with = "String")]
    store: Spanned<String>,
    /// A file that holds the password; read again at every connection.
    password_file: Option<PathBuf>,
    /// The certificates, PEM, that the store's must come from; the system's if there is none.
    ca_file: Option<PathBuf>,
    /// What its keys begin with, `homing` if nothing is given; 1 to 64 letters, digits and `-_.:`.
    #[schemars(with = "Option<String>")]
    prefix: Option<Spanned<String>>,
}

impl RawAffinity {
    pub(super) fn check(self) -> Result<AffinityConfig, Fault> {
        let wanted =
            || "a server's URL is needed, such as redis://127.0.0.1:6379 or rediss://user@redis.internal:6380/0".to_owned();
        let scheme = self.store.value.starts_with("redis://") || self.store.value.starts_with("rediss://");
        let valid = scheme && self.store.value.as_str().into_connection_info().is_ok();
        require(valid, &self.store, || "affinity.store".to_owned(), wanted)?;
        if let Some(prefix) = &self.prefix {
            let letter = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
            let valid = (1..=64).contains(&prefix.value.len()) && prefix.value.chars().all(letter);
            let message = || "1 to 64 letters, digits and `-_.:` are allowed".to_owned();
            require(valid, prefix, || "affinity.prefix".to_owned(), message)?;
        }
        Ok(AffinityConfig {
            store: self.store.value,
            password_file: self.password_file,
            ca_file: self.ca_file,
            prefix: self.prefix.map_or_else(|| "homing".to_owned(), |prefix| prefix.value),
        })
    }
}

impl AffinityConfig {
    /// How the store is reached, with its password.
    pub(crate) fn connection(&self) -> Result<ConnectionInfo, String> {
        let info = self.store.as_str().into_connection_info().map_err(|error| error.to_string())?;
        let Some(path) = &self.password_file else { return Ok(info) };
        let password = std::fs::read_to_string(path)
            .map_err(|error| format!("affinity.password_file {} cannot be read: {error}", path.display()))?;
        let settings = info.redis_settings().clone().set_password(password.trim());
        Ok(info.set_redis_settings(settings))
    }
}

/// Whoever prints a configuration to look for a mistake does not mean to print a password.
impl fmt::Debug for AffinityConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store: _, password_file, ca_file, prefix } = self;
        let mut shown = f.debug_struct("AffinityConfig");
        shown.field("store", &format_args!("{self}")).field("password_file", password_file);
        shown.field("ca_file", ca_file).field("prefix", prefix).finish()
    }
}

/// Tells where it is and never its password.
impl fmt::Display for AffinityConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(info) = self.store.as_str().into_connection_info() else { return f.write_str("an unknown place") };
        let scheme = if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) { "rediss" } else { "redis" };
        write!(f, "{scheme}://{}/{}", info.addr(), info.redis_settings().db())
    }
}

fn without_password<S: Serializer>(store: &str, serializer: S) -> Result<S::Ok, S::Error> {
    let config = AffinityConfig { store: store.to_owned(), password_file: None, ca_file: None, prefix: String::new() };
    serializer.collect_str(&config)
}
