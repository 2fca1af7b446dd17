//! The examples of docs/api.md and what a collector answers: the same keys.

use axum::http::Method;
use homing_collector::drain::DrainedBy;
use serde_json::Value;

use crate::fakes::{Behaviour, FakeDns, FakeEnvoy, FakeReplica, IDLE, Metrics, config, envoys, free_address, run_with};

const PAGE: &str = include_str!("../../../../docs/api.md");

/// The examples in the section of this heading.
fn examples(heading: &str) -> Vec<Value> {
    let (_, section) = PAGE.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let (section, _) = section.split_once("\n## ").unwrap_or((section, ""));
    let blocks = section.split("```json").skip(1).map(|block| block.split("```").next().expect("an end"));
    blocks.map(|block| serde_json::from_str(block).unwrap_or_else(|error| panic!("{heading}: {error}: {block}"))).collect()
}

/// Fails where an object has other keys than its example. Of lists the first entries are compared; what is `null` has no keys.
fn assert_keys(at: &str, example: &Value, answer: &Value) {
    match (example, answer) {
        (Value::Object(example), Value::Object(answer)) => {
            let keys = |object: &serde_json::Map<String, Value>| object.keys().cloned().collect::<std::collections::BTreeSet<_>>();
            assert_eq!(keys(example), keys(answer), "{at}: the page, and what is answered");
            example.iter().for_each(|(key, value)| assert_keys(&format!("{at}.{key}"), value, &answer[key]));
        }
        (Value::Array(example), Value::Array(answer)) => {
            let pair = example.first().zip(answer.first());
            pair.into_iter().for_each(|(example, answer)| assert_keys(&format!("{at}[]"), example, answer));
        }
        _ => {}
    }
}

#[tokio::test]
async fn the_examples_have_the_keys_that_are_answered() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let (plain, admits) = (FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Admit).await);
    let urls = [&plain, &admits].map(|envoy| format!("url: '{}'", envoy.url()));
    let more = format!(
        "affinity: {{ store: 'redis://{}' }}\n{}",
        free_address().await,
        envoys(&[&urls[0], &urls[1], "dns: { name: gateways, port: 9901 }"])
    );
    let collector = run_with(&config(&[replica.address()], &more), FakeDns::default()).await;
    let status = collector
        .until("both connected, and a step of the history", |status| {
            let pool = &status["pools"][0];
            pool["routing"]["envoys_routing"] == 2 && pool["capacity"].is_object() && pool["hour"]["step"].as_u64() > Some(0)
        })
        .await;

    let [pool, admission, all] = &examples("Pools")[..] else { panic!("a pool, its admission, and all") };
    assert_keys("pool", pool, &status["pools"][0]);
    assert_keys("admission", admission, &status["pools"][0]["admission"]);
    assert_keys("pools", all, &status);
    assert!(all["affinity"]["store"].is_object() && all["envoy_sources"][0].is_object(), "{all}");

    let [envoys] = &examples("Envoys")[..] else { panic!("the Envoys") };
    assert_keys("envoys", envoys, &status["envoys"]);

    let [history] = &examples("History")[..] else { panic!("a history") };
    let (_, _, answer) = collector.get("/api/v1/history?pool=pool").await;
    assert_keys("history", history, &serde_json::from_str(&answer).expect("JSON"));

    let [drain] = &examples("Draining")[..] else { panic!("a drain") };
    let (_, answer) = collector.call(Method::GET, &format!("/api/v1/replicas/{}/drain", replica.address()), None).await;
    assert_keys("drain", drain, &answer);
    let _: Vec<DrainedBy> = serde_json::from_value(drain["drained_by"].clone()).expect("who drains it");
}
