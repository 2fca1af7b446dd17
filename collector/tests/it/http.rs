//! The collector's own HTTP.

use std::collections::BTreeMap;

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, config, config_with, envoys, free_address, run, says};
use homing_collector::exposition::samples;

/// The samples of a text by name and labels, read with the reader of the replicas' metrics.
fn read(text: &str) -> BTreeMap<String, f64> {
    let owned = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    samples(text.as_bytes())
        .map(|sample| {
            let parts = sample.parts().expect("a sample");
            let labels: Vec<_> = parts.labels.iter().map(|(name, value)| format!("{}={}", owned(name), owned(value))).collect();
            (format!("{}{{{}}}", owned(sample.name), labels.join(",")), parts.value)
        })
        .collect()
}

#[tokio::test]
async fn it_is_healthy_while_replicas_and_envoys_are_away() {
    let collector = run(&config(&[free_address().await], &envoys(&["url: 'unix:/nowhere'"]))).await;
    let (status, _, body) = collector.get("/healthz").await;
    assert_eq!((status.as_u16(), body.as_str()), (200, "ok\n"));
}

#[tokio::test]
async fn its_metrics_count_polls_and_exchanges_and_show_states() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let (good, away) = (replica.address(), free_address().await);
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let lost = free_address().await;
    let urls = [format!("url: '{}'", envoy.url()), format!("url: 'http://{lost}'")];
    let collector = run(&config(&[good, away], &envoys(&urls.each_ref().map(String::as_str)))).await;
    collector
        .until("everything once", |status| {
            let replicas = &status["pools"][0]["replicas"];
            replicas[0]["state"] == "ready"
                && says(&replicas[1]["problem"], "refused")
                && status["envoys"][0]["answered"].as_u64() > Some(0)
                && status["envoys"][1]["failed"].as_u64() > Some(0)
        })
        .await;
    let (status, headers, text) = collector.get("/metrics").await;
    assert_eq!(status.as_u16(), 200);
    assert_eq!(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let metrics = read(&text);
    let value =
        |name: &str| *metrics.get(&format!("homing_collector_{name}")).unwrap_or_else(|| panic!("{name} is not in:\n{text}"));
    assert!(value(&format!("scrapes_total{{pool=pool,replica={good}}}")) >= 1.0);
    assert!(value(&format!("scrape_failures_total{{pool=pool,replica={away},reason=refused}}")) >= 1.0);
    assert!(value("scrape_duration_seconds_count{pool=pool}") >= 2.0);
    assert_eq!(value(&format!("replica_state{{pool=pool,replica={good},state=ready}}")), 1.0);
    assert_eq!(value(&format!("replica_state{{pool=pool,replica={good},state=down}}")), 0.0);
    assert_eq!(value(&format!("replica_state{{pool=pool,replica={away},state=down}}")), 1.0);
    assert!(value(&format!("snapshot_age_seconds{{pool=pool,replica={good}}}")) < 20.0);
    assert!(!text.contains(&format!("snapshot_age_seconds{{pool=\"pool\",replica=\"{away}\"")), "figures never read have no age");
    assert!(value(&format!("sync_exchanges_total{{envoy={}}}", envoy.url())) >= 1.0);
    assert!(value(&format!("sync_failures_total{{envoy=http://{lost},reason=unreachable}}")) >= 1.0);
    assert_eq!(value(&format!("endpoint_restarts_total{{pool=pool,replica={good}}}")), 0.0);
}

