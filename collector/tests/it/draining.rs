//! Draining a replica while the collector runs: by the API, by the command, and by a file.

use std::process::Output;

use axum::http::{Method, StatusCode};
use homing_routing::sync::ReplicaState;
use serde_json::{Value, json};

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, Running, TWO_RANKS, config, envoys, run, says};

const API: &str = "api: { token: secret }\n";

async fn replica(text: &str) -> FakeReplica {
    FakeReplica::start(Metrics::Text(text.to_owned())).await
}

fn path(replica: impl std::fmt::Display) -> String {
    format!("/api/v1/replicas/{}/drain", replica.to_string().replace('#', "%23"))
}

#[tokio::test]
async fn a_replica_drains_from_the_call_on_until_it_is_undone() {
    let replica = replica(IDLE).await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let more = format!("{API}{}", envoys(&[&format!("url: '{}'", envoy.url())]));
    let collector = run(&config(&[replica.address()], &more)).await;
    collector.until_replica(0, "ready").await;
    collector.until_envoy(0, "an answer", |envoy| envoy["answered"].as_u64() > Some(0)).await;

    let path = path(replica.address());
    let (status, answer) = collector.call(Method::POST, &path, Some("secret")).await;
    let expected = json!({ "replica": replica.address().to_string(), "drained_by": ["api"], "in_flight": 3 });
    assert_eq!((status, &answer), (StatusCode::OK, &expected));
    assert_eq!(
        collector.call(Method::POST, &path, Some("secret")).await,
        (StatusCode::OK, answer),
        "saying it twice changes nothing"
    );
    assert_eq!(collector.until_replica(0, "draining").await["drained_by"], json!(["api"]));
    collector.until("the Envoy told", |_| pushed(&envoy) == Some(ReplicaState::Draining)).await;

    let (status, answer) = collector.call(Method::DELETE, &path, Some("secret")).await;
    assert_eq!((status, &answer["drained_by"]), (StatusCode::OK, &json!([])));
    collector.until_replica(0, "ready").await;
}

/// The state of the first replica in the last snapshot an Envoy took.
fn pushed(envoy: &FakeEnvoy) -> Option<ReplicaState> {
    Some(envoy.state.taken().iter().rev().find_map(|request| request.pools.first())?.replicas[0].state)
}

#[tokio::test]
async fn one_rank_can_drain_alone_and_an_address_stands_for_all_its_ranks() {
    let replica = replica(TWO_RANKS).await;
    let collector = run(&config(&[replica.address()], API)).await;
    collector.until_replica(1, "ready").await;
    let rank = path(format!("{}#1", replica.address()));
    assert_eq!(collector.call(Method::POST, &rank, Some("secret")).await.0, StatusCode::OK);
    collector.until_replica(1, "draining").await;
    collector.until_replica(0, "ready").await;
    assert_eq!(collector.call(Method::DELETE, &rank, Some("secret")).await.0, StatusCode::OK);
    assert_eq!(collector.call(Method::POST, &path(replica.address()), Some("secret")).await.0, StatusCode::OK);
    collector.until_replica(0, "draining").await;
    collector.until_replica(1, "draining").await;
}

#[tokio::test]
async fn nothing_is_changed_without_the_token_and_the_answer_says_what_to_do() {
    let replica = replica(IDLE).await;
    let path = path(replica.address());
    let read_only = run(&config(&[replica.address()], "")).await;
    let (status, answer) = read_only.call(Method::POST, &path, Some("secret")).await;
    assert!(status == StatusCode::FORBIDDEN && says(&answer["error"], "api.token_file"), "{answer}");

    let collector = run(&config(&[replica.address()], API)).await;
    for token in [None, Some(""), Some("secre"), Some("secrets"), Some("Secret")] {
        for method in [Method::POST, Method::DELETE] {
            let (status, answer) = collector.call(method, &path, token).await;
            assert!(status == StatusCode::UNAUTHORIZED && says(&answer["error"], "Authorization: Bearer"), "{token:?}: {answer}");
        }
    }
    let (status, answer) = collector.call(Method::GET, &path, None).await;
    assert_eq!((status, &answer["drained_by"]), (StatusCode::OK, &json!([])), "reading needs none");
    for (name, status, hint) in [
        ("10.9.9.9:1", StatusCode::NOT_FOUND, "/api/v1/pools"),
        ("gpu-1:8000", StatusCode::BAD_REQUEST, "ip:port"),
        (&format!("{}%231", replica.address()), StatusCode::NOT_FOUND, "no pool has"),
    ] {
        let (seen, answer) = collector.call(Method::POST, &format!("/api/v1/replicas/{name}/drain"), Some("secret")).await;
        assert!(seen == status && says(&answer["error"], hint), "{name}: {seen} {answer}");
    }
}

