//! What the stand-in replica does over HTTP, beyond the shape of its answers.

use homing_bench::engine::EngineConfig;
use homing_bench::replica::{Fault, Received, Replica, ReplicaConfig};
use serde_json::{Value, json};
use std::time::Duration;

async fn replica(speed: f64) -> Replica {
    let engine = EngineConfig { kv_cache_tokens: 36_000, ..EngineConfig::default() };
    Replica::start(ReplicaConfig { speed, engine, ..ReplicaConfig::default() }).await.unwrap()
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn chat(replica: &Replica, body: &Value) -> Value {
    let response = client().post(format!("{}/v1/chat/completions", replica.url())).json(body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

/// The value of a series that has only the usual labels.
async fn metric(replica: &Replica, name: &str) -> f64 {
    let text = client().get(format!("{}/metrics", replica.url())).send().await.unwrap().text().await.unwrap();
    let start = format!("{name}{{engine=\"0\",model_name=\"qwen3-4b\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
}

/// Polls until the metric has the value.
async fn until_metric(replica: &Replica, name: &str, value: f64) {
    let reached = async {
        while metric(replica, name).await != value {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), reached).await.unwrap_or_else(|_| panic!("{name} has not become {value}"));
}

async fn set_fault(replica: &Replica, fault: Fault) {
    let response = client().post(format!("{}/debug/fault", replica.url())).json(&fault).send().await.unwrap();
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn the_next_turn_finds_prompt_and_answer_of_the_turn_before_in_either_dialect() {
    let replica = replica(1000.0).await;
    let text = "word ".repeat(200);
    let mut messages = vec![json!({ "role": "user", "content": text })];
    let first = chat(&replica, &json!({ "model": "qwen3-4b", "messages": messages, "max_tokens": 40 })).await;
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "go on" }));
    let whole_blocks = (first["usage"]["total_tokens"].as_u64().unwrap() - 1) / 16 * 16;
    let second = chat(&replica, &json!({ "model": "qwen3-4b", "messages": messages, "max_tokens": 5 })).await;
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], whole_blocks);

    let body = json!({ "model": "qwen3-4b", "messages": messages, "max_tokens": 5 });
    let third = client().post(format!("{}/v1/messages", replica.url())).json(&body).send().await.unwrap();
    let usage = third.json::<Value>().await.unwrap()["usage"].clone();
    let prompt = second["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(usage["cache_read_input_tokens"], (prompt - 1) / 16 * 16);
}

#[tokio::test]
async fn an_answer_is_as_long_as_asked_for_and_the_same_each_time() {
    let replica = replica(1000.0).await;
    let ask = |tokens: Option<u32>| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "hello" }] });
        if let Some(tokens) = tokens {
            body["max_completion_tokens"] = tokens.into();
        }
        body
    };
    let default = chat(&replica, &ask(None)).await;
    assert_eq!(default["usage"]["completion_tokens"], 16);
    let (one, two) = (chat(&replica, &ask(Some(7))).await, chat(&replica, &ask(Some(7))).await);
    assert_eq!(one["usage"]["completion_tokens"], 7);
    assert_eq!(one["choices"], two["choices"]);
}

#[tokio::test]
async fn counters_and_histograms_follow_the_requests() {
    let replica = replica(1000.0).await;
    let body = json!({ "messages": [{ "role": "user", "content": "x".repeat(400) }], "max_tokens": 5 });
    let prompt = chat(&replica, &body).await["usage"]["prompt_tokens"].as_f64().unwrap();
    chat(&replica, &body).await;
    assert_eq!(metric(&replica, "vllm:prompt_tokens_total").await, 2.0 * prompt);
    assert_eq!(metric(&replica, "vllm:prompt_tokens_cached_total").await, ((prompt - 1.0) / 16.0).floor() * 16.0);
    assert_eq!(metric(&replica, "vllm:generation_tokens_total").await, 10.0);
    assert_eq!(metric(&replica, "vllm:time_to_first_token_seconds_count").await, 2.0);
    assert_eq!(metric(&replica, "vllm:e2e_request_latency_seconds_count").await, 2.0);
    assert_eq!(metric(&replica, "vllm:kv_cache_usage_perc").await, 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_along() {
    let replica = replica(1.0).await;
    for stream in [true, false] {
        let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 10_000, "stream": stream });
        let request = tokio::spawn(client().post(format!("{}/v1/chat/completions", replica.url())).json(&body).send());
        until_metric(&replica, "vllm:num_requests_running", 1.0).await;
        // Streamed, the answer has begun and waits in the task's result; otherwise the task still waits for it.
        if stream {
            drop(request.await);
        } else {
            request.abort();
        }
        until_metric(&replica, "vllm:num_requests_running", 0.0).await;
    }
}