#[tokio::test]
async fn a_pool_without_a_replica_has_none_that_is_ready_and_says_so() {
    let collector = run(&config_with("  files: [/no/such/file]\n", "")).await;
    collector.until("a problem", |status| says(&status["pools"][0]["sources"][0]["problem"], "cannot be read")).await;
    let metrics = read(&collector.get("/metrics").await.2);
    assert_eq!(metrics.get("homing_collector_ready_replicas{pool=pool}"), Some(&0.0));
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere_and_holds_no_script_or_style_of_its_own() {
    let collector = run(&config(&[free_address().await], "")).await;
    let (status, headers, page) = collector.get("/").await;
    assert_eq!((status.as_u16(), &headers["content-type"]), (200, &"text/html; charset=utf-8".parse().expect("a value")));
    let policy = headers["content-security-policy"].to_str().expect("text");
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"), "{policy}");
    assert!(!policy.contains("unsafe") && headers.get("access-control-allow-origin").is_none());
    for inline in ["<style", "style=", "<script>", "onclick", "http://", "https://"] {
        assert!(!page.contains(inline), "{inline} is in:\n{page}");
    }
}

#[tokio::test]
async fn everything_the_page_and_its_scripts_name_is_there_and_is_not_sent_twice() {
    let collector = run(&config(&[free_address().await], "")).await;
    let mut wanted = vec!["/".to_owned()];
    let mut seen = std::collections::BTreeSet::new();
    while let Some(path) = wanted.pop() {
        let (status, headers, text) = collector.get(&path).await;
        assert_eq!(status.as_u16(), 200, "{path}");
        if path != "/" {
            assert_eq!(headers["cache-control"], "no-cache");
            let again = collector.get_if_changed(&path, headers["etag"].to_str().expect("text")).await;
            assert_eq!(again.as_u16(), 304, "{path}");
        }
        let absolute = text.split('"').filter(|part| part.starts_with("/assets/")).map(str::to_owned);
        let imported = text.split('\'').filter_map(|part| part.strip_prefix("./")).map(|name| format!("/assets/{name}"));
        wanted.extend(absolute.chain(imported).filter(|path| seen.insert(path.clone())));
    }
    assert!(seen.contains("/assets/console.css") && seen.contains("/assets/charts.js"), "{seen:?}");
    assert_eq!(collector.get("/assets/nothing.js").await.0.as_u16(), 404);
}

#[tokio::test]
async fn a_pool_shows_what_its_envoys_do_together() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let (one, two) = (FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Obey).await);
    let away = free_address().await;
    let urls = [format!("url: '{}'", one.url()), format!("url: '{}'", two.url()), format!("url: 'http://{away}'")];
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    let status = collector.until("both connected", |status| status["pools"][0]["routing"]["envoys_routing"] == 2).await;
    let (pool, routing) = (&status["pools"][0], &status["pools"][0]["routing"]);
    assert_eq!((&routing["envoys"], &routing["envoys_connected"]), (&3.into(), &2.into()));
    assert_eq!((&routing["affinity"], &routing["spill_threshold_auto"]), (&"on".into(), &true.into()));
    assert_eq!(routing["spill_threshold"], serde_json::json!({ "min": 8, "max": 8 }));
    assert_eq!((&routing["in_flight"], &routing["requests"]["placed"]), (&6.into(), &6.into()));
    assert_eq!((&routing["sticky_share"], &routing["counting_since_ms"]), (&0.0.into(), &1_700_000_000_000_u64.into()));
    let row = &pool["replicas"][0];
    assert_eq!(
        (&row["in_flight"], &row["held_conversations"], &row["recent_context_tokens"]),
        (&6.into(), &2.into(), &20_000.into())
    );
    assert_eq!(row["context_level"], "fits");
    // The fake engine's cache takes 4,194,304 tokens.
    assert_eq!((&pool["capacity"]["level"], &pool["capacity"]["typical_context_tokens"]), (&"fits".into(), &10_000.into()));
    let (_, _, envoys) = collector.get("/api/v1/envoys").await;
    let envoys: serde_json::Value = serde_json::from_str(&envoys).expect("JSON");
    assert_eq!(
        (&envoys[0]["connected"], &envoys[0]["filter_version"], &envoys[2]["connected"]),
        (&true.into(), &"0.1.0".into(), &false.into())
    );
    let (_, _, pool) = collector.get("/api/v1/pools/pool").await;
    assert_eq!(serde_json::from_str::<serde_json::Value>(&pool).expect("JSON")["cluster"], "pool");
    let metrics = read(&collector.get("/metrics").await.2);
    let name = replica.address();
    for (name, value) in [
        (format!("replica_requests_total{{pool=pool,replica={name},outcome=placed}}"), 6.0),
        (format!("replica_in_flight{{pool=pool,replica={name}}}"), 6.0),
        (format!("replica_recent_context_tokens{{pool=pool,replica={name}}}"), 20_000.0),
        (format!("replica_prompt_tokens_total{{pool=pool,replica={name},source=cached}}"), 4096.0),
        (format!("replica_prompt_tokens_total{{pool=pool,replica={name},source=computed}}"), 1984.0),
        ("pool_affinity{pool=pool}".to_owned(), 1.0),
        ("pool_spill_threshold{pool=pool}".to_owned(), 8.0),
        (format!("envoy_connected{{envoy=http://{away}}}"), 0.0),
        (format!("envoy_filter_info{{envoy={},version=0.1.0}}", one.url()), 1.0),
    ] {
        assert_eq!(metrics.get(&format!("homing_collector_{name}")), Some(&value), "{name}");
    }
}

#[tokio::test]
async fn without_an_envoy_nothing_is_made_up() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let collector = run(&config(&[replica.address()], "")).await;
    collector.until_replica(0, "ready").await;
    let pool = &collector.status().await["pools"][0];
    let routing = &pool["routing"];
    for unknown in [
        &routing["affinity"],
        &routing["in_flight"],
        &routing["sticky_share"],
        &pool["capacity"],
        &pool["replicas"][0]["in_flight"],
    ] {
        assert!(unknown.is_null(), "{pool:#}");
    }
}

