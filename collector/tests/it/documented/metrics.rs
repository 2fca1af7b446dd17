//! The collector's table of docs/metrics.md and what a collector exports.

use std::collections::BTreeMap;

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, config, envoys, free_address, run};

const PAGE: &str = include_str!("../../../../docs/metrics.md");

/// The names of the page's table with their types.
fn documented() -> BTreeMap<String, String> {
    let (_, page) = PAGE.split_once("## The collector's\n").expect("the table's place");
    let lines = page.lines().skip_while(|line| !line.starts_with("| `")).take_while(|line| line.starts_with("| "));
    let rows = lines.flat_map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let (names, kind) = (cells.next().expect("names"), cells.next().expect("a type"));
        names.split(", ").map(|name| (name.trim_matches('`').to_owned(), kind.to_owned())).collect::<Vec<_>>()
    });
    rows.collect()
}

/// The names that a text for Prometheus describes, with their types.
fn exported(text: &str) -> BTreeMap<String, String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE homing_collector_")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

#[tokio::test]
async fn every_metric_is_documented_with_its_type() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let urls = [format!("url: '{}'", envoy.url()), format!("url: 'http://{}'", free_address().await)];
    // What is away makes the failures' counters.
    let replicas = [replica.address(), free_address().await];
    let collector = run(&config(&replicas, &envoys(&urls.each_ref().map(String::as_str)))).await;
    collector
        .until("everything once", |status| {
            let asked = |envoy: usize, key: &str| status["envoys"][envoy][key].as_u64() > Some(0);
            let replicas = &status["pools"][0]["replicas"];
            asked(0, "answered") && asked(1, "failed") && replicas[0]["state"] == "ready" && !replicas[1]["problem"].is_null()
        })
        .await;
    assert_eq!(documented(), exported(&collector.get("/metrics").await.2));
}
