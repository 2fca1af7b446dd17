//! Endpoints that are found: by files and by names, and what happens when they are not.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, Running, config_with, envoys, run, says};

async fn replica() -> FakeReplica {
    FakeReplica::start(Metrics::Text(IDLE.to_owned())).await
}

/// Puts a list in place as a careful program does: at once.
fn write(path: &Path, targets: &[SocketAddr]) {
    replace(path, &json!([{ "targets": targets, "labels": { "rack": "a" } }]).to_string());
}

fn replace(path: &Path, content: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).expect("a file");
    std::fs::rename(&next, path).expect("a rename");
}

fn targets_file(folder: &tempfile::TempDir) -> (PathBuf, String) {
    let path = folder.path().join("targets.json");
    let keys = format!("  files: ['{}']\n", path.display());
    (path, keys)
}

/// Whether the pool has exactly these endpoints, all of them ready.
fn ready(status: &Value, addresses: &[SocketAddr]) -> bool {
    let replicas = status["pools"][0]["replicas"].as_array().expect("replicas");
    replicas.len() == addresses.len()
        && replicas.iter().zip(addresses).all(|(seen, address)| seen["replica"] == address.to_string() && seen["state"] == "ready")
}

async fn until_ready(collector: &Running, addresses: &[SocketAddr]) -> Value {
    collector.until(&format!("{addresses:?} ready"), |status| ready(status, addresses)).await
}

#[tokio::test]
async fn what_a_file_adds_is_polled_and_pushed_and_what_it_drops_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, keys) = targets_file(&folder);
    let (first, second, third) = (replica().await, replica().await, replica().await);
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    write(&path, &[first.address()]);
    let collector = run(&config_with(&keys, &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    until_ready(&collector, &[first.address()]).await;

    write(&path, &[second.address(), third.address()]);
    let status = until_ready(&collector, &[second.address(), third.address()]).await;
    assert_eq!(status["pools"][0]["sources"][0]["endpoints"], 2);
    // A poll that had begun may still have arrived.
    let (polls, others) = (first.asked(), second.asked());
    collector.until("ten polls of another", |_| second.asked() >= others + 10).await;
    assert_eq!(first.asked(), polls);
    let gone = format!("replica=\"{}\"", first.address());
    assert!(!collector.get("/metrics").await.2.contains(&gone), "an endpoint that is gone leaves no metrics behind");

    let known = envoy.state.taken().len();
    collector.until("a later snapshot", |_| envoy.state.taken().len() > known).await;
    let last = envoy.state.taken().pop().expect("a snapshot");
    let pushed: Vec<_> = last.pools[0].replicas.iter().map(|report| report.replica.address).collect();
    assert_eq!(pushed, [second.address(), third.address()]);
}

#[tokio::test]
async fn a_broken_file_keeps_the_last_list_and_is_shown_until_it_is_right() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, keys) = targets_file(&folder);
    let (first, second) = (replica().await, replica().await);
    write(&path, &[first.address()]);
    let collector = run(&config_with(&keys, "")).await;
    until_ready(&collector, &[first.address()]).await;

    for (content, problem) in [("[{\"targets\": [", "a list of groups"), ("", "holds nothing")] {
        replace(&path, content);
        let shown = |status: &Value| says(&status["pools"][0]["sources"][0]["problem"], problem);
        let status = collector.until(problem, shown).await;
        assert!(ready(&status, &[first.address()]), "{status}");
        assert!(collector.get("/metrics").await.2.contains("discovery_failing{pool=\"pool\",source=\""), "it is counted too");
    }
    std::fs::remove_file(&path).expect("a file less");
    collector.until("no file", |status| says(&status["pools"][0]["sources"][0]["problem"], "cannot be read")).await;

    write(&path, &[second.address()]);
    let status = until_ready(&collector, &[second.address()]).await;
    assert!(status["pools"][0]["sources"][0]["problem"].is_null());
}

#[tokio::test]
async fn a_pool_whose_replicas_were_never_found_is_not_pushed_so_that_envoys_keep_what_they_have() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, keys) = targets_file(&folder);
    let first = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let collector = run(&config_with(&keys, &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    collector.until("three snapshots", |_| envoy.state.taken().len() >= 3).await;
    assert!(envoy.state.taken().iter().all(|snapshot| snapshot.pools.is_empty()));

    write(&path, &[first.address()]);
    until_ready(&collector, &[first.address()]).await;
    let pushed = |_: &Value| envoy.state.taken().last().is_some_and(|snapshot| !snapshot.pools.is_empty());
    collector.until("the pool", pushed).await;
    let first_seen = envoy.state.taken().into_iter().find(|snapshot| !snapshot.pools.is_empty()).expect("a snapshot");
    assert_eq!(first_seen.pools[0].replicas.len(), 1, "never without its replica");

    write(&path, &[]);
    let emptied = |_: &Value| envoy.state.taken().last().is_some_and(|snapshot| snapshot.pools[0].replicas.is_empty());
    collector.until("a list that says there are none", emptied).await;
}

#[tokio::test]
async fn names_are_looked_up_in_dns_and_in_files_and_each_endpoint_is_polled_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, keys) = targets_file(&folder);
    let first = FakeReplica::start_at("127.0.0.1:0".parse().expect("an address"), Metrics::Text(IDLE.to_owned())).await;
    let port = first.address().port();
    replace(&path, &format!("- targets: ['{}', 'nothing.invalid:80']\n", first.address()));
    let dns = format!("  dns: [{{ name: localhost, port: {port}, family: v4_only, refresh: 1s }}]\n");
    let collector = run(&config_with(&format!("{dns}{keys}"), "")).await;
    let status = until_ready(&collector, &[first.address()]).await;
    let [dns, file] = &status["pools"][0]["sources"].as_array().expect("sources")[..] else { panic!("{status}") };
    assert_eq!((&dns["kind"], &dns["name"], &dns["endpoints"]), (&"dns".into(), &format!("localhost:{port}").into(), &1.into()));
    assert_eq!(file["kind"], "file");
    collector
        .until("a name without an address", |status| {
            says(&status["pools"][0]["sources"][1]["problem"], "nothing.invalid cannot be looked up")
        })
        .await;
}
