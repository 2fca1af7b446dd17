//! Polling replicas, end to end: what a fake vLLM answers is what the API shows.

use std::sync::atomic::Ordering;

use crate::fakes::{
    Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, TWO_RANKS, config, config_with, envoys, free_address, run, says,
};

fn text(text: &str) -> Metrics {
    Metrics::Text(text.to_owned())
}

#[tokio::test]
async fn a_replica_that_answers_is_ready_with_its_figures() {
    let replica = FakeReplica::start(text(IDLE)).await;
    let collector = run(&config(&[replica.address()], "")).await;
    let seen = collector.until_replica(0, "ready").await;
    assert_eq!(seen["replica"], replica.address().to_string());
    assert_eq!((&seen["running"], &seen["cache_tokens"], &seen["max_num_seqs"]), (&0.into(), &4_194_304.into(), &32.into()));
    assert_eq!((&seen["prompt_tokens"], &seen["generation_tokens"]), (&6080.into(), &75.into()));
    assert!(seen["age_ms"].is_u64() && seen["problem"].is_null());
}

#[tokio::test]
async fn ranks_behind_one_endpoint_are_replicas() {
    let replica = FakeReplica::start(text(TWO_RANKS)).await;
    let collector = run(&config(&[replica.address()], "")).await;
    let second = collector.until_replica(1, "ready").await;
    assert_eq!(second["replica"], format!("{}#1", replica.address()));
    assert_eq!((&second["running"], &second["waiting"]), (&4.into(), &6.into()));
    let status = collector.status().await;
    assert_eq!(status["pools"][0]["replicas"].as_array().expect("replicas").len(), 2);
}

#[tokio::test]
async fn an_endpoint_has_no_more_replicas_than_are_allowed_and_they_say_so() {
    let replica = FakeReplica::start(text(TWO_RANKS)).await;
    let pool = format!("  max_ranks: 1\n  replicas: [{{ address: '{}' }}]\n", replica.address());
    let collector = run(&config_with(&pool, "")).await;
    let status = collector.until("a problem", |status| says(&status["pools"][0]["replicas"][0]["problem"], "max_ranks")).await;
    let replicas = status["pools"][0]["replicas"].as_array().expect("replicas");
    assert_eq!((replicas.len(), &replicas[0]["state"]), (1, &"ready".into()));
}

#[tokio::test]
async fn the_hit_rate_is_what_came_from_the_cache_since() {
    let replica = FakeReplica::start(text(IDLE)).await;
    let collector = run(&config(&[replica.address()], "")).await;
    assert!(collector.until_replica(0, "ready").await["prefix_hit_rate"].is_null());
    let later = IDLE
        .replace("prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 6080.0", "prompt_tokens_total{engine=\"0\"} 7080.0")
        .replace("source=\"local_cache_hit\"} 4096.0", "source=\"local_cache_hit\"} 4846.0");
    assert_ne!(later, IDLE);
    replica.set(text(&later));
    collector.until("a hit rate of 0.75", |status| status["pools"][0]["replicas"][0]["prefix_hit_rate"] == 0.75).await;
}

#[tokio::test]
async fn a_silent_replica_delays_no_other() {
    let silent = FakeReplica::start(Metrics::Silence).await;
    let good = FakeReplica::start(text(IDLE)).await;
    let collector = run(&config(&[silent.address(), good.address()], "")).await;
    collector.until("a timeout", |status| says(&status["pools"][0]["replicas"][0]["problem"], "scrape.timeout")).await;
    let status = collector.until("five polls of the silent one", |_| silent.asked() >= 5).await;
    assert_eq!(status["pools"][0]["replicas"][0]["state"], "down");
    assert_eq!(status["pools"][0]["replicas"][1]["state"], "ready");
    // A poll of the silent one takes 300 ms, one of the other 50 ms with its pause.
    assert!(good.asked() >= 2 * silent.asked(), "{} polls beside {}", good.asked(), silent.asked());
}

#[tokio::test]
async fn an_answer_that_never_ends_is_given_up_in_time() {
    let endless = FakeReplica::start(Metrics::Trickle).await;
    let collector = run(&config(&[endless.address()], "")).await;
    let status = collector.until("a timeout", |status| says(&status["pools"][0]["replicas"][0]["problem"], "scrape.timeout")).await;
    assert_eq!(status["pools"][0]["replicas"][0]["running"], 0, "nothing of it counts");
}

/// The greatest count that is taken for one: 2^53.
const GREATEST: u64 = 9_007_199_254_740_992;

