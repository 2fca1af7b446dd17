//! What the stand-in replica does over HTTP, beyond the shape of its answers.

use homing_bench::balancer::BalancerKind;
use homing_bench::engine::EngineConfig;
use homing_bench::replica::{Fault, Received, Replica, ReplicaConfig};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

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
        ReplicaConfig { ranks: 0, ..ReplicaConfig::default() },
        ReplicaConfig { max_model_len: 0, ..ReplicaConfig::default() },
        ReplicaConfig { engine: EngineConfig { block_size: 0, ..EngineConfig::default() }, ..ReplicaConfig::default() },
        ReplicaConfig { engine: EngineConfig { max_num_seqs: 0, ..EngineConfig::default() }, ..ReplicaConfig::default() },
    ] {
        assert!(Replica::start(config.clone()).await.is_err(), "{config:?}");
    }
}

/// A client that asks for a rank by header.
async fn complete_on(replica: &Replica, rank: &str, prompt: &str) -> Value {
    let request = client().post(format!("{}/v1/completions", replica.url())).header("x-data-parallel-rank", rank);
    let response = request.json(&json!({ "prompt": prompt, "max_tokens": 3 })).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

/// Prompt tokens that each engine has counted, by its label.
async fn prompt_tokens_by_engine(replica: &Replica) -> Vec<(String, f64)> {
    let text = client().get(format!("{}/metrics", replica.url())).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("vllm:prompt_tokens_total{engine=\""));
    lines.map(|line| (line.split('"').next().unwrap().to_owned(), line.rsplit(' ').next().unwrap().parse().unwrap())).collect()
}

#[tokio::test]
async fn a_rank_is_named_by_its_local_index_whatever_its_label_is() {
    for first_engine_label in [0, 2] {
        let config = ReplicaConfig { ranks: 2, first_engine_label, speed: 1000.0, ..ReplicaConfig::default() };
        let replica = Replica::start(config).await.unwrap();
        complete_on(&replica, "1", &"word ".repeat(100)).await;
        let second = (first_engine_label + 1).to_string();
        let expected = [(first_engine_label.to_string(), 0.0), (second, 125.0)];
        assert_eq!(prompt_tokens_by_engine(&replica).await, expected);
    }
}

#[tokio::test]
async fn each_rank_has_a_cache_of_its_own() {
    let replica = Replica::start(ReplicaConfig { ranks: 2, speed: 1000.0, ..ReplicaConfig::default() }).await.unwrap();
    let prompt = "word ".repeat(100);
    let cached = async |rank| complete_on(&replica, rank, &prompt).await["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!([cached("0").await, cached("1").await, cached("0").await, cached("1").await], [0, 0, 112, 112]);
}

#[tokio::test]
async fn requests_that_name_no_rank_are_balanced_and_their_ends_are_noticed() {
    for balancer in [BalancerKind::Vllm026, BalancerKind::Vllm027] {
        let config = ReplicaConfig { ranks: 2, balancer: Some(balancer), speed: 1000.0, ..ReplicaConfig::default() };
        let replica = Replica::start(config).await.unwrap();
        // `/v1/responses` ignores the header.
        for rank in ["0", "7", "nonsense", "1"] {
            let request = client().post(format!("{}/v1/responses", replica.url())).header("x-data-parallel-rank", rank);
            let response = request.json(&json!({ "input": "hello", "max_output_tokens": 1 })).send().await.unwrap();
            assert_eq!(response.status(), 200);
        }
        let counts: Vec<_> = prompt_tokens_by_engine(&replica).await.into_iter().map(|(_, tokens)| tokens).collect();
        assert_eq!(counts[0], counts[1], "one after the other, they go round: {counts:?}");
    }
}

#[tokio::test]
async fn a_slow_replica_answers_later() {
    let replica = replica(1000.0).await;
    set_fault(&replica, Fault::Slow { delay_ms: 300 }).await;
    let started = Instant::now();
    chat(&replica, &json!({ "messages": [{ "role": "user", "content": "hello" }] })).await;
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn a_stream_that_is_reset_has_its_first_token_and_no_end() {
    let replica = replica(1000.0).await;
    set_fault(&replica, Fault::ResetMidStream).await;
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": [], "stream": true })),
        ("/v1/completions", json!({ "prompt": "hello", "stream": true })),
        ("/v1/responses", json!({ "input": "hello", "stream": true })),
        ("/v1/messages", json!({ "model": "qwen3-4b", "max_tokens": 9, "messages": [], "stream": true })),
    ] {
        let mut response = client().post(format!("{}{path}", replica.url())).json(&body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        let first = response.chunk().await.unwrap().unwrap();
        assert!(first.windows(5).any(|text| text == b"data:"), "{path}: {first:?}");
        assert!(response.text().await.is_err(), "{path} is cut");
    }
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    let cut = client().post(format!("{}/v1/chat/completions", replica.url())).json(&body).send().await;
    assert!(cut.is_err(), "an answer in one piece is not sent at all");
}

#[tokio::test]
async fn sleeping_engines_say_so_and_keep_requests_waiting_until_they_wake() {
    let replica = replica(1000.0).await;
    let asleep = async |state: &str| {
        let text = client().get(format!("{}/metrics", replica.url())).send().await.unwrap().text().await.unwrap();
        text.contains(&format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"qwen3-4b\",sleep_state=\"{state}\"}} 1.0"))
    };
    assert!(asleep("awake").await);
    set_fault(&replica, Fault::Sleep).await;
    assert!(asleep("weights_offloaded").await && !asleep("awake").await);
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    let mut waiting = Box::pin(chat(&replica, &body));
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut waiting).await.is_err());
    assert_eq!(metric(&replica, "vllm:num_requests_waiting").await, 0.0, "no step has told of it");
    set_fault(&replica, Fault::None).await;
    waiting.await;
}