#[tokio::test]
async fn the_history_is_asked_for_by_pool() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let collector = run(&config(&[replica.address()], "")).await;
    collector.until("a step", |status| status["pools"][0]["hour"]["step"].as_u64() >= Some(1)).await;
    let (status, _, text) = collector.get("/api/v1/history?pool=pool").await;
    let history: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status.as_u16(), &history["step_seconds"]), (200, &5.into()));
    assert_eq!(history["replicas"][0]["replica"], replica.address().to_string());
    for (path, expected) in
        [("history", 400), ("history?pool=pool&since=x", 400), ("history?pool=other", 404), ("pools/other", 404)]
    {
        let (status, _, text) = collector.get(&format!("/api/v1/{path}")).await;
        assert_eq!(status.as_u16(), expected, "{text}");
        assert!(text.starts_with("{\"error\":") && (text.contains("`pool`") || text.contains("since")), "{text}");
    }
}

#[tokio::test]
async fn a_stream_brings_the_state_at_once_and_again_when_something_changes() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let collector = run(&config(&[replica.address()], "")).await;
    collector.until_replica(0, "ready").await;
    let mut stream = collector.stream("/api/v1/events").await;
    let first = stream.next_state().await;
    assert_eq!(first["pools"][0]["replicas"][0]["state"], "ready");
    replica.server.stop().await;
    let began = std::time::Instant::now();
    while stream.next_state().await["pools"][0]["replicas"][0]["state"] != "down" {
        assert!(began.elapsed().as_secs() < 20, "the stream never said so");
    }
}

#[tokio::test]
async fn only_names_of_its_own_are_answered() {
    let text = config(&[free_address().await], "");
    let collector = run(&format!("allowed_hosts: [Console.Example]\n{text}")).await;
    for path in ["/", "/api/v1/pools", "/metrics", "/assets/console.js"] {
        for (host, expected) in [("console.example", 200), ("localhost:1", 200), ("[::1]", 200), ("evil.example", 421)] {
            assert_eq!(collector.get_as(host, path).await.as_u16(), expected, "{host}{path}");
        }
    }
    assert_eq!(collector.get_as("evil.example", "/healthz").await.as_u16(), 200, "a probe may use any name");
}

#[tokio::test]
async fn nothing_can_be_written() {
    let collector = run(&config(&[free_address().await], "")).await;
    for path in ["/", "/api/v1/pools", "/api/v1/history", "/api/v1/events", "/metrics"] {
        assert_eq!(collector.post(path).await.as_u16(), 405, "{path}");
    }
}

#[tokio::test]
async fn other_paths_are_not_found() {
    let collector = run(&config(&[free_address().await], "")).await;
    assert_eq!(collector.get("/nothing").await.0.as_u16(), 404);
}

#[tokio::test]
async fn what_admission_holds_and_why_is_shown_of_all_envoys_that_admit_together() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let fakes = [
        FakeEnvoy::start(Behaviour::Admit).await,
        FakeEnvoy::start(Behaviour::Admit).await,
        FakeEnvoy::start(Behaviour::Obey).await,
    ];
    let urls = fakes.each_ref().map(|envoy| format!("url: '{}'", envoy.url()));
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    let status = collector.until("all connected", |status| status["pools"][0]["routing"]["envoys_routing"] == 3).await;
    let (admission, row) = (&status["pools"][0]["admission"], &status["pools"][0]["replicas"][0]);
    assert_eq!((&admission["held"], &admission["oldest_held_ms"]), (&4.into(), &1_500.into()));
    assert_eq!(admission["by_reason"], serde_json::json!({ "no_room": 2, "behind_others": 2, "turns_used": 0, "outgrown": 0 }));
    // What all conversations share is in the cache once.
    assert_eq!((&row["active_conversations"], &row["active_context_tokens"]), (&4.into(), &41_000.into()));
    assert_eq!((&admission["active_context_tokens"], &admission["cache_tokens"]), (&41_000.into(), &row["cache_tokens"]));
    let metrics = read(&collector.get("/metrics").await.2);
    let name = replica.address();
    for (name, value) in [
        ("pool_held_requests{pool=pool,reason=no_room}".to_owned(), 2.0),
        ("pool_held_requests{pool=pool,reason=turns_used}".to_owned(), 0.0),
        ("pool_oldest_held_seconds{pool=pool}".to_owned(), 1.5),
        // The fake engine's cache takes 4,194,304 tokens.
        ("pool_active_context_ratio{pool=pool}".to_owned(), 41_000.0 / 4_194_304.0),
        (format!("replica_active_conversations{{pool=pool,replica={name}}}"), 4.0),
        (format!("replica_active_context_tokens{{pool=pool,replica={name}}}"), 41_000.0),
    ] {
        assert_eq!(metrics.get(&format!("homing_collector_{name}")), Some(&value), "{name}");
    }

    // Where nobody admits by working set, or nobody says so any more, nothing is shown of it.
    for envoy in &fakes {
        envoy.set(Behaviour::Obey);
    }
    let status = collector.until("no admission", |status| status["pools"][0]["admission"].is_null()).await;
    assert!(status["pools"][0]["replicas"][0]["active_context_tokens"].is_null());
    let text = collector.get("/metrics").await.2;
    assert!(!read(&text).keys().any(|name| name.contains("held_requests") || name.contains("active_con")), "{text}");
}
