//! The collector's own HTTP.

use std::collections::BTreeMap;

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, config, envoys, free_address, run, says};
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
async fn the_status_page_shows_pools_and_envoys_and_escapes_what_it_shows() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let text = config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]));
    let collector = run(&text.replace("cluster: pool", "cluster: '<script>alert(1)</script>'")).await;
    collector.until_replica(0, "ready").await;
    collector.until_envoy(0, "taken", |envoy| envoy["answered"].as_u64() > Some(0)).await;
    let (status, headers, page) = collector.get("/").await;
    assert_eq!((status.as_u16(), &headers["content-type"]), (200, &"text/html; charset=utf-8".parse().expect("a value")));
    assert!(page.contains("Pool &#60;script&#62;") && !page.contains("<script"), "{page}");
    for part in
        [replica.address().to_string(), envoy.url(), "class=\"ready\">ready".to_owned(), "<td class=\"n\">3</td>".to_owned()]
    {
        assert!(page.contains(&part), "{part} is not in:\n{page}");
    }
    assert!(page.contains("http-equiv=\"refresh\""));
    assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("url("), "nothing comes from elsewhere");
}

#[tokio::test]
async fn other_paths_are_not_found() {
    let collector = run(&config(&[free_address().await], "")).await;
    assert_eq!(collector.get("/nothing").await.0.as_u16(), 404);
}
