//! The engines' own counters.

use super::fakes::{SPEED, config, eventually, replica};
use homing_bench::load::{self, HitCounters, LoadConfig};
use homing_bench::replica::{Received, Replica, ReplicaConfig};
use std::time::Duration;

#[tokio::test]
async fn engines_that_cannot_be_read_are_an_error_that_says_so() {
    let replica = replica().await;
    let config = LoadConfig { replicas: vec![format!("{}/nothing-here", replica.url())], ..config(&replica) };
    let error = load::run(config).await.unwrap_err();
    assert!(error.to_string().contains("--replicas"), "{error:#}");
}

#[tokio::test]
async fn an_engine_that_restarts_in_the_run_does_not_spoil_its_figures() {
    let replica = replica().await;
    let (address, url) = (replica.address(), replica.url());
    let load = tokio::spawn(load::run(LoadConfig { sessions: 1, duration: Duration::from_secs(3), ..config(&replica) }));

    let turns = |least: usize| {
        let requests = format!("{url}/debug/requests");
        move || {
            let requests = requests.clone();
            async move {
                let Ok(answer) = reqwest::get(requests).await else { return false };
                answer.json::<Vec<Received>>().await.is_ok_and(|received| received.len() >= least)
            }
        }
    };
    eventually("ten turns", turns(10)).await;
    drop(replica);
    let listening =
        || async { Replica::start(ReplicaConfig { listen: address, speed: SPEED, ..ReplicaConfig::default() }).await.ok() };
    let mut again = listening().await;
    // The address may be in use until the last connection is gone.
    while again.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
        again = listening().await;
    }
    eventually("ten turns on the new engine", turns(10)).await;

    let report = load.await.unwrap().unwrap();
    assert_eq!(report.engine_restarts, 1, "{report:?}");
    assert_eq!(report.prefix_hits_from, Some(HitCounters::PromptTokens));
    // A session that begins anew on a cold engine and is given up for the turn that failed: hits stay those of the shape, or nearly.
    assert!((60.0..90.0).contains(&report.prefix_hits.unwrap()), "{report:?}");
    assert!(report.errors.values().sum::<u64>() <= 20, "{report:?}");
    assert!(report.turns > 20, "{report:?}");
}
