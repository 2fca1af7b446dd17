//! Envoys that are found by a name: they come, are told everything, go, and are forgotten.

use std::sync::atomic::Ordering::SeqCst;

use homing_routing::binding::Binding;
use homing_routing::sync::Peers;
use serde_json::Value;

use crate::fakes::{
    Behaviour, FakeDns, FakeEnvoy, FakeReplica, IDLE, Metrics, Running, binding, config, envoys, run, run_with, says,
};

const NAME: &str = "gateways";

async fn replica() -> FakeReplica {
    FakeReplica::start(Metrics::Text(IDLE.to_owned())).await
}

/// A collector that finds Envoys at the port of `pod` under [`NAME`].
async fn collector(replica: &FakeReplica, pod: &FakeEnvoy, dns: &FakeDns) -> Running {
    let entry = format!("dns: {{ name: {NAME}, port: {}, refresh: 1s }}", pod.server.address.port());
    run_with(&config(&[replica.address()], &envoys(&[&entry])), dns.clone()).await
}

/// Whether there are exactly these Envoys, all of them connected.
fn connected(status: &Value, pods: &[&FakeEnvoy]) -> bool {
    let envoys = status["envoys"].as_array().expect("envoys");
    envoys.len() == pods.len()
        && envoys.iter().zip(pods).all(|(envoy, pod)| envoy["url"] == pod.url() && envoy["connected"] == true)
}

async fn until_connected(collector: &Running, pods: &[&FakeEnvoy]) -> Value {
    collector.until("these Envoys", |status| connected(status, pods)).await
}

fn peers(pod: &FakeEnvoy) -> Option<Peers> {
    Some(pod.state.taken().last()?.pools.first()?.replicas.first()?.peers)
}

fn is_handed_over(pod: &FakeEnvoy) -> bool {
    pod.state.taken().iter().any(|request| request.handed_over.is_some())
}

/// Every home it was sent, once, in the order of conversations.
fn homes(pod: &FakeEnvoy) -> Vec<Binding> {
    let mut homes = pod.state.got();
    homes.sort_unstable_by_key(|binding| binding.conversation);
    homes.dedup();
    homes
}

#[tokio::test]
async fn an_envoy_that_comes_is_told_everything_and_one_that_goes_is_forgotten() {
    let replica = replica().await;
    let [first, second, third] = FakeEnvoy::start_pods().await;
    let dns = FakeDns::default();
    dns.set(NAME, &[&first, &second]);
    let collector = collector(&replica, &first, &dns).await;
    let status = until_connected(&collector, &[&first, &second]).await;
    let source = &status["envoy_sources"][0];
    assert_eq!((&source["kind"], &source["endpoints"], &source["problem"]), (&"dns".into(), &2.into(), &Value::Null));
    let told: Vec<_> = (0..5_000).map(|n| binding(n, replica.address())).collect();
    first.state.tell(&told);
    collector.until("the homes", |status| status["affinity"]["conversations"] == 5_000).await;

    dns.set(NAME, &[&third, &second, &first]);
    until_connected(&collector, &[&first, &second, &third]).await;
    collector.until("a hand-over", |_| is_handed_over(&third)).await;
    assert!(homes(&third) == told, "it got {} homes", homes(&third).len());
    // Each answers that it has three in flight, and takes four for its own.
    collector.until("the load of both others", |_| peers(&third) == Some(Peers { in_flight: 6, own: 8 })).await;
    collector.until("the sums", |status| in_flight(status) == Some(9)).await;

    first.set(Behaviour::Refuse(500, ""));
    collector.until_envoy(0, "a failure", |envoy| says(&envoy["problem"], "500")).await;
    assert!(collector.get("/metrics").await.2.contains(&first.url()));
    dns.set(NAME, &[&second, &third]);
    let status = until_connected(&collector, &[&second, &third]).await;
    assert_eq!((in_flight(&status), &status["pools"][0]["routing"]["requests"]["placed"]), (Some(6), &6.into()));
    collector.until("the load of one other", |_| peers(&third) == Some(Peers { in_flight: 3, own: 4 })).await;
    // An exchange that had begun may still have arrived.
    let (asked, others) = (first.state.asked.load(SeqCst), second.state.taken().len());
    collector.until("ten exchanges with another", |_| second.state.taken().len() >= others + 10).await;
    assert_eq!(first.state.asked.load(SeqCst), asked);
    let gone = collector.get("/metrics").await.2.lines().filter(|line| line.contains(&first.url())).count();
    assert_eq!(gone, 0, "an Envoy that is gone leaves no metrics behind");

    // A new one at the address of one that is gone knows nothing, not even what that one told.
    first.state.taken.lock().expect("a lock").clear();
    first.set(Behaviour::Obey);
    dns.set(NAME, &[&first, &second, &third]);
    let status = until_connected(&collector, &[&first, &second, &third]).await;
    assert_eq!(status["envoys"][0]["failed"], 0, "it counts from its own start");
    collector.until("a hand-over to the new one", |_| is_handed_over(&first)).await;
    assert!(homes(&first) == told, "it got {} homes", homes(&first).len());
}

fn in_flight(status: &Value) -> Option<u64> {
    status["pools"][0]["routing"]["in_flight"].as_u64()
}

#[tokio::test]
async fn a_name_that_fails_keeps_its_envoys_and_is_shown_until_it_is_right() {
    let replica = replica().await;
    let [first, second] = FakeEnvoy::start_pods().await;
    let dns = FakeDns::default();
    let collector = collector(&replica, &first, &dns).await;
    let problem = "gateways cannot be looked up (NXDOMAIN)";
    let status = collector.until(problem, |status| says(&status["envoy_sources"][0]["problem"], problem)).await;
    assert!(connected(&status, &[]) && status["envoy_sources"][0]["endpoints"].is_null(), "{status:#}");

    dns.set(NAME, &[&first]);
    let status = until_connected(&collector, &[&first]).await;
    assert!(status["envoy_sources"][0]["problem"].is_null());
    let metric = |value| format!("envoy_discovery_failing{{source=\"{NAME}:{}\"}} {value}\n", first.server.address.port());
    assert!(collector.get("/metrics").await.2.contains(&metric("0.0")));

    dns.remove(NAME);
    collector.until(problem, |status| says(&status["envoy_sources"][0]["problem"], problem)).await;
    assert!(collector.get("/metrics").await.2.contains(&metric("1.0")));
    let taken = first.state.taken().len();
    let status = collector.until("ten more snapshots", |_| first.state.taken().len() >= taken + 10).await;
    assert!(connected(&status, &[&first]), "{status:#}");

    dns.set(NAME, &[&second]);
    let status = until_connected(&collector, &[&second]).await;
    assert!(status["envoy_sources"][0]["problem"].is_null());
}

#[tokio::test]
async fn the_systems_names_count_and_what_is_found_is_reached_as_its_entry_says() {
    let replica = replica().await;
    let [envoy, named] = [FakeEnvoy::start(Behaviour::Want("abc", 401)).await, FakeEnvoy::start(Behaviour::Obey).await];
    let port = envoy.server.address.port();
    let entry = format!("dns: {{ name: localhost, port: {port}, family: v4_only, refresh: 1s }}, token: abc");
    let collector = run(&config(&[replica.address()], &envoys(&[&entry, &format!("url: '{}'", named.url())]))).await;
    let status = until_connected(&collector, &[&envoy, &named]).await;
    assert_eq!(status["envoy_sources"][0]["name"], format!("localhost:{port}"));
}
