mod documented;

use homing_corpus::{Input, mutated, seeds};
use homing_routing::admission::{Admission, Overflow};
use homing_routing::identity::AlsoSource;
use homing_routing::policy::Limit;
use proptest::prelude::*;

use super::*;

fn refused(json: &str) -> String {
    read(json.as_bytes()).expect_err("a refusal").to_string()
}

fn accepted(json: &str) -> RouteConfig {
    match read(json.as_bytes()).expect("a configuration") {
        Role::Route(config) => *config,
        Role::Control(_) | Role::Model(_) => panic!("a route role"),
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
    assert_eq!((policy.spill_threshold, policy.spill_margin, policy.max_num_seqs), (Limit::Fixed(3), Limit::Fixed(2), Some(32)));
    assert_eq!((policy.affinity, policy.client_pin, policy.naming.body, policy.naming.fingerprint), (false, false, false, false));
    assert_eq!(
        (policy.naming.headers, policy.naming.also),
        (vec!["X-Mine".to_owned()], vec![AlsoSource::User, AlsoSource::XTenantId])
    );
    assert_eq!(policy.replicas.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.1:80", "10.0.0.1:81#1"]);
}

#[test]
fn admission_is_off_unless_it_is_asked_for() {
    let admission = |keys: &str| {
        let config = accepted(&format!(r#"{{"role":"route","pools":[{{"cluster":"a","admission":{keys}}}]}}"#));
        config.policies[0].admission
    };
    for off in ["{}", r#"{"mode":"off"}"#, r#"{"mode":false}"#, r#"{"max_held":7}"#] {
        assert_eq!(admission(off), None, "{off}");
    }
    assert_eq!(admission(r#"{"mode":"working_set"}"#), Some(Admission::default()));
    let every = r#"{"mode":"working_set","max_held":7.0,"max_wait":"2m","overflow":"reject","turns":3}"#;
    let expected = Admission { max_held: 7, max_wait_ms: 120_000, overflow: Overflow::Reject, turns: 3, ..Admission::default() };
    assert_eq!(admission(every), Some(expected));
    let grace = admission(r#"{"mode":"working_set","min_grace":"500ms","max_grace":"5s"}"#).expect("admission");
    assert_eq!((grace.min_grace_ms, grace.max_grace_ms), (500, 5_000));
}

#[test]
fn a_refusal_names_the_key_and_what_it_may_be() {
    let cases = [
        (r#"{}"#, "role"),
        (r#"{"role":"both"}"#, "role: unknown variant `both`, expected one of `route`, `control`, `model`"),
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
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"mode":"on"}}]}"#,
            "pools[0].admission.mode: must be `off` or `working_set`",
        ),
        (r#"{"role":"route","pools":[{"cluster":"a","admission":{"mode":true}}]}"#, "pools[0].admission.mode: must be `off`"),
        (r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_hold":1}}]}"#, "unknown field `max_hold`"),
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_held":0}}]}"#,
            "pools[0].admission.max_held: must be from 1 to 4096",
        ),
        (r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_held":4097}}]}"#, "pools[0].admission.max_held: must be"),
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_wait":"10ms"}}]}"#,
            "pools[0].admission.max_wait: must be from 1s",
        ),
        (r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_wait":120}}]}"#, "pools[0].admission.max_wait"),
        (r#"{"role":"route","pools":[{"cluster":"a","admission":{"overflow":"drop"}}]}"#, "expected `send` or `reject`"),
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"min_grace":"1ms"}}]}"#,
            "pools[0].admission.min_grace: must be from 10ms to 300s",
        ),
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"max_grace":"1s"}}]}"#,
            "pools[0].admission.min_grace: must be at most `max_grace`, which is 1000ms: set both",
        ),
        (
            r#"{"role":"route","pools":[{"cluster":"a","admission":{"turns":65536}}]}"#,
            "pools[0].admission.turns: must be from 0 to 65535",
        ),
        (
            r#"{"role":"route","pools":[{"cluster":"a","affinity":false,"admission":{"mode":"working_set"}}]}"#,
            "pools[0].admission.mode: `working_set` needs `affinity: true`",
        ),
        (
            r#"{"role":"route","pools":[{"cluster":"a","replicas":["10.0.0.1:80","10.0.0.1:80"]}]}"#,
            "pools[0].replicas: `10.0.0.1:80` stands twice",
        ),
        (
            r#"{"role":"route","pools":[{"cluster":"a","conversation":{"headers":["x-mine","x mine"]}}]}"#,
            "pools[0].conversation.headers: `x mine` is no header's name",
        ),
        (r#"{"role":"control","pools":[{"cluster":"a"}]}"#, "pools: belongs to the filter with `role: route`"),
        ("", "it is empty"),
        ("not json", "neither a google.protobuf.Struct nor JSON"),
    ];
    for (json, expected) in cases {
        let message = refused(json);
        assert!(message.contains(expected), "{json} gave: {message}");
    }
}

#[test]
fn a_pool_names_as_many_replicas_as_a_snapshot_does() {
    let pool = |count: usize| {
        let replicas: Vec<_> = (0..count).map(|rank| format!("10.0.0.1:80#{rank}")).collect();
        serde_json::json!({ "role": "route", "pools": [{ "cluster": "a", "replicas": replicas }] }).to_string()
    };
    assert_eq!(accepted(&pool(1024)).policies[0].replicas.len(), 1024);
    assert!(refused(&pool(1025)).contains("pools[0].replicas: must be at most 1024"));
}

