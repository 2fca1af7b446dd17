//! The filter's configuration: a `google.protobuf.Struct` in Envoy's configuration.
//!
//! Envoy hands it over as protobuf; a `StringValue` with the same keys as JSON is read too.

mod admission;
#[cfg(test)]
mod tests;
mod values;

use core::fmt;
use core::time::Duration;
use std::collections::HashSet;

use homing_routing::identity::{AlsoSource, Naming};
use homing_routing::policy::Policy;
use homing_routing::replica::ReplicaName;
use homing_routing::router::Settings;
use homing_routing::sync::MAX_REPLICAS;
use prost::Message;
use serde::{Deserialize, Serialize};

use admission::AdmissionFile;
use values::{HashKey, LimitFile, Span, Whole};

/// What one filter instance does.
#[derive(Debug)]
pub enum Role {
    /// Routes requests.
    Route(Box<RouteConfig>),
    /// Takes snapshots.
    Control(ControlConfig),
    /// Copies the model that a body asks for into a header, so that Envoy's routes can go by it.
    Model(ModelConfig),
}

/// The route role.
#[derive(Debug)]
pub struct RouteConfig {
    /// Adds the `x-homing-*` response headers.
    pub debug_headers: bool,
    /// The largest request body that is read for a conversation, in bytes.
    pub max_body_bytes: usize,
    /// What holds for every pool.
    pub settings: Settings,
    /// The pools.
    pub policies: Vec<Policy>,
}

/// The control role.
#[derive(Debug)]
pub struct ControlConfig {
    /// The bearer token the collector must show; none is asked for when it is empty.
    pub token: String,
}

/// The model role.
#[derive(Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// The header, in lower case.
    pub header: String,
    /// The largest request body that is read for its model, in bytes.
    pub max_body_bytes: usize,
}

/// The keys as they are written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    role: RoleName,
    #[serde(default)]
    debug_headers: bool,
    #[serde(default)]
    hash_key: HashKey,
    #[serde(default = "defaults::max_conversations")]
    max_conversations: Whole,
    #[serde(default = "defaults::idle_timeout")]
    idle_timeout: Span,
    #[serde(default = "defaults::snapshot_max_age")]
    snapshot_max_age: Span,
    #[serde(default = "defaults::max_body_bytes")]
    max_body_bytes: Whole,
    #[serde(default)]
    token: String,
    #[serde(default)]
    header: Option<String>,
    #[serde(default)]
    pools: Vec<PoolFile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RoleName {
    Route,
    Control,
    Model,
}

impl RoleName {
    fn as_str(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::Control => "control",
            Self::Model => "model",
        }
    }
}

/// The keys besides `role`, and the roles that heed them.
const KEYS: [(&str, &[RoleName]); 9] = [
    ("debug_headers", &[RoleName::Route]),
    ("hash_key", &[RoleName::Route]),
    ("max_conversations", &[RoleName::Route]),
    ("idle_timeout", &[RoleName::Route]),
    ("snapshot_max_age", &[RoleName::Route]),
    ("max_body_bytes", &[RoleName::Route, RoleName::Model]),
    ("pools", &[RoleName::Route]),
    ("token", &[RoleName::Control]),
    ("header", &[RoleName::Model]),
];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    cluster: String,
    #[serde(default = "defaults::yes")]
    affinity: bool,
    #[serde(default)]
    spill_threshold: LimitFile,
    #[serde(default)]
    spill_margin: LimitFile,
    #[serde(default)]
    max_num_seqs: Option<Whole>,
    #[serde(default)]
    client_pin: Permission,
    #[serde(default)]
    conversation: ConversationFile,
    #[serde(default)]
    replicas: Vec<ReplicaName>,
    #[serde(default)]
    admission: AdmissionFile,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Permission {
    #[default]
    Allow,
    Deny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConversationFile {
    #[serde(default)]
    headers: Vec<String>,
    #[serde(default = "defaults::yes")]
    body: bool,
    #[serde(default = "defaults::yes")]
    fingerprint: bool,
    #[serde(default)]
    also: Vec<AlsoSource>,
}

impl Default for ConversationFile {
    fn default() -> Self {
        Self { headers: Vec::new(), body: true, fingerprint: true, also: Vec::new() }
    }
}

mod defaults {
    use super::{Duration, Settings, Span, Whole};

    pub(super) fn yes() -> bool {
        true
    }

    pub(super) fn max_conversations() -> Whole {
        Whole(Settings::default().max_conversations)
    }

    pub(super) fn idle_timeout() -> Span {
        Span(Duration::from_secs(Settings::default().idle_s.into()))
    }

    pub(super) fn snapshot_max_age() -> Span {
        Span(Duration::from_millis(Settings::default().snapshot_max_age_ms))
    }

    pub(super) fn max_body_bytes() -> Whole {
        Whole(32 << 20)
    }
}

/// Why a configuration was refused: which key, and what it may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the configuration of the homing filter is not valid: {}", self.0)
    }
}

impl core::error::Error for ConfigError {}