#[tokio::test]
async fn bodies_of_many_megabytes_are_read() {
    let replica = replica(1000.0).await;
    let body = json!({ "messages": [{ "role": "user", "content": "x".repeat(20 << 20) }] });
    let response = client().post(format!("{}/v1/chat/completions", replica.url())).json(&body).send().await.unwrap();
    // Read and understood: it is the prompt's length that is refused.
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["param"], "input_tokens");
}

#[tokio::test]
async fn http2_with_prior_knowledge_is_served() {
    let replica = replica(1000.0).await;
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "stream": true });
    let response = client.post(format!("{}/v1/chat/completions", replica.url())).json(&body).send().await.unwrap();
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn received_requests_are_shown_and_the_pollers_are_not() {
    let replica = replica(1000.0).await;
    let url = format!("{}/v1/chat/completions?a=b", replica.url());
    client().post(url).header("x-session-id", "s1").body("hello").send().await.unwrap();
    metric(&replica, "vllm:num_requests_running").await;
    let received: Vec<Received> =
        client().get(format!("{}/debug/requests", replica.url())).send().await.unwrap().json().await.unwrap();
    let [received] = &received[..] else { panic!("{received:?}") };
    assert_eq!((received.method.as_str(), received.path.as_str()), ("POST", "/v1/chat/completions?a=b"));
    assert!(received.headers.contains(&("x-session-id".to_owned(), "s1".to_owned())));
    assert_eq!(received.body_length, 5);
    assert_eq!(received.body_sha256, "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824");
}

#[tokio::test]
async fn generation_endpoints_misbehave_as_told_and_others_do_not() {
    let replica = replica(1000.0).await;
    let url = format!("{}/v1/chat/completions", replica.url());
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }] });

    set_fault(&replica, Fault::Error500).await;
    let response = client().post(&url).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["type"], "InternalServerError");

    set_fault(&replica, Fault::Reset).await;
    let error = client().post(&url).json(&body).send().await.unwrap_err();
    assert!(error.is_request() && !error.is_connect(), "{error:?}");

    set_fault(&replica, Fault::Hang).await;
    let hanging = tokio::time::timeout(Duration::from_millis(100), client().post(&url).json(&body).send()).await;
    assert!(hanging.is_err(), "{hanging:?}");
    let health = client().get(format!("{}/health", replica.url())).send().await.unwrap();
    assert_eq!(health.status(), 200);

    set_fault(&replica, Fault::None).await;
    chat(&replica, &body).await;
}

#[tokio::test]
async fn dropping_a_replica_cuts_what_is_in_flight() {
    let replica = replica(1.0).await;
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 10_000, "stream": true });
    let response = client().post(format!("{}/v1/chat/completions", replica.url())).json(&body).send().await.unwrap();
    drop(replica);
    let read = tokio::time::timeout(Duration::from_secs(10), response.bytes()).await.expect("the stream ends");
    assert!(read.is_err(), "cut, not ended");
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    for config in [
        ReplicaConfig { listen: ([0, 0, 0, 0], 0).into(), ..ReplicaConfig::default() },
        ReplicaConfig { speed: 0.0, ..ReplicaConfig::default() },
        ReplicaConfig { max_model_len: 0, ..ReplicaConfig::default() },
        ReplicaConfig { engine: EngineConfig { block_size: 0, ..EngineConfig::default() }, ..ReplicaConfig::default() },
        ReplicaConfig { engine: EngineConfig { max_num_seqs: 0, ..EngineConfig::default() }, ..ReplicaConfig::default() },
    ] {
        assert!(Replica::start(config.clone()).await.is_err(), "{config:?}");
    }
}
