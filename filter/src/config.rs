//! The filter's configuration: a `google.protobuf.Struct` in Envoy's configuration.
//!
//! Envoy hands it over as protobuf; a `StringValue` with the same keys as JSON is read too.

use core::fmt;
use core::time::Duration;

use homing_routing::identity::{AlsoSource, Naming};
use homing_routing::policy::{Limit, Policy};
use homing_routing::replica::ReplicaName;
use homing_routing::router::Settings;
use prost::Message;
use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize};

/// What one filter instance does.
#[derive(Debug)]
pub enum Role {
    /// Routes requests.
    Route(Box<RouteConfig>),
    /// Takes snapshots.
    Control(ControlConfig),
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
    pools: Vec<PoolFile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RoleName {
    Route,
    Control,
}

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
    #[expect(dead_code, reason = "only `off` can be chosen, so there is nothing to read yet")]
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

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdmissionFile {
    #[serde(default)]
    #[expect(dead_code, reason = "only `off` can be chosen, so there is nothing to read yet")]
    mode: AdmissionMode,
}

#[derive(Clone, Copy, Debug, Default)]
enum AdmissionMode {
    #[default]
    Off,
}

impl<'de> Deserialize<'de> for AdmissionMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            // YAML 1.1 reads a bare `off` as false.
            Flag(bool),
        }
        match Written::deserialize(deserializer)? {
            Written::Text(text) if text == "off" => Ok(Self::Off),
            Written::Flag(false) => Ok(Self::Off),
            _ => Err(D::Error::custom("the only admission mode is `off`")),
        }
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

/// A whole number. Envoy writes every number of a `Struct` as a double.
#[derive(Clone, Copy, Debug)]
struct Whole(u32);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = f64::deserialize(deserializer)?;
        whole(number).map(Self).ok_or_else(|| D::Error::custom(format!("{number} is not a whole number from 0 to {}", u32::MAX)))
    }
}

fn whole(number: f64) -> Option<u32> {
    (number >= 0.0 && number <= f64::from(u32::MAX) && number.trunc() == number).then_some(number as u32)
}

/// A duration as people write it: `600s`, `10m`, `250ms`.
#[derive(Clone, Copy, Debug)]
struct Span(Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text)
            .map(Self)
            .map_err(|error| D::Error::custom(format!("`{text}` is not a duration such as 600s: {error}")))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct HashKey([u8; 16]);

impl<'de> Deserialize<'de> for HashKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            "" => Ok(Self::default()),
            text if text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
                u128::from_str_radix(text, 16).map(|key| Self(key.to_be_bytes())).map_err(D::Error::custom)
            }
            _ => Err(D::Error::custom("a hash key is 32 hex digits (16 bytes), the same on every Envoy of a fleet, or empty")),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct LimitFile(Limit);

impl Default for LimitFile {
    fn default() -> Self {
        Self(Limit::Auto)
    }
}