#[tokio::test]
async fn a_stalled_replica_takes_no_connection_and_leaves_those_in_use_open_and_silent() {
    let replica = replica(1.0).await;
    let url = format!("{}/v1/chat/completions", replica.url());
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 10_000, "stream": true });
    let mut response = client().post(&url).json(&body).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    set_fault(&replica, Fault::Stall).await;

    let refused = async {
        while !client().post(&url).json(&body).send().await.is_err_and(|error| error.is_connect()) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), refused).await.expect("the listener closes");
    // What was made before may still come; then neither a token nor an end.
    let silence = async { while tokio::time::timeout(Duration::from_millis(300), response.chunk()).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(10), silence).await.expect("it falls silent");
}

/// Every token of a conversation is counted once, in every form of answer: (path, body, prompt and cached and output tokens of usage).
async fn usages(replica: &Replica, system: &str, text: &str, tokens: u64) -> Vec<(&'static str, [u64; 3])> {
    let chat =
        json!({ "messages": [{ "role": "system", "content": system }, { "role": "user", "content": text }], "max_tokens": tokens });
    let messages =
        json!({ "model": "qwen3-4b", "system": system, "messages": [{ "role": "user", "content": text }], "max_tokens": tokens });
    let responses = json!({ "instructions": system, "input": text, "max_output_tokens": tokens });
    let completions = json!({ "prompt": text, "max_tokens": tokens });
    let mut usages = Vec::new();
    for (path, body) in
        [("/v1/chat/completions", chat), ("/v1/messages", messages), ("/v1/responses", responses), ("/v1/completions", completions)]
    {
        for stream in [false, true] {
            let mut body = body.clone();
            if stream {
                body["stream"] = true.into();
                body["stream_options"] = json!({ "include_usage": true });
            }
            let text = client().post(format!("{}{path}", replica.url())).json(&body).send().await.unwrap().text().await.unwrap();
            // A stream's usage is in its last event that has one.
            let events = text.lines().rev().map(|line| line.strip_prefix("data: ").unwrap_or(line));
            let usage = events
                .filter_map(|event| serde_json::from_str::<Value>(event).ok())
                .find_map(|event| [&event, &event["response"]].map(|at| at["usage"].clone()).into_iter().find(Value::is_object))
                .unwrap_or_else(|| panic!("{path}: no usage in {text}"));
            let number = |pointer: &str| usage.pointer(pointer).map(|number| number.as_u64().unwrap());
            let all = |pointers: [&str; 3]| pointers.map(|pointer| number(pointer).unwrap());
            let numbers = match path {
                "/v1/messages" => {
                    let [read, created, new] = all(["/cache_read_input_tokens", "/cache_creation_input_tokens", "/input_tokens"]);
                    [read + created + new, read, number("/output_tokens").unwrap()]
                }
                "/v1/responses" => all(["/input_tokens", "/input_tokens_details/cached_tokens", "/output_tokens"]),
                _ => all(["/prompt_tokens", "/prompt_tokens_details/cached_tokens", "/completion_tokens"]),
            };
            if let Some(total) = number("/total_tokens") {
                assert_eq!(total, numbers[0] + numbers[2], "{path}: {usage}");
            }
            usages.push((path, numbers));
        }
    }
    usages
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn usage_adds_up_and_is_the_same_in_every_form(system in ".{0,40}", text in ".{1,400}", tokens in 1u64..20) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let replica = replica(4000.0).await;
            let usages = usages(&replica, &system, &text, tokens).await;
            let prompt = usages[0].1[0];
            for (number, (path, [all, cached, output])) in usages.into_iter().enumerate() {
                assert_eq!(output, tokens, "{path}");
                // Text completions have no template.
                let expected = if path == "/v1/completions" { text.len().div_ceil(4) as u64 } else { prompt };
                assert_eq!(all, expected, "{path}");
                // Whatever came before, but the last token.
                let seen = if number == 0 || number == 6 { 0 } else { (all - 1) / 16 * 16 };
                assert_eq!(cached, seen, "{path}");
            }
        });
    }
}