/// The protobuf of a JSON object, as Envoy makes it of YAML.
fn protobuf(json: &[u8]) -> Vec<u8> {
    use prost_types::value::Kind;
    use serde_json::Value as Json;
    fn value(json: Json) -> prost_types::Value {
        let kind = match json {
            Json::Null => Kind::NullValue(0),
            Json::Bool(flag) => Kind::BoolValue(flag),
            Json::Number(number) => Kind::NumberValue(number.as_f64().expect("a number")),
            Json::String(text) => Kind::StringValue(text),
            Json::Array(values) => Kind::ListValue(prost_types::ListValue { values: values.into_iter().map(value).collect() }),
            Json::Object(fields) => Kind::StructValue(object(fields)),
        };
        prost_types::Value { kind: Some(kind) }
    }
    fn object(fields: serde_json::Map<String, Json>) -> prost_types::Struct {
        prost_types::Struct { fields: fields.into_iter().map(|(key, json)| (key, value(json))).collect() }
    }
    object(serde_json::from_slice(json).expect("a JSON object")).encode_to_vec()
}

/// A configuration keeps what the documentation promises, and a refusal says what is wrong in a line.
fn is_within_bounds_or_refused(input: &Input) -> Result<(), TestCaseError> {
    match read(input) {
        Ok(Role::Route(config)) => {
            prop_assert!((1..=2_000_000).contains(&config.settings.max_conversations) && config.settings.idle_s > 0);
            prop_assert!(config.max_body_bytes <= 128 << 20 && !config.policies.is_empty());
            for (index, policy) in config.policies.iter().enumerate() {
                prop_assert!(
                    !policy.cluster.is_empty() && config.policies[..index].iter().all(|other| other.cluster != policy.cluster)
                );
                prop_assert!(policy.max_num_seqs != Some(0) && (policy.affinity || policy.admission.is_none()));
            }
        }
        Ok(Role::Control(_)) => {}
        Ok(Role::Model(config)) => {
            prop_assert!(config.header.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase() && byte != b':'));
        }
        Err(error) => {
            let said = error.to_string();
            let why = said.strip_prefix("the configuration of the homing filter is not valid: ");
            prop_assert!(why.is_some_and(|why| !why.is_empty()) && said.len() <= 8 * input.len() + 400, "{}", said);
        }
    }
    Ok(())
}

#[test]
fn the_corpus_has_configurations_of_every_role_and_as_protobuf_they_are_the_same() {
    for seed in seeds("filter") {
        let as_json = format!("{:?}", read(seed).expect("a configuration"));
        assert_eq!(format!("{:?}", read(&protobuf(seed)).expect("a configuration")), as_json);
    }
}

proptest! {
    #[test]
    fn any_damaged_configuration_is_within_bounds_or_refused(json in mutated(seeds("filter"))) {
        is_within_bounds_or_refused(&json)?;
    }

    #[test]
    fn any_damaged_protobuf_is_within_bounds_or_refused(bytes in mutated(seeds("filter").into_iter().map(protobuf))) {
        is_within_bounds_or_refused(&bytes)?;
    }

    #[test]
    fn any_bytes_are_a_configuration_or_refused(bytes: Vec<u8>, text in r#"[{}\[\]":,\\ 0-9.a-z_]{0,60}"#) {
        let _ = read(&bytes);
        let _ = read(text.as_bytes());
        let _ = read(format!(r#"{{"role":"route","pools":[{{"cluster":"a",{text}"#).as_bytes());
    }
}

#[test]
fn the_model_role_needs_nothing_and_takes_a_header() {
    let model = |json: &str| match read(json.as_bytes()).expect("a configuration") {
        Role::Model(config) => config,
        Role::Route(_) | Role::Control(_) => panic!("a model role"),
    };
    let header = |name: &str| name.to_owned();
    assert_eq!(model(r#"{"role":"model"}"#), ModelConfig { header: header("x-homing-model"), max_body_bytes: 32 << 20 });
    assert_eq!(
        model(r#"{"role":"model","header":"X-Model","max_body_bytes":1024}"#),
        ModelConfig { header: header("x-model"), max_body_bytes: 1024 }
    );
}

#[test]
fn a_key_of_another_role_is_refused() {
    for (json, key) in [
        (r#"{"role":"model","header":"a b"}"#, "header"),
        (r#"{"role":"model","header":"x-homing-targets"}"#, "header"),
        (r#"{"role":"model","header":":path"}"#, "header"),
        (r#"{"role":"model","pools":[{"cluster":"a"}]}"#, "pools"),
        (r#"{"role":"model","token":"t"}"#, "token"),
        (r#"{"role":"control","header":"x-model"}"#, "header"),
        (r#"{"role":"route","header":"x-model","pools":[{"cluster":"a"}]}"#, "header"),
        (r#"{"role":"route","token":"","pools":[{"cluster":"a"}]}"#, "token"),
        (r#"{"role":"control","hash_key":"000102030405060708090a0b0c0d0e0f"}"#, "hash_key"),
        (r#"{"role":"control","max_conversations":1000}"#, "max_conversations"),
        (r#"{"role":"control","debug_headers":true}"#, "debug_headers"),
        (r#"{"role":"control","max_body_bytes":1}"#, "max_body_bytes"),
        (r#"{"role":"control","pools":[]}"#, "pools"),
        (r#"{"role":"model","idle_timeout":"10m"}"#, "idle_timeout"),
        (r#"{"role":"model","snapshot_max_age":"5s"}"#, "snapshot_max_age"),
    ] {
        assert!(refused(json).contains(&format!("{key}:")), "{json}: {}", refused(json));
    }
}
