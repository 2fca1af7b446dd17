//! Sessions that come when they come.

use super::fakes::{ANSWER, Endpoint, SPEED, config, replica, small};
use axum::Router;
use axum::routing::post;
use homing_bench::load::{self, LoadConfig, LoadReport};
use homing_bench::workload::{Kind, Workload};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// An endpoint that serves one request after the other, each in this time.
async fn one_at_a_time(service: Duration) -> Endpoint {
    let server = Arc::new(Mutex::new(()));
    let serve = move || {
        let server = Arc::clone(&server);
        async move {
            let _turn = server.lock().await;
            tokio::time::sleep(service).await;
            ANSWER
        }
    };
    Endpoint::start(Router::new().route("/v1/chat/completions", post(serve))).await
}

async fn at_a_rate(endpoint: &Endpoint, drain: Duration) -> LoadReport {
    let config = LoadConfig {
        workload: small(1),
        // 40 a second of real time; the way to the client, some hundred milliseconds of the engine's time, is then next to nothing.
        rate: Some(24.0),
        speed: 100.0,
        duration: Duration::from_secs(1),
        drain,
        seed: 7,
        ..LoadConfig::new(&endpoint.url)
    };
    load::run(config).await.unwrap()
}

#[tokio::test]
async fn a_slow_endpoint_gets_as_many_sessions_as_a_fast_one() {
    let fast = at_a_rate(&one_at_a_time(Duration::ZERO).await, Duration::from_secs(10)).await;
    let slow = at_a_rate(&one_at_a_time(Duration::from_secs(60)).await, Duration::ZERO).await;
    assert!((25..55).contains(&fast.sessions_started), "{fast:?}");
    assert_eq!(slow.sessions_started, fast.sessions_started, "the arrivals are the seed's, not the endpoint's");
    let sent = fast.ttfb_s.unwrap().count;
    assert!((fast.sessions_started - 2..=fast.sessions_started).contains(&sent), "but for the last in the run: {fast:?}");
    assert_eq!((slow.turns, slow.turns_unfinished, slow.ttfb_s), (0, sent, None));
    assert_eq!((fast.sessions, fast.rate, fast.turns_unfinished), (0, Some(24.0), 0));
}

#[tokio::test]
async fn time_in_the_queue_is_time_to_the_first_token() {
    // 40 a second come and 20 a second are served: the last one waits for about as long as the run.
    let report = at_a_rate(&one_at_a_time(Duration::from_millis(50)).await, Duration::from_secs(30)).await;
    let ttfb = report.ttfb_s.unwrap();
    assert!(ttfb.count + 2 >= report.sessions_started, "also those that were served after the run: {report:?}");
    assert!(ttfb.max > 50.0 && ttfb.p50 > 20.0, "{report:?}");
    assert!(report.sessions_completed < report.sessions_started, "rates are of what ended in the run: {report:?}");
}

#[tokio::test]
async fn a_workload_that_has_times_is_an_open_loop() {
    let replica = replica().await;
    // One in 6 s, for 800 s of the engine's time.
    let config = LoadConfig { workload: Workload::new(Kind::Open { per_minute: 10.0 }, 1), ..config(&replica) };
    let report = load::run(config).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    assert!((90..180).contains(&report.sessions_started), "{report:?}");
    assert!(report.turns > 10, "{report:?}");
    assert_eq!(report.duration_s, 2.0 * SPEED);
}
