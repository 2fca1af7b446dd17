//! What is driven: stand-in replicas, and endpoints made for one test.

use axum::Router;
use homing_bench::load::LoadConfig;
use homing_bench::replica::{Replica, ReplicaConfig};
use homing_bench::workload::{Kind, SessionShape, Workload};
use std::future::Future;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How fast the stand-ins of these tests compute.
pub(crate) const SPEED: f64 = 400.0;

pub(crate) async fn replica() -> Replica {
    Replica::start(ReplicaConfig { speed: SPEED, ..ReplicaConfig::default() }).await.unwrap()
}

/// Two seconds of load on one replica, whose metrics are read.
pub(crate) fn config(replica: &Replica) -> LoadConfig {
    LoadConfig { replicas: vec![replica.url()], speed: SPEED, duration: Duration::from_secs(2), ..LoadConfig::new(replica.url()) }
}

/// Sessions of a few tokens, which a test endpoint answers as it likes.
pub(crate) fn small(turns: usize) -> Workload {
    Workload::new(Kind::Reference(SessionShape { system_tokens: 1, first_tokens: 1, turns, turn_tokens: 1, max_tokens: 8 }), 0)
}

/// An endpoint of a test's own, gone when it is dropped.
pub(crate) struct Endpoint {
    pub(crate) url: String,
    server: JoinHandle<std::io::Result<()>>,
}

impl Endpoint {
    pub(crate) async fn start(router: Router) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        Self { url, server: tokio::spawn(axum::serve(listener, router).into_future()) }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A whole answer of OpenAI's API.
pub(crate) const ANSWER: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"yes\"}}]}\n\n\
                                 data: {\"choices\":[],\"usage\":{\"completion_tokens\":5}}\n\ndata: [DONE]\n\n";

/// Waits until a condition holds.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(30), "waited for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
