//! A configuration is understood as a whole, and a mistake is reported with its place, its key and what is allowed.

use std::path::PathBuf;
use std::time::Duration;

use homing_collector::config::{AddressFamily, Config, ControlUrl, DnsConfig, EnvoyPlace, ScrapeConfig, TlsConfig, TokenSource};

const POOL: &str = "pools: [{cluster: a, replicas: [{address: '127.0.0.1:8001'}]}]\n";

fn parse(text: &str) -> Config {
    Config::parse(text, "homing.yaml").unwrap_or_else(|error| panic!("{error}"))
}

/// The mistake as the user reads it.
fn mistake(text: &str) -> String {
    Config::parse(text, "homing.yaml").expect_err("a mistake").to_string()
}

#[test]
fn everything_can_be_given() {
    let config = parse(
        "
listen: 127.0.0.1:9000
scrape: { interval: 500ms, timeout: 2s }
envoys:
- url: http://127.0.0.1:9901
  token_file: /run/secrets/token
- url: unix:/run/envoy.sock
  token: abc
- url: http://[::1]:9901/
pools:
- cluster: qwen3-4b
  max_num_seqs: 32
  replicas:
  - address: 127.0.0.1:8001
  - address: '[::1]:8001'
    drain: true
",
    );
    assert_eq!(config.listen, "127.0.0.1:9000".parse().expect("an address"));
    assert_eq!(config.scrape, ScrapeConfig { interval: Duration::from_millis(500), timeout: Duration::from_secs(2) });
    let address = |text: &str| ControlUrl::Tcp(text.parse().expect("an address"));
    let urls = [address("127.0.0.1:9901"), ControlUrl::Unix(PathBuf::from("/run/envoy.sock")), address("[::1]:9901")];
    assert!(config.envoys.iter().map(|envoy| envoy.place.clone()).eq(urls.map(EnvoyPlace::Url)));
    assert_eq!(config.envoys[0].token, Some(TokenSource::File(PathBuf::from("/run/secrets/token"))));
    assert_eq!(config.envoys[2].token, None);
    let pool = &config.pools[0];
    assert_eq!((pool.cluster.as_str(), pool.max_num_seqs), ("qwen3-4b", Some(32)));
    assert_eq!(pool.replicas.iter().map(|replica| replica.drain).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn replicas_may_be_found_by_name_and_by_file_beside_those_that_are_given() {
    let config = parse(
        "
drain_file: /etc/homing/drain.yaml
api: { token_file: /run/secrets/api }
pools:
- cluster: a
  dns:
  - { name: vllm.local, port: 8000 }
  - { name: other, port: 1, family: v4_only, refresh: 1m }
- cluster: b
  files: [one.json, /two.yaml]
  token: abc
  tls: { ca_file: /ca.pem, server_name: vllm.internal }
- cluster: c
  replicas: []
  files: [one.json]
",
    );
    let [a, b, c] = &config.pools[..] else { panic!("three pools") };
    let five_seconds =
        DnsConfig { name: "vllm.local".to_owned(), port: 8000, family: AddressFamily::Auto, refresh: Duration::from_secs(5) };
    assert_eq!(a.dns[0], five_seconds);
    assert_eq!((a.dns[1].family, a.dns[1].refresh), (AddressFamily::V4Only, Duration::from_secs(60)));
    assert_eq!(b.files, [PathBuf::from("one.json"), PathBuf::from("/two.yaml")]);
    assert_eq!(b.token, Some(TokenSource::Inline("abc".to_owned())));
    let tls = TlsConfig { ca_file: Some("/ca.pem".into()), server_name: Some("vllm.internal".to_owned()), ..TlsConfig::default() };
    assert_eq!(b.tls, Some(tls));
    assert!(a.tls.is_none() && a.replicas.is_empty() && c.replicas.is_empty());
    assert_eq!(config.api, Some(TokenSource::File("/run/secrets/api".into())));
    assert_eq!(config.drain_file, Some("/etc/homing/drain.yaml".into()));
}

#[test]
fn envoys_may_be_found_by_name() {
    let entry = "{dns: {name: homing-control, port: 9901, family: v4_only, refresh: 2s}, token: abc, tls: {server_name: envoy}}";
    let config = parse(&format!("{POOL}envoys: [{entry}, {{dns: {{name: other, port: 1}}}}, {{url: 'unix:/a'}}]\n"));
    let [first, second, third] = &config.envoys[..] else { panic!("three entries") };
    let dns = |name: &str, port, family, seconds| {
        EnvoyPlace::Dns(DnsConfig { name: name.to_owned(), port, family, refresh: Duration::from_secs(seconds) })
    };
    assert_eq!(first.place, dns("homing-control", 9901, AddressFamily::V4Only, 2));
    assert_eq!(first.token, Some(TokenSource::Inline("abc".to_owned())));
    assert!(first.tls.as_ref().is_some_and(|tls| tls.server_name.as_deref() == Some("envoy")));
    assert_eq!(second.place, dns("other", 1, AddressFamily::Auto, 5));
    assert_eq!(third.place, EnvoyPlace::Url(ControlUrl::Unix("/a".into())));
    let summary = config.summary();
    for line in ["envoys at the addresses of homing-control:9901, every 2s: a token", "envoy unix:/a: no token"] {
        assert!(summary.contains(line), "{summary}");
    }
    let json = serde_json::to_value(&config).expect("JSON");
    assert_eq!((&json["envoys"][0]["dns"]["name"], &json["envoys"][2]["url"]), (&"homing-control".into(), &"unix:/a".into()));
}

/// The collector's configuration inside a manifest.
fn in_config_map(manifest: &str) -> String {
    let resources: Vec<serde_json::Value> = serde_saphyr::from_multiple(manifest).expect("YAML");
    let mut configs = resources.iter().filter_map(|resource| resource["data"]["collector.yaml"].as_str());
    let config = configs.next().expect("a ConfigMap with collector.yaml").to_owned();
    assert!(configs.next().is_none(), "one is checked");
    config
}

#[test]
fn the_configurations_in_the_kubernetes_manifests_are_valid() {
    let config = parse(&in_config_map(include_str!("../../../envoy/kubernetes/collector.yaml")));
    let [envoy] = &config.envoys[..] else { panic!("one entry") };
    assert!(matches!(&envoy.place, EnvoyPlace::Dns(dns) if dns.port == 9901), "every gateway of a fleet: {envoy:?}");
    assert!(envoy.token.is_some());
    let config = parse(&in_config_map(include_str!("../../../envoy/kubernetes/sidecar.yaml")));
    assert!(matches!(config.envoys[0].place, EnvoyPlace::Url(ControlUrl::Tcp(address)) if address.ip().is_loopback()));
    assert!(config.affinity.is_some(), "what lets the sidecars' Envoys agree");
}

const EXAMPLE: &str = include_str!("../../example.yaml");

#[test]
fn the_shipped_example_is_valid() {
    let config = parse(EXAMPLE);
    assert_eq!((config.envoys.len(), config.pools[0].replicas.len()), (3, 2));
}

#[test]
fn the_shipped_schema_is_the_configurations_own() {
    let shipped: serde_json::Value = serde_json::from_str(include_str!("../../schema.json")).expect("JSON");
    let own = serde_json::to_value(Config::schema()).expect("JSON");
    assert!(shipped == own, "write it anew: cargo run -p homing-collector -- schema > collector/schema.json");
}

#[test]
fn the_schema_takes_the_example_and_refuses_what_the_check_refuses() {
    let schema = serde_json::to_value(Config::schema()).expect("JSON");
    let schema = jsonschema::validator_for(&schema).expect("a schema");
    let json = |text: &str| serde_saphyr::from_str::<serde_json::Value>(text).expect("YAML");
    let mistakes: Vec<_> = schema.iter_errors(&json(EXAMPLE)).map(|error| error.to_string()).collect();
    assert!(mistakes.is_empty(), "{mistakes:?}");
    let wrong = [
        "pools: []",
        "pools: [{cluster: a}]",
        "pools: [{cluster: '', replicas: []}]",
        "pools: [{cluster: a, replicas: [{address: '127.0.0.1:1', drian: true}]}]",
        "pools: [{cluster: a, dns: [{name: b}]}]",
        "pools: [{cluster: a, dns: [{name: b, port: 0}]}]",
        "pools: [{cluster: a, dns: [{name: b, port: 1, family: v5_only}]}]",
        "pools: [{cluster: a, files: one.json}]",
        "pools: [{cluster: a, max_num_seqs: 0, files: [one.json]}]",
        "pools: [{cluster: a, max_ranks: 257, files: [one.json]}]",
        "pools: [{cluster: a, files: [one.json], tls: {verify: false}}]",
        "listen: 127.0.0.1:1",
        "{envoys: [{token: a}], pools: [{cluster: a, files: [one.json]}]}",
        "{envoys: [{dns: {name: b, port: 0}}], pools: [{cluster: a, files: [one.json]}]}",
        "{envoys: [{url: 'unix:/a', dns: {name: b, port: 1}}], pools: [{cluster: a, files: [one.json]}]}",
    ];
    for text in wrong {
        assert!(!schema.is_valid(&json(text)), "{text}");
        assert!(Config::parse(text, "homing.yaml").is_err(), "{text}");
    }
}

#[test]
fn only_pools_are_needed() {
    let config = parse(POOL);
    assert_eq!(config.listen, "127.0.0.1:9900".parse().expect("an address"));
    assert_eq!(config.scrape, ScrapeConfig { interval: Duration::from_millis(250), timeout: Duration::from_secs(1) });
    assert!(config.envoys.is_empty());
}

#[test]
fn an_unknown_key_is_named_with_the_allowed_ones_and_its_place() {
    let text = mistake("pools:\n- cluster: a\n  replicas:\n  - address: 127.0.0.1:8001\n    drian: true\n");
    for part in ["homing.yaml:5:5", "pools[0].replicas[0].drian: unknown field", "address, drain"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn every_mistake_names_its_place_its_key_and_what_is_allowed() {
    let replica = |line: &str| format!("pools:\n- cluster: a\n  replicas:\n  - address: 127.0.0.1:8001\n  - {line}\n");
    let envoy = |lines: &str| format!("{POOL}envoys:\n- {lines}\n");
    let pool = |keys: &str| format!("pools: [{{cluster: a, {keys}}}]\n");
    let cases = [
        ("listen: localhost\npools: []\n".to_owned(), ":1:9: listen: ", "ip:port"),
        (format!("{POOL}scrape: {{ interval: 250 }}\n"), ":2:21: scrape.interval: ", "250ms"),
        (format!("{POOL}scrape: {{ interval: 1ms }}\n"), ":2:21: scrape.interval: ", "from 50ms to 10s"),
        (format!("{POOL}scrape: {{ timeout: 2h }}\n"), ":2:20: scrape.timeout: ", "from 50ms to 30s"),
        (replica("address: gpu-1:8001"), ":5:14: pools[0].replicas[1].address: ", "names are not resolved"),
        (replica("address: 127.0.0.1:0"), ":5:14: pools[0].replicas[1].address: ", "the port vLLM listens on"),
        (replica("address: 127.0.0.1:8001"), ":5:14: pools[0].replicas[1].address: ", "named twice"),
        (replica("drain: true"), ":5:5: pools[0].replicas[1]: ", "missing field `address`"),
        ("pools: []\n".to_owned(), ":1:8: pools: ", "at least one pool"),
        ("pools: [{cluster: a, replicas: []}]\n".to_owned(), ":1:32: pools[0].replicas: ", "1 to 1024"),
        ("pools: [{cluster: '', replicas: [{address: '1.1.1.1:1'}]}]\n".to_owned(), ":1:19: pools[0].cluster: ", "1 to 256 bytes"),
        (POOL.replace("a,", "a, max_ranks: 0,"), ":1:33: pools[0].max_ranks: ", "1 to 256"),
        (POOL.replace("a,", "a, max_num_seqs: 0,"), ":1:36: pools[0].max_num_seqs: ", "1 to 65536"),
        (format!("{}, {}\n", POOL.trim_end().trim_end_matches(']'), &POOL[8..].trim()), "pools[1].cluster: ", "named twice"),
        (envoy("url: https://envoy:9901"), ":3:8: envoys[0].url: ", "https://ip:port or unix:"),
        (envoy("url: http://127.0.0.1:1\n  tls: {}"), ":3:8: envoys[0].url: ", "write https://"),
        (envoy("url: https://127.0.0.1:1\n  tls: {cert_file: a.pem}"), "envoys[0].tls: ", "both `cert_file` and `key_file`"),
        (pool("files: [a.json], tls: {key_file: a.pem}"), "pools[0].tls: ", "both `cert_file` and `key_file`"),
        (envoy("url: unix:envoy.sock"), ":3:8: envoys[0].url: ", "must be absolute"),
        (envoy("url: http://envoy:9901"), ":3:8: envoys[0].url: ", "a name goes under `dns`"),
        (envoy("url: unix:/a\n- url: unix:/a"), ":4:8: envoys[1].url: ", "only once"),
        (envoy("token: a"), ":3:3: envoys[0]: ", "give `url` or `dns`"),
        (envoy("url: unix:/a\n  dns: {name: b, port: 1}"), ":4:8: envoys[0].dns: ", "`url` or `dns`, not both"),
        (envoy("dns: {name: b, port: 0}"), ":3:24: envoys[0].dns.port: ", "the control listener's port, 1 to 65535"),
        (envoy("dns: {name: '10.0.0.1', port: 1}"), ":3:15: envoys[0].dns.name: ", "give it under `url`"),
        (envoy("dns: {name: b}"), ":3:9: envoys[0].dns: ", "missing field `port`"),
        (envoy("dns: {name: b, port: 1, refresh: 10ms}"), "envoys[0].dns.refresh: ", "from 1s to 1h"),
        (envoy("dns: {name: b, port: 1}\n- dns: {name: b, port: 1}"), ":4:8: envoys[1].dns: ", "only once"),
        (envoy("dns: {name: b, port: 1}\n  tls: {key_file: a.pem}"), "envoys[0].tls: ", "both `cert_file` and `key_file`"),
        (envoy("url: unix:/a\n  token: a\n  token_file: /b"), ":4:10: envoys[0].token: ", "not both"),
        (envoy("url: unix:/a\n  token: 'a b'"), ":4:10: envoys[0].token: ", "without spaces"),
        ("pools: [{cluster: a}]\n".to_owned(), ":1:19: pools[0]: ", "`replicas`, `dns` or `files`"),
        (pool("dns: [{name: '10.0.0.1', port: 1}]"), "pools[0].dns[0].name: ", "give it under `replicas`"),
        (pool("dns: [{name: 'a:80', port: 1}]"), "pools[0].dns[0].name: ", "without a port"),
        (pool("dns: [{name: a, port: 0}]"), "pools[0].dns[0].port: ", "1 to 65535"),
        (pool("dns: [{name: a, port: 70000}]"), "pools[0].dns[0].port: ", "a whole number"),
        (pool("dns: [{name: a, port: 1, refresh: 10ms}]"), "pools[0].dns[0].refresh: ", "from 1s to 1h"),
        (pool("dns: [{name: a, port: 1, family: v5}]"), "pools[0].dns[0].family: ", "v4_only"),
        (pool("dns: [{name: a}]"), "pools[0].dns[0]: ", "missing field `port`"),
        (pool("files: [a.json, a.json]"), "pools[0].files[1]: ", "only once"),
        (pool("files: a.json"), "pools[0].files: ", "a list is needed"),
        (pool("files: [a.json], token: 'a b'"), "pools[0].token: ", "without spaces"),
        (pool("files: [a.json], token: a, token_file: b"), "pools[0].token: ", "not both"),
        (pool("files: [a.json], tls: {verify: true}"), "pools[0].tls.verify: ", "ca_file"),
        (format!("{POOL}api: {}\n", "{}"), ":2:6: api: ", "`token` or `token_file`"),
        (format!("{POOL}api: {}\n", "{token: a, token_file: b}"), "api.token: ", "not both"),
        (POOL.replace("a,", "a, max_num_seqs: some,"), ":1:36: pools[0].max_num_seqs: ", "a whole number"),
        (POOL.replace("a,", "a, cluster: b,"), ":1:22: pools[0]: ", "`cluster` is given twice"),
        (replica("{address: '127.0.0.1:9', drain: maybe}"), "pools[0].replicas[1].drain: ", "true or false"),
        ("pools: a\n".to_owned(), ":1:8: pools: ", "a list is needed"),
        (format!("{POOL}scrape: 250ms\n"), ":2:9: scrape: ", "keys with values"),
        ("pools: [\n".to_owned(), "homing.yaml:", ""),
        (String::new(), "homing.yaml", "`pools` is needed"),
        ("# nothing\n".to_owned(), "homing.yaml", "`pools` is needed"),
        ("listen: 127.0.0.1:1\n".to_owned(), ":1:1: ", "missing field `pools`"),
    ];
    for (text, place, allowed) in cases {
        let message = mistake(&text);
        assert!(
            message.contains(place) && message.contains(allowed),
            "expected `{place}` and `{allowed}` in:\n{message}\nfor:\n{text}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("none.yaml");
    let message = Config::load(&missing).expect_err("no file").to_string();
    assert!(message.starts_with(&missing.display().to_string()) && message.contains("cannot be read"), "{message}");
}

#[test]
fn a_token_is_never_shown() {
    let pool = POOL.replace("a,", "a, token: hunter2,");
    let config = parse(&format!(
        "{pool}api: {{token: hunter2}}\nenvoys: [{{url: 'unix:/a', token: hunter2}}]\naffinity: {{store: 'redis://a:hunter2@b:1'}}\n"
    ));
    let json = serde_json::to_string(&config).expect("JSON");
    for text in [format!("{config:?}"), config.summary(), json] {
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[test]
fn a_token_file_is_read_without_the_white_space_around_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("token");
    std::fs::write(&path, "secret\n").expect("a file");
    assert_eq!(TokenSource::File(path.clone()).read(), Ok("secret".to_owned()));
    std::fs::write(&path, "\n").expect("a file");
    assert!(TokenSource::File(path).read().is_err());
}