impl<'de> Deserialize<'de> for LimitFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = Limit;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto` or a whole number")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Limit, E> {
                if text == "auto" { Ok(Limit::Auto) } else { Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)) }
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Limit, E> {
                u32::try_from(number)
                    .map(Limit::Fixed)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self))
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<Limit, E> {
                whole(number).map(Limit::Fixed).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Float(number), &self))
            }
        }
        deserializer.deserialize_any(Written).map(Self)
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
    let file: File = serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        ConfigError(if path == "." { error.inner().to_string() } else { format!("{path}: {}", error.inner()) })
    })?;
    match file.role {
        RoleName::Route => route(file).map(|config| Role::Route(Box::new(config))),
        RoleName::Control => control(file).map(Role::Control),
    }
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

fn control(file: File) -> Result<ControlConfig, ConfigError> {
    if !file.pools.is_empty() {
        return Err(ConfigError(
            "pools: belongs to the filter with `role: route`; the control role learns the pools from it".into(),
        ));
    }
    Ok(ControlConfig { token: file.token })
}

fn route(file: File) -> Result<RouteConfig, ConfigError> {
    if !file.token.is_empty() {
        return Err(ConfigError("token: belongs to the filter with `role: control`".into()));
    }
    if file.pools.is_empty() {
        return Err(ConfigError("pools: name at least one, with the Envoy cluster it serves".into()));
    }
    if !(1..=2_000_000).contains(&file.max_conversations.0) {
        return Err(ConfigError("max_conversations: must be from 1 to 2000000".into()));
    }
    // A VM has at most 1 GiB, and traps when it asks for more.
    if file.max_body_bytes.0 > 128 << 20 {
        return Err(ConfigError("max_body_bytes: must be at most 134217728 (128 MiB)".into()));
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
        policies.push(policy(pool));
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

fn policy(pool: PoolFile) -> Policy {
    Policy {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        read(json.as_bytes()).expect_err("a refusal").to_string()
    }

    fn accepted(json: &str) -> RouteConfig {
        match read(json.as_bytes()).expect("a configuration") {
            Role::Route(config) => *config,
            Role::Control(_) => panic!("a route role"),
        }
    }

    #[test]
    fn a_pool_needs_only_its_cluster() {
        let config = accepted(r#"{"role":"route","pools":[{"cluster":"a"}]}"#);
        assert_eq!(config.policies, [Policy::new("a")]);
        assert_eq!(config.settings, Settings::default());
        assert!(!config.debug_headers);
    }

    #[test]
    fn a_struct_is_read_as_envoy_sends_it() {
        use prost_types::value::Kind;
        use prost_types::{ListValue, Struct, Value};
        fn value(kind: Kind) -> Value {
            Value { kind: Some(kind) }
        }
        fn fields(entries: &[(&str, Value)]) -> Struct {
            Struct { fields: entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect() }
        }
        let pool = fields(&[("cluster", value(Kind::StringValue("a".into()))), ("spill_threshold", value(Kind::NumberValue(8.0)))]);
        let pools = ListValue { values: vec![value(Kind::StructValue(pool))] };
        let config = fields(&[
            ("role", value(Kind::StringValue("route".into()))),
            ("debug_headers", value(Kind::BoolValue(true))),
            ("pools", value(Kind::ListValue(pools))),
        ]);
        let Role::Route(config) = read(&config.encode_to_vec()).expect("a configuration") else { panic!("a route role") };
        assert_eq!((config.debug_headers, config.policies[0].spill_threshold), (true, Limit::Fixed(8)));
    }

    #[test]
    fn every_key_has_its_effect() {
        let config = accepted(
            r#"{"role":"route","debug_headers":true,"hash_key":"000102030405060708090a0b0c0d0e0f","max_conversations":1000.0,
                "idle_timeout":"10m","snapshot_max_age":"2s","max_body_bytes":1024,"pools":[{"cluster":"a","affinity":false,
                "spill_threshold":3,"spill_margin":2.0,"max_num_seqs":32,"client_pin":"deny",
                "conversation":{"headers":["X-Mine"],"body":false,"fingerprint":false,"also":["user","x-tenant-id"]},
                "replicas":["10.0.0.1:80","10.0.0.1:81#1"],"admission":{"mode":false}}]}"#,
        );
        assert_eq!(config.settings.hash_key, core::array::from_fn(|n| n as u8));
        assert_eq!((config.settings.max_conversations, config.settings.idle_s), (1000, 600));
        assert_eq!((config.settings.snapshot_max_age_ms, config.max_body_bytes), (2000, 1024));
        let [policy] = config.policies.try_into().expect("one pool");
        assert_eq!(
            (policy.spill_threshold, policy.spill_margin, policy.max_num_seqs),
            (Limit::Fixed(3), Limit::Fixed(2), Some(32))
        );
        assert_eq!(
            (policy.affinity, policy.client_pin, policy.naming.body, policy.naming.fingerprint),
            (false, false, false, false)
        );
        assert_eq!(
            (policy.naming.headers, policy.naming.also),
            (vec!["X-Mine".to_owned()], vec![AlsoSource::User, AlsoSource::XTenantId])
        );
        assert_eq!(policy.replicas.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.1:80", "10.0.0.1:81#1"]);
    }

    #[test]
    fn a_refusal_names_the_key_and_what_it_may_be() {
        let cases = [
            (r#"{}"#, "role"),
            (r#"{"role":"both"}"#, "role: unknown variant `both`, expected `route` or `control`"),
            (r#"{"role":"route"}"#, "pools: name at least one"),
            (r#"{"role":"route","pols":[]}"#, "unknown field `pols`"),
            (r#"{"role":"route","pools":[{"cluster":"a","spil_margin":1}]}"#, "unknown field `spil_margin`"),
            (r#"{"role":"route","pools":[{"cluster":"a","spill_threshold":"8"}]}"#, "pools[0].spill_threshold"),
            (r#"{"role":"route","pools":[{"cluster":"a","spill_threshold":1.5}]}"#, "`auto` or a whole number"),
            (r#"{"role":"route","pools":[{"cluster":"a","affinity":"yes"}]}"#, "pools[0].affinity"),
            (r#"{"role":"route","pools":[{"cluster":"a"},{"cluster":"a"}]}"#, "pools[1].cluster: `a` stands twice"),
            (
                r#"{"role":"route","pools":[{"cluster":"a","replicas":["host:80"]}]}"#,
                "pools[0].replicas[0]: `host:80` is not a replica",
            ),
            (r#"{"role":"route","idle_timeout":600,"pools":[{"cluster":"a"}]}"#, "idle_timeout"),
            (r#"{"role":"route","idle_timeout":"soon","pools":[{"cluster":"a"}]}"#, "`soon` is not a duration such as 600s"),
            (r#"{"role":"route","hash_key":"abc","pools":[{"cluster":"a"}]}"#, "32 hex digits"),
            (r#"{"role":"route","max_conversations":0,"pools":[{"cluster":"a"}]}"#, "max_conversations"),
            (r#"{"role":"control","pools":[{"cluster":"a"}]}"#, "pools: belongs to the filter with `role: route`"),
            ("", "it is empty"),
            ("not json", "neither a google.protobuf.Struct nor JSON"),
        ];
        for (json, expected) in cases {
            let message = refused(json);
            assert!(message.contains(expected), "{json} gave: {message}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_configuration_or_refused(bytes: Vec<u8>, text in r#"[{}\[\]":,\\ 0-9.a-z_]{0,60}"#) {
            let _ = read(&bytes);
            let _ = read(text.as_bytes());
            let _ = read(format!(r#"{{"role":"route","pools":[{{"cluster":"a",{text}"#).as_bytes());
        }
    }
}