#[tokio::test]
async fn figures_that_no_engine_can_have_are_bounded() {
    let lies = IDLE
        .replace("num_requests_running{engine=\"0\",model_name=\"tiny\"} 0.0", "num_requests_running{engine=\"0\"} 1e300")
        .replace("kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.0", "kv_cache_usage_perc{engine=\"0\"} NaN")
        .replace("num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 0.0", "num_requests_waiting{engine=\"0\"} -7")
        .replace("prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 6080.0", "prompt_tokens_total{engine=\"0\"} 1e300")
        .replace("kv_cache_size_tokens=\"4194304\"", "kv_cache_size_tokens=\"18446744073709551615\"");
    let replicas = [FakeReplica::start(text(&lies)).await, FakeReplica::start(text(&lies)).await];
    let envoy = FakeEnvoy::start(Behaviour::Admit).await;
    let more = envoys(&[&format!("url: '{}'", envoy.url())]);
    let collector = run(&config(&replicas.each_ref().map(FakeReplica::address), &more)).await;
    let seen = collector.until_replica(1, "ready").await;
    assert_eq!((&seen["running"], &seen["waiting"], &seen["kv_usage"]), (&u32::MAX.into(), &0.into(), &0.0.into()));
    assert_eq!((&seen["cache_tokens"], &seen["prompt_tokens"]), (&GREATEST.into(), &GREATEST.into()));
    let status = collector.until("both", |status| status["pools"][0]["admission"]["cache_tokens"] == 2 * GREATEST).await;
    assert_eq!(status["pools"][0]["capacity"]["cache_tokens"], 2 * GREATEST);
}

#[tokio::test]
async fn a_connection_is_kept_from_poll_to_poll() {
    let replica = FakeReplica::start(text(IDLE)).await;
    let collector = run(&config(&[replica.address()], "").replace("300ms", "10s")).await;
    collector.until("ten polls", |_| replica.asked() >= 10).await;
    assert_eq!(replica.server.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let replica = FakeReplica::start(Metrics::Redirect).await;
    let collector = run(&config(&[replica.address()], "")).await;
    let status = collector.until("a status", |status| says(&status["pools"][0]["replicas"][0]["problem"], "HTTP status 307")).await;
    assert_eq!(status["pools"][0]["replicas"][0]["state"], "down");
    assert_eq!(replica.state.asked_elsewhere.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_body_above_the_limit_is_not_read_whether_or_not_its_length_is_told() {
    for announced in [true, false] {
        let replica = FakeReplica::start(Metrics::Long { bytes: 9 << 20, announced }).await;
        let collector = run(&config(&[replica.address()], "").replace("300ms", "5s")).await;
        collector.until("too long", |status| says(&status["pools"][0]["replicas"][0]["problem"], "longer than 8 MiB")).await;
    }
}

#[tokio::test]
async fn a_long_body_within_the_limit_is_read() {
    let replica = FakeReplica::start(Metrics::Long { bytes: 7 << 20, announced: false }).await;
    let collector = run(&config(&[replica.address()], "").replace("300ms", "10s")).await;
    collector.until_replica(0, "ready").await;
}

#[tokio::test]
async fn a_replica_that_goes_down_keeps_its_last_figures_and_comes_back() {
    let replica = FakeReplica::start(text(TWO_RANKS)).await;
    let address = replica.address();
    let collector = run(&config(&[address], "")).await;
    collector.until_replica(1, "ready").await;
    replica.server.stop().await;
    let down = collector.until_replica(1, "down").await;
    assert!(says(&down["problem"], "refused"), "{down}");
    assert_eq!((&down["running"], &down["replica"]), (&4.into(), &format!("{address}#1").into()));
    let _replica = FakeReplica::start_at(address, text(TWO_RANKS)).await;
    let back = collector.until_replica(1, "ready").await;
    assert!(back["problem"].is_null());
}

#[tokio::test]
async fn a_replica_that_was_never_there_is_down_and_has_no_age() {
    let address = free_address().await;
    let collector = run(&config(&[address], "")).await;
    let seen = collector.until("refused", |status| says(&status["pools"][0]["replicas"][0]["problem"], "refused")).await;
    let replica = &seen["pools"][0]["replicas"][0];
    assert_eq!(replica["state"], "down");
    assert!(replica["age_ms"].is_null());
}

#[tokio::test]
async fn an_error_status_and_text_of_another_server_are_failures() {
    let replica = FakeReplica::start(Metrics::Status(503)).await;
    let collector = run(&config(&[replica.address()], "")).await;
    let problem = |text: &'static str| move |status: &serde_json::Value| says(&status["pools"][0]["replicas"][0]["problem"], text);
    collector.until("503", problem("HTTP status 503")).await;
    replica.set(text("go_goroutines 5\n"));
    collector.until("no vLLM", problem("no vllm: metrics")).await;
    replica.set(text(IDLE));
    collector.until_replica(0, "ready").await;
}

#[tokio::test]
async fn a_sleeping_engine_is_asleep_until_it_wakes() {
    let asleep = IDLE
        .replace("sleep_state=\"awake\"} 1.0", "sleep_state=\"awake\"} 0.0")
        .replace("sleep_state=\"weights_offloaded\"} 0.0", "sleep_state=\"weights_offloaded\"} 1.0");
    assert_ne!(asleep, IDLE);
    let replica = FakeReplica::start(text(&asleep)).await;
    let collector = run(&config(&[replica.address()], "")).await;
    collector.until_replica(0, "asleep").await;
    replica.set(text(IDLE));
    collector.until_replica(0, "ready").await;
}

#[tokio::test]
async fn a_replica_that_is_to_drain_drains() {
    let replica = FakeReplica::start(text(IDLE)).await;
    let collector = run(&format!("{}    drain: true\n", config(&[replica.address()], ""))).await;
    collector.until_replica(0, "draining").await;
}
