//! The stand-in replica: the [engine model](crate::engine) in real time behind the HTTP endpoints and metrics of vLLM ([`Version`]).
//!
//! It answers `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/messages/count_tokens`, `/tokenize`,
//! `/v1/models`, `/health`, `/ping`, `/version` and `/metrics` over HTTP/1.1 and, with prior knowledge, HTTP/2. An answer has exactly the
//! tokens asked for (`max_tokens`, 16 if left out), made from the prompt alone. Prompt token details and request id headers are always
//! on, as with vLLM's `--enable-prompt-tokens-details` and `--enable-request-id-headers`.
//!
//! It can have several engines behind its one port, as vLLM's data-parallel ranks: `x-data-parallel-rank` names one by its local index,
//! and without it vLLM's own [balancer](crate::balancer) chooses.
//!
//! Beyond vLLM, for tests of a proxy in front: `GET /debug/requests` shows the last requests (all but those to `/metrics` and `/debug/`),
//! and `POST /debug/fault` makes it misbehave ([`Fault`]).

mod anthropic;
mod body;
mod chat;
mod completions;
mod debug;
mod driver;
mod error;
mod generation;
mod histogram;
mod ids;
mod metrics;
mod openai;
mod ranks;
mod responses;
mod routes;
mod version;

pub use debug::{Fault, Received};
pub use version::Version;

use crate::balancer::BalancerKind;
use crate::engine::EngineConfig;
use anyhow::{Context, Result, ensure};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use ranks::Ranks;
use serde::Serialize;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

/// Settings of a [`Replica`].
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Whether that may be an address that others reach: they can then read what clients sent.
    pub allow_remote: bool,
    /// The model's name.
    pub model: String,
    /// How many times faster than real time the engine's clock runs, above 0.
    pub speed: f64,
    /// Tokens a request may have, prompt and output; never more than the KV cache holds.
    pub max_model_len: usize,
    /// Each engine's settings.
    pub engine: EngineConfig,
    /// The version whose answers it gives.
    pub version: Version,
    /// Engines, at least 1: vLLM's data-parallel ranks of one endpoint.
    pub ranks: usize,
    /// The first engine's `engine` label in the metrics; the others count on from it. Above 0 on all but the first node of a deployment
    /// whose nodes each balance their own ranks. The header has the local index all the same.
    pub first_engine_label: usize,
    /// How a rank is chosen for a request that names none; as the version does if there is none.
    pub balancer: Option<BalancerKind>,
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            allow_remote: false,
            model: "qwen3-4b".to_owned(),
            speed: 1.0,
            max_model_len: 131_072,
            engine: EngineConfig::default(),
            version: Version::default(),
            ranks: 1,
            first_engine_label: 0,
            balancer: None,
        }
    }
}

/// A running replica. Dropping it closes its listener and cuts every connection.
#[derive(Debug)]
pub struct Replica {
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

/// What the endpoints share.
#[derive(Clone)]
struct App {
    model: Arc<str>,
    max_model_len: usize,
    config: Arc<EngineConfig>,
    version: Version,
    fingerprint: Arc<str>,
    first_engine_label: usize,
    ranks: Arc<Ranks>,
    debug: Arc<debug::Debug>,
    started_at: f64,
}

impl App {
    fn limits(&self) -> body::Limits<'_> {
        body::Limits { model: &self.model, max_model_len: self.max_model_len }
    }
}

impl Replica {
    /// Starts a replica; once this returns, it listens.
    ///
    /// # Errors
    /// Settings that make no sense, or an address that cannot be listened on.
    pub async fn start(config: ReplicaConfig) -> Result<Self> {
        let ReplicaConfig {
            listen,
            allow_remote,
            model,
            speed,
            max_model_len,
            engine,
            version,
            ranks,
            first_engine_label,
            balancer,
        } = config;
        // Anyone who reaches the debug endpoints can read other clients' headers.
        ensure!(
            allow_remote || listen.ip().is_loopback(),
            "{listen} is no loopback address: listen on 127.0.0.1, or say --allow-remote where only friends can reach it"
        );
        ensure!(speed.is_finite() && speed > 0.0, "the speed is {speed}: give a number above 0, such as 10");
        ensure!(engine.block_size > 0, "the block size is 0: give at least 1, such as 16");
        ensure!(
            engine.max_num_seqs > 0 && engine.max_num_batched_tokens > 0,
            "max-num-seqs and max-num-batched-tokens must be above 0"
        );
        ensure!(ranks > 0, "an endpoint has at least one rank: give 1 or more");
        let max_model_len = max_model_len.min(engine.max_request_tokens());
        ensure!(max_model_len > 1, "the KV cache or max-model-len has no room for a request: raise kv-tokens or max-model-len");

        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}: is the port in use?"))?;
        let address = listener.local_addr().context("cannot read the listener's address")?;
        let mut tasks = JoinSet::new();
        let ranks = Ranks::start(&mut tasks, ranks, &engine, speed, balancer.unwrap_or(version.balancer()));
        let app = App {
            model: model.into(),
            max_model_len,
            version,
            fingerprint: fingerprint(version, ranks.len()).into(),
            first_engine_label,
            config: Arc::new(engine),
            ranks,
            debug: Arc::default(),
            started_at: unix_time(),
        };
        let stalled = app.debug.stalled();
        tasks.spawn(accept(listener, routes::router(app), stalled));
        Ok(Self { address, _tasks: tasks })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Serves connections; those of an aborted task are cut with it. When the replica stalls, the listener closes.
async fn accept(listener: TcpListener, router: axum::Router, mut stalled: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let stop = stalled.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve(stream, router.clone(), stop.clone()))),
                // Out of file descriptors, or a connection that was gone before it was accepted: others may still come.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
            () = stall(&mut stalled) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Waits until it stalls.
async fn stall(stalled: &mut watch::Receiver<bool>) {
    // An error means that nobody can ask for it any more.
    if stalled.wait_for(|stalled| *stalled).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn serve(stream: TcpStream, router: axum::Router, mut stalled: watch::Receiver<bool>) {
    // Tokens must leave when they are made.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let router = router.clone();
        async move {
            let response = router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {});
            // An error from here makes hyper close without an answer.
            if response.extensions().get::<debug::Cut>().is_some() { Err(debug::CutShort) } else { Ok(response) }
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service));
    // An error is the client's leaving, or a cut that was asked for.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stall(&mut stalled) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// `system_fingerprint` of the answers: the version, how many ranks, and in vLLM a hash of the configuration.
fn fingerprint(version: Version, ranks: usize) -> String {
    let ranks = if ranks > 1 { format!("-dp{ranks}") } else { String::new() };
    format!("vllm-{}{ranks}-homing00", version.number())
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| unreachable!("answers have only string keys: {error}"))
}

fn json_response(status: StatusCode, json: String) -> Response<Body> {
    (status, [(CONTENT_TYPE, "application/json")], json).into_response()
}