#[tokio::test]
async fn a_collector_that_stands_by_refuses_to_drain_and_names_the_way_that_works() {
    let replica = replica(IDLE).await;
    let (first, second) = (FakeEnvoy::start(Behaviour::Standby).await, FakeEnvoy::start(Behaviour::Standby).await);
    let urls = [first.url(), second.url()].map(|url| format!("url: '{url}'"));
    let more = format!("{API}{}", envoys(&urls.each_ref().map(String::as_str)));
    let collector = run(&config(&[replica.address()], &more)).await;
    let standby = |envoy: &Value| envoy["connected"] == true && envoy["standby"] == true;
    collector.until("both stand by", |status| status["envoys"].as_array().expect("Envoys").iter().all(standby)).await;
    let path = path(replica.address());
    for method in [Method::POST, Method::DELETE] {
        let (status, answer) = collector.call(method, &path, Some("secret")).await;
        assert!(status == StatusCode::CONFLICT && says(&answer["error"], "drain_file"), "{status} {answer}");
    }
    assert_eq!(collector.call(Method::GET, &path, None).await.1["drained_by"], json!([]));
    let folder = tempfile::tempdir().expect("a folder");
    let token = folder.path().join("token");
    std::fs::write(&token, "secret").expect("a file");
    let arguments = [&replica.address().to_string(), "--token-file", token.to_str().expect("a path")];
    let (done, said) = command(&collector, &arguments).await;
    assert!(!done && said.contains("this collector stands by"), "{said}");

    second.set(Behaviour::Obey);
    collector.until_envoy(1, "one is told by this collector", |envoy| envoy["standby"] == false).await;
    assert_eq!(collector.call(Method::POST, &path, Some("secret")).await.0, StatusCode::OK);
    second.set(Behaviour::Standby);
    collector.until_envoy(1, "it stands by again", |envoy| envoy["standby"] == true).await;
    let (status, answer) = collector.call(Method::DELETE, &path, Some("secret")).await;
    assert_eq!((status, &answer["drained_by"]), (StatusCode::OK, &json!([])), "what was said here can be taken back here");
}

#[tokio::test]
async fn a_drain_file_is_followed_and_a_broken_one_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("drain.yaml");
    let (first, second) = (replica(IDLE).await, replica(IDLE).await);
    std::fs::write(&path, format!("- {}\n", first.address())).expect("a file");
    let more = format!("drain_file: {}\n", path.display());
    let collector = run(&config(&[first.address(), second.address()], &more)).await;
    assert_eq!(collector.until_replica(0, "draining").await["drained_by"], json!(["file"]));
    collector.until_replica(1, "ready").await;

    std::fs::write(&path, "- not a replica\n").expect("a file");
    let status = collector.until("the mistake", |status| says(&status["drain_file_problem"], "ip:port")).await;
    assert_eq!(status["pools"][0]["replicas"][0]["state"], "draining");
    let metrics = collector.get("/metrics").await.2;
    assert!(metrics.contains("\nhoming_collector_drain_file_failing 1"), "{metrics}");
    assert!(metrics.contains("\nhoming_collector_ready_replicas{pool=\"pool\"} 1"), "{metrics}");

    std::fs::write(&path, format!("- {}\n", second.address())).expect("a file");
    collector.until_replica(1, "draining").await;
    let status = collector.until_replica(0, "ready").await;
    assert_eq!(status["drained_by"], json!([]));
    assert!(collector.status().await["drain_file_problem"].is_null());
    assert!(collector.get("/metrics").await.2.contains("\nhoming_collector_drain_file_failing 0"));
}

/// Runs `homing-collector drain` against a collector.
async fn command(collector: &Running, arguments: &[&str]) -> (bool, String) {
    let url = format!("http://{}", collector.collector.address());
    let arguments: Vec<_> = ["drain", "--url", &url].into_iter().chain(arguments.iter().copied()).map(str::to_owned).collect();
    let run = move || std::process::Command::new(env!("CARGO_BIN_EXE_homing-collector")).args(arguments).output();
    let Output { status, stdout, stderr } = tokio::task::spawn_blocking(run).await.expect("a thread").expect("a command");
    (status.success(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

#[tokio::test]
async fn the_command_drains_undoes_and_says_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let token = folder.path().join("token");
    std::fs::write(&token, "secret\n").expect("a file");
    let token = token.to_str().expect("a path");
    let (first, second) = (replica(TWO_RANKS).await, replica(IDLE).await);
    let text = format!("{}    drain: true\n", config(&[first.address(), second.address()], API));
    let collector = run(&text).await;
    collector.until_replica(1, "ready").await;

    let rank = format!("{}#1", first.address());
    let (done, said) = command(&collector, &[&rank, "--token-file", token]).await;
    assert!(done && said.contains(&format!("{rank} drains, by the API; 0 requests in flight")), "{said}");
    collector.until_replica(1, "draining").await;
    let (done, said) = command(&collector, &[&rank, "--undo", "--json", "--token-file", token]).await;
    let answer: Value = serde_json::from_str(&said).expect("JSON");
    assert!(done && answer["drained_by"] == json!([]), "{said}");
    collector.until_replica(1, "ready").await;

    let (done, said) = command(&collector, &[&second.address().to_string(), "--undo", "--token-file", token]).await;
    assert!(!done && said.contains("the configuration (`drain: true`)"), "{said}");
    let (done, said) = command(&collector, &[&rank]).await;
    assert!(!done && said.contains("--token-file"), "{said}");
    let (done, said) = command(&collector, &["10.9.9.9:1", "--token-file", token]).await;
    assert!(!done && said.contains("no pool has a replica 10.9.9.9:1"), "{said}");
    let (done, said) = command(&collector, &["gpu-1:80", "--token-file", token]).await;
    assert!(!done && said.contains("ip:port"), "{said}");
}