/// Reads and checks a configuration.
///
/// # Errors
/// A [`ConfigError`] that names the key.
pub fn read(bytes: &[u8]) -> Result<Role, ConfigError> {
    if bytes.trim_ascii().is_empty() {
        return Err(ConfigError(
            "it is empty: set `configuration` to a google.protobuf.Struct with at least `role: route` and `pools`".into(),
        ));
    }
    let value = match prost_types::Struct::decode(bytes) {
        Ok(fields) => object(fields),
        Err(_) => serde_json::from_slice(bytes)
            .map_err(|error| ConfigError(format!("it is neither a google.protobuf.Struct nor JSON: {error}")))?,
    };
    let set = |key: &str| value.get(key).is_some();
    let set: Vec<_> = KEYS.iter().filter(|(key, _)| set(key)).collect();
    let file: File = serde_path_to_error::deserialize(&value).map_err(|error| {
        let path = error.path().to_string();
        ConfigError(if path == "." { error.inner().to_string() } else { format!("{path}: {}", error.inner()) })
    })?;
    if let Some((key, roles)) = set.into_iter().find(|(_, roles)| !roles.contains(&file.role)) {
        let roles: Vec<_> = roles.iter().map(|role| format!("`role: {}`", role.as_str())).collect();
        return Err(ConfigError(format!("{key}: belongs to the filter with {}", roles.join(" or "))));
    }
    // A VM has at most 1 GiB, and traps when it asks for more.
    if file.max_body_bytes.0 > 128 << 20 {
        return Err(ConfigError("max_body_bytes: must be at most 134217728 (128 MiB)".into()));
    }
    match file.role {
        RoleName::Route => route(file).map(|config| Role::Route(Box::new(config))),
        RoleName::Control => Ok(Role::Control(ControlConfig { token: file.token })),
        RoleName::Model => model(file).map(Role::Model),
    }
}

fn model(file: File) -> Result<ModelConfig, ConfigError> {
    let header = file.header.map_or_else(|| "x-homing-model".to_owned(), |header| header.to_ascii_lowercase());
    let is_own = ["x-homing-targets", "x-homing-replica", "content-length", "transfer-encoding", "host"].contains(&header.as_str());
    if is_own || !is_header_name(&header) {
        return Err(ConfigError("header: name a request header of its own, such as x-homing-model".into()));
    }
    Ok(ModelConfig { header, max_body_bytes: file.max_body_bytes.0 as usize })
}

fn is_header_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(is_allowed)
}

fn object(fields: prost_types::Struct) -> serde_json::Value {
    fields.fields.into_iter().map(|(key, value)| (key, json(value))).collect()
}

fn json(value: prost_types::Value) -> serde_json::Value {
    use prost_types::value::Kind;
    match value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::BoolValue(flag)) => flag.into(),
        Some(Kind::NumberValue(number)) => number.into(),
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(json).collect(),
        Some(Kind::StructValue(fields)) => object(fields),
    }
}

fn route(file: File) -> Result<RouteConfig, ConfigError> {
    if file.pools.is_empty() {
        return Err(ConfigError("pools: name at least one, with the Envoy cluster it serves".into()));
    }
    if !(1..=2_000_000).contains(&file.max_conversations.0) {
        return Err(ConfigError("max_conversations: must be from 1 to 2000000".into()));
    }
    let idle_s = u32::try_from(file.idle_timeout.0.as_secs()).unwrap_or(u32::MAX);
    if idle_s == 0 {
        return Err(ConfigError("idle_timeout: must be at least 1s".into()));
    }
    let mut policies: Vec<Policy> = Vec::with_capacity(file.pools.len());
    for (index, pool) in file.pools.into_iter().enumerate() {
        if pool.cluster.is_empty() {
            return Err(ConfigError(format!("pools[{index}].cluster: name the Envoy cluster this pool serves")));
        }
        if pool.max_num_seqs.is_some_and(|max_num_seqs| max_num_seqs.0 == 0) {
            return Err(ConfigError(format!("pools[{index}].max_num_seqs: must be at least 1")));
        }
        if policies.iter().any(|policy| policy.cluster == pool.cluster) {
            return Err(ConfigError(format!("pools[{index}].cluster: `{}` stands twice", pool.cluster)));
        }
        policies.push(policy(pool, index)?);
    }
    let settings = Settings {
        hash_key: file.hash_key.0,
        max_conversations: file.max_conversations.0,
        idle_s,
        snapshot_max_age_ms: u64::try_from(file.snapshot_max_age.0.as_millis()).unwrap_or(u64::MAX),
        ..Settings::default()
    };
    Ok(RouteConfig { debug_headers: file.debug_headers, max_body_bytes: file.max_body_bytes.0 as usize, settings, policies })
}

fn policy(pool: PoolFile, index: usize) -> Result<Policy, ConfigError> {
    let admission = pool.admission.read().map_err(|(key, why)| ConfigError(format!("pools[{index}].admission.{key}: {why}")))?;
    if admission.is_some() && !pool.affinity {
        return Err(ConfigError(format!("pools[{index}].admission.mode: `working_set` needs `affinity: true`")));
    }
    if let Some(header) = pool.conversation.headers.iter().find(|header| !is_header_name(header)) {
        return Err(ConfigError(format!("pools[{index}].conversation.headers: `{header}` is no header's name")));
    }
    if pool.replicas.len() > MAX_REPLICAS {
        return Err(ConfigError(format!("pools[{index}].replicas: must be at most {MAX_REPLICAS}")));
    }
    let mut seen = HashSet::new();
    if let Some(replica) = pool.replicas.iter().find(|replica| !seen.insert(**replica)) {
        return Err(ConfigError(format!("pools[{index}].replicas: `{replica}` stands twice")));
    }
    Ok(Policy {
        admission,
        affinity: pool.affinity,
        spill_threshold: pool.spill_threshold.0,
        spill_margin: pool.spill_margin.0,
        max_num_seqs: pool.max_num_seqs.map(|max_num_seqs| max_num_seqs.0),
        client_pin: pool.client_pin == Permission::Allow,
        naming: Naming {
            also: pool.conversation.also,
            headers: pool.conversation.headers,
            body: pool.conversation.body,
            fingerprint: pool.conversation.fingerprint,
        },
        replicas: pool.replicas,
        cluster: pool.cluster,
    })
}
