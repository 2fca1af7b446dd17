//! The stand-in replica: the [engine model](crate::engine) in real time behind the HTTP endpoints and metrics of vLLM 0.26.
//!
//! It answers `/v1/chat/completions`, `/v1/messages`, `/v1/messages/count_tokens`, `/v1/models`, `/health`, `/ping`, `/version` and
//! `/metrics` over HTTP/1.1 and, with prior knowledge, HTTP/2. An answer has exactly the tokens asked for (`max_tokens`, 16 if left out),
//! made from the prompt alone. Prompt token details are always on, as with vLLM's `--enable-prompt-tokens-details`.
//!
//! Beyond vLLM, for tests of a proxy in front: `GET /debug/requests` shows the last requests (all but those to `/metrics` and `/debug/`),
//! and `POST /debug/fault` makes the generation endpoints misbehave ([`Fault`]).

mod anthropic;
mod body;
mod debug;
mod driver;
mod error;
mod generation;
mod histogram;
mod ids;
mod metrics;
mod openai;
mod routes;

pub use debug::{Fault, Received};

use crate::engine::{Engine, EngineConfig};
use anyhow::{Context, Result, ensure};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use driver::{Driver, EngineHandle};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower::ServiceExt;

/// Settings of a [`Replica`].
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// Where to listen, a loopback address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The model's name.
    pub model: String,
    /// How many times faster than real time the engine's clock runs, above 0.
    pub speed: f64,
    /// Tokens a request may have, prompt and output; never more than the KV cache holds.
    pub max_model_len: usize,
    /// The engine's settings.
    pub engine: EngineConfig,
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            model: "qwen3-4b".to_owned(),
            speed: 1.0,
            max_model_len: 131_072,
            engine: EngineConfig::default(),
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
    block_size: usize,
    config: Arc<EngineConfig>,
    engine: EngineHandle,
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
        let ReplicaConfig { listen, model, speed, max_model_len, engine } = config;
        // Anyone who reaches the debug endpoints can read other clients' headers.
        ensure!(
            listen.ip().is_loopback(),
            "{listen} is no loopback address: the stand-in is for this machine only, listen on 127.0.0.1"
        );
        ensure!(speed.is_finite() && speed > 0.0, "the speed is {speed}: give a number above 0, such as 10");
        ensure!(engine.block_size > 0, "the block size is 0: give at least 1, such as 16");
        ensure!(
            engine.max_num_seqs > 0 && engine.max_num_batched_tokens > 0,
            "max-num-seqs and max-num-batched-tokens must be above 0"
        );
        let max_model_len = max_model_len.min(engine.max_request_tokens());
        ensure!(max_model_len > 1, "the KV cache or max-model-len has no room for a request: raise kv-tokens or max-model-len");

        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}: is the port in use?"))?;
        let address = listener.local_addr().context("cannot read the listener's address")?;
        let (driver, handle) = Driver::new(Engine::new(engine.clone()), speed);
        let app = App {
            model: model.into(),
            max_model_len,
            block_size: engine.block_size,
            config: Arc::new(engine),
            engine: handle,
            debug: Arc::default(),
            started_at: unix_time(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(driver.run());
        tasks.spawn(accept(listener, routes::router(app)));
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

/// Serves connections; those of an aborted task are cut with it.
async fn accept(listener: TcpListener, router: axum::Router) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve(stream, router.clone()))),
                // Out of file descriptors, or a connection that was gone before it was accepted: others may still come.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(stream: TcpStream, router: axum::Router) {
    // Tokens must leave when they are made.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let router = router.clone();
        async move {
            let response = router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {});
            // An error from here makes hyper close without an answer.
            if response.extensions().get::<debug::Cut>().is_some() { Err(CutShort) } else { Ok(response) }
        }
    });
    // An error is the client's leaving, or a cut that was asked for.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// The connection is closed on purpose.
#[derive(Debug, thiserror::Error)]
#[error("closed without an answer")]
struct CutShort;

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
