//! Stand-ins for a vLLM server and for an Envoy's control listener, in this process, and a running collector to look at.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::serve::{Listener, ListenerExt as _};
use futures_util::future::join_all;
use homing_collector::Collector;
use homing_collector::config::Config;
use homing_collector::discovery::{Lookup, System};
use homing_routing::binding::{Binding, Bindings};
use homing_routing::identity::Digest;
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{
    AdmissionAnswer, HeldCounts, OutcomeCounts, PoolAnswer, ReplicaAnswer, SYNC_PATH, SYNC_VERSION, SyncAnswer, SyncRequest,
};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Everything here happens within milliseconds; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const IDLE: &str = include_str!("../../testdata/vllm-0.26.0.txt");
pub(crate) const TWO_RANKS: &str = include_str!("../../testdata/vllm-0.26.0-dp2-load.txt");

/// A server that ends, with its connections, when it is stopped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) connections: Arc<AtomicUsize>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(address: SocketAddr, router: Router) -> Self {
        Self::start_on(TcpListener::bind(address).await.expect("a free port"), router).await
    }

    async fn start_on(listener: impl Listener<Addr = SocketAddr>, router: Router) -> Self {
        let address = listener.local_addr().expect("an address");
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = connections.clone();
        let listener = listener.tap_io(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stopped = async move { drop(stopped.await) };
            axum::serve(listener, router).with_graceful_shutdown(stopped).await.expect("a server");
        });
        Self { address, connections, stop, task }
    }

    /// Returns once nothing listens any more.
    pub(crate) async fn stop(self) {
        drop(self.stop);
        self.task.await.expect("a server");
    }
}

/// What a fake replica answers.
#[derive(Clone)]
pub(crate) enum Metrics {
    Text(String),
    Status(u16),
    /// A redirect to the path `/elsewhere`.
    Redirect,
    /// This many bytes of metrics, their length told at the start or not.
    Long {
        bytes: usize,
        announced: bool,
    },
    /// The metrics of an idle engine, for who shows this bearer token; anybody else gets this status.
    Want(&'static str, u16),
    /// Metrics without an end, a line every few milliseconds.
    Trickle,
    /// Nothing, for ever.
    Silence,
}

/// A vLLM server's `/metrics`.
pub(crate) struct FakeReplica {
    pub(crate) server: Server,
    pub(crate) state: Arc<ReplicaState>,
}

pub(crate) struct ReplicaState {
    metrics: Mutex<Metrics>,
    pub(crate) asked: AtomicUsize,
    pub(crate) asked_elsewhere: AtomicUsize,
}

impl FakeReplica {
    pub(crate) async fn start(metrics: Metrics) -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), metrics).await
    }

    pub(crate) async fn start_at(address: SocketAddr, metrics: Metrics) -> Self {
        Self::start_on(TcpListener::bind(address).await.expect("a free port"), metrics).await
    }

    pub(crate) async fn start_on(listener: impl Listener<Addr = SocketAddr>, metrics: Metrics) -> Self {
        let state = Arc::new(ReplicaState { metrics: Mutex::new(metrics), asked: 0.into(), asked_elsewhere: 0.into() });
        let router =
            Router::new().route("/metrics", get(metrics_text)).route("/elsewhere", get(elsewhere)).with_state(state.clone());
        Self { server: Server::start_on(listener, router).await, state }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address
    }

    pub(crate) fn set(&self, metrics: Metrics) {
        *self.state.metrics.lock().expect("a lock") = metrics;
    }

    pub(crate) fn asked(&self) -> usize {
        self.state.asked.load(Ordering::SeqCst)
    }
}

async fn elsewhere(State(state): State<Arc<ReplicaState>>) -> String {
    state.asked_elsewhere.fetch_add(1, Ordering::SeqCst);
    IDLE.to_owned()
}

async fn metrics_text(State(state): State<Arc<ReplicaState>>, headers: HeaderMap) -> Response {
    state.asked.fetch_add(1, Ordering::SeqCst);
    let metrics = state.metrics.lock().expect("a lock").clone();
    match metrics {
        Metrics::Text(text) => text.into_response(),
        Metrics::Status(status) => StatusCode::from_u16(status).expect("a status").into_response(),
        Metrics::Redirect => Redirect::temporary("/elsewhere").into_response(),
        Metrics::Long { bytes, announced } => {
            let text = IDLE.repeat(bytes / IDLE.len() + 1);
            if announced {
                return text.into_response();
            }
            let pieces =
                text.into_bytes().chunks(1 << 16).map(Bytes::copy_from_slice).map(Ok::<_, std::io::Error>).collect::<Vec<_>>();
            Body::from_stream(Pieces(pieces.into_iter())).into_response()
        }
        Metrics::Want(token, refusal) => match bearer(&headers) {
            Some(given) if given == token => IDLE.into_response(),
            _ => StatusCode::from_u16(refusal).expect("a status").into_response(),
        },
        Metrics::Trickle => {
            let line = async |()| {
                tokio::time::sleep(Duration::from_millis(5)).await;
                Some((Ok::<_, std::io::Error>(Bytes::from_static(b"vllm:num_requests_running 1\n")), ()))
            };
            Body::from_stream(futures_util::stream::unfold((), line)).into_response()
        }
        Metrics::Silence => std::future::pending().await,
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get("authorization")?.to_str().expect("text").strip_prefix("Bearer ")
}

/// A body whose length is not known at its start.
struct Pieces(std::vec::IntoIter<std::io::Result<Bytes>>);

impl futures_util::Stream for Pieces {
    type Item = std::io::Result<Bytes>;

    fn poll_next(mut self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.next())
    }
}

/// How a fake Envoy answers.
#[derive(Clone)]
pub(crate) enum Behaviour {
    /// As the filter's control role does.
    Obey,
    /// As the control role does of pools that admit by working set.
    Admit,
    /// As the control role does where no filter routes the pools.
    RouteNothing,
    /// As the control role does when it wants this bearer token, and else answers with this status.
    Want(&'static str, u16),
    Refuse(u16, &'static str),
    Say(&'static str),
    /// As the control role does while a later collector is there.
    Standby,
    Silence,
}

/// An Envoy's control listener.
pub(crate) struct FakeEnvoy {
    pub(crate) server: Server,
    pub(crate) state: Arc<EnvoyState>,
}

pub(crate) struct EnvoyState {
    behaviour: Mutex<Behaviour>,
    pub(crate) taken: Mutex<Vec<SyncRequest>>,
    pub(crate) asked: AtomicUsize,
    /// Requests that it sent to other addresses than the chosen ones.
    pub(crate) mismatches: AtomicU64,
    /// When it began to count; another time is another Envoy.
    pub(crate) since_ms: AtomicU64,
    /// Bindings of its next answer.
    tells: Mutex<Vec<Binding>>,
    set_up: Mutex<(Option<String>, u32)>,
}

impl EnvoyState {
    pub(crate) fn new(behaviour: Behaviour) -> Arc<Self> {
        Arc::new(Self {
            behaviour: Mutex::new(behaviour),
            taken: Mutex::default(),
            asked: 0.into(),
            mismatches: AtomicU64::default(),
            since_ms: 1_700_000_000_000.into(),
            tells: Mutex::default(),
            set_up: Mutex::new((None, 600)),
        })
    }

    /// Bindings that its next answer tells.
    pub(crate) fn tell(&self, bindings: &[Binding]) {
        self.tells.lock().expect("a lock").extend(bindings);
    }

    pub(crate) fn set_up_with(&self, key_check: &str, idle_s: u32) {
        *self.set_up.lock().expect("a lock") = (Some(key_check.to_owned()), idle_s);
    }

    /// Every binding it was sent.
    pub(crate) fn got(&self) -> Vec<Binding> {
        self.taken().into_iter().flat_map(|request| request.bindings.0).collect()
    }

    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new().route(SYNC_PATH, post(sync)).with_state(self.clone())
    }

    pub(crate) fn taken(&self) -> Vec<SyncRequest> {
        self.taken.lock().expect("a lock").clone()
    }
}

impl FakeEnvoy {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), behaviour).await
    }

    pub(crate) async fn start_at(address: SocketAddr, behaviour: Behaviour) -> Self {
        Self::start_on(TcpListener::bind(address).await.expect("a free port"), behaviour).await
    }

    pub(crate) async fn start_on(listener: impl Listener<Addr = SocketAddr>, behaviour: Behaviour) -> Self {
        let state = EnvoyState::new(behaviour);
        Self { server: Server::start_on(listener, state.router()).await, state }
    }

    /// Envoys at 127.0.0.1, 127.0.0.2 and so on, all at one port, as pods are.
    pub(crate) async fn start_pods<const N: usize>() -> [Self; N] {
        let listeners = loop {
            let port = free_address().await.port();
            let addresses = (1..=N as u8).map(|last| SocketAddr::from(([127, 0, 0, last], port)));
            match join_all(addresses.map(TcpListener::bind)).await.into_iter().collect::<io::Result<Vec<_>>>() {
                Ok(listeners) => break listeners,
                // Taken at one of them.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => panic!("127.0.0.1 to 127.0.0.{N} are needed: {error}"),
            }
        };
        let pods = join_all(listeners.into_iter().map(|listener| Self::start_on(listener, Behaviour::Obey))).await;
        pods.try_into().unwrap_or_else(|_| unreachable!("one at each address"))
    }

    pub(crate) fn set(&self, behaviour: Behaviour) {
        *self.state.behaviour.lock().expect("a lock") = behaviour;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.server.address)
    }
}

/// Names and their addresses, instead of DNS; a name that is not there has none.
#[derive(Clone, Default)]
pub(crate) struct FakeDns(Arc<Mutex<HashMap<String, Vec<IpAddr>>>>);

impl FakeDns {
    /// Gives `name` the addresses of `pods`.
    pub(crate) fn set(&self, name: &str, pods: &[&FakeEnvoy]) {
        let addresses = pods.iter().map(|pod| pod.server.address.ip()).collect();
        self.0.lock().expect("a lock").insert(name.to_owned(), addresses);
    }

    pub(crate) fn remove(&self, name: &str) {
        self.0.lock().expect("a lock").remove(name);
    }
}

impl Lookup for FakeDns {
    async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        self.0.lock().expect("a lock").get(name).cloned().ok_or_else(|| io::Error::other("NXDOMAIN"))
    }
}

async fn sync(State(state): State<Arc<EnvoyState>>, headers: HeaderMap, body: Bytes) -> Response {
    state.asked.fetch_add(1, Ordering::SeqCst);
    let behaviour = state.behaviour.lock().expect("a lock").clone();
    match behaviour {
        Behaviour::Want(token, refusal) if bearer(&headers) != Some(token) => {
            StatusCode::from_u16(refusal).expect("a status").into_response()
        }
        Behaviour::Refuse(status, body) => (StatusCode::from_u16(status).expect("a status"), body).into_response(),
        Behaviour::Say(text) => text.into_response(),
        Behaviour::Silence => std::future::pending().await,
        Behaviour::Obey | Behaviour::RouteNothing | Behaviour::Admit | Behaviour::Want(..) | Behaviour::Standby => {
            let request: SyncRequest = serde_json::from_slice(&body).expect("a snapshot");
            let mut answer = answer(&request);
            answer.counting_since_ms = Some(state.since_ms.load(Ordering::SeqCst));
            answer.bindings = Bindings(std::mem::take(&mut *state.tells.lock().expect("a lock")));
            let (key_check, idle_s) = state.set_up.lock().expect("a lock").clone();
            (answer.key_check, answer.idle_s) = (key_check, Some(idle_s));
            answer.mismatches = state.mismatches.load(Ordering::SeqCst);
            if matches!(behaviour, Behaviour::RouteNothing) {
                answer.pools.clear();
            }
            if matches!(behaviour, Behaviour::Standby) {
                answer.generation += 1;
                answer.standby = true;
            }
            if matches!(behaviour, Behaviour::Admit) {
                admit(&mut answer);
            }
            state.taken.lock().expect("a lock").push(request);
            axum::Json(answer).into_response()
        }
    }
}

/// Three requests in flight and two conversations held on every replica.
fn answer(request: &SyncRequest) -> SyncAnswer {
    let replica = |report: &homing_routing::sync::ReplicaReport| ReplicaAnswer {
        replica: report.replica,
        in_flight: 3,
        own: 4,
        spill_threshold: 8,
        spill_margin: Some(8),
        held_conversations: Some(2),
        recent_conversations: Some(2),
        recent_context_bytes: Some(80_000),
        active_conversations: None,
        active_context_tokens: None,
        requests: OutcomeCounts { placed: 3, ..OutcomeCounts::default() },
    };
    let pools = request.pools.iter().map(|pool| PoolAnswer {
        cluster: pool.cluster.clone(),
        affinity: true,
        spill_threshold_auto: Some(true),
        spill_margin_auto: Some(true),
        snapshot_age_ms: Some(50),
        prompt_bytes: 0,
        repeated_bytes: 0,
        first_turns: 0,
        admission: None,
        replicas: pool.replicas.iter().map(replica).collect(),
    });
    SyncAnswer {
        version: SYNC_VERSION,
        generation: request.generation,
        sequence: request.sequence,
        pools: pools.collect(),
        filter_version: "0.1.0".to_owned(),
        ..SyncAnswer::default()
    }
}

/// A binding of this moment.
pub(crate) fn binding(digest: u128, home: SocketAddr) -> Binding {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    Binding {
        conversation: Digest(digest),
        home: ReplicaName::endpoint(home).id(),
        bound_at_ms: u64::try_from(now.as_millis()).expect("milliseconds"),
        last_turn_s: u32::try_from(now.as_secs()).expect("seconds"),
        bytes: 1_000,
    }
}

/// Two requests in line, and two active conversations of 10,000 tokens each at every replica, which have 1,000 more in common.
fn admit(answer: &mut SyncAnswer) {
    for pool in &mut answer.pools {
        let by_reason = HeldCounts { no_room: 1, behind_others: 1, ..HeldCounts::default() };
        pool.admission = Some(AdmissionAnswer { held: 2, oldest_held_ms: Some(1_500), by_reason, shared_tokens: 1_000 });
        for replica in &mut pool.replicas {
            (replica.active_conversations, replica.active_context_tokens) = (Some(2), Some(21_000));
        }
    }
}

/// A running collector and its own HTTP.
pub(crate) struct Running {
    pub(crate) collector: Collector,
    client: reqwest::Client,
}

/// A configuration with one pool `pool` and everything as fast as it may be.
pub(crate) fn config(replicas: &[SocketAddr], more: &str) -> String {
    let replicas: String = replicas.iter().map(|address| format!("  - address: {address}\n")).collect();
    config_with(&format!("  replicas:\n{replicas}"), more)
}

/// The same with these keys of the pool, each line indented by two.
pub(crate) fn config_with(pool: &str, more: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nscrape: {{ interval: 50ms, timeout: 300ms }}\n{more}pools:\n- cluster: pool\n  max_num_seqs: 32\n{pool}"
    )
}

/// The part of a configuration that names Envoys.
pub(crate) fn envoys(entries: &[&str]) -> String {
    let entries: String = entries.iter().map(|entry| format!("- {{ {entry} }}\n")).collect();
    format!("envoys:\n{entries}")
}

pub(crate) async fn run(config: &str) -> Running {
    run_with(config, System).await
}

/// The same with names looked up in `lookup`.
pub(crate) async fn run_with(config: &str, lookup: impl Lookup + Clone + 'static) -> Running {
    let config = Config::parse(config, "test.yaml").expect("a configuration");
    let collector = Collector::start_with(&config, lookup).await.expect("a collector");
    Running { collector, client: reqwest::Client::builder().no_proxy().build().expect("a client") }
}

impl Running {
    pub(crate) async fn get(&self, path: &str) -> (StatusCode, HeaderMap, String) {
        let response = self.client.get(self.url(path)).send().await.expect("an answer");
        (response.status(), response.headers().clone(), response.text().await.expect("text"))
    }

    /// A call of the API that changes something: its status and its answer.
    pub(crate) async fn call(&self, method: Method, path: &str, token: Option<&str>) -> (StatusCode, Value) {
        let mut request = self.client.request(method, format!("http://{}{path}", self.collector.address()));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = request.send().await.expect("an answer");
        (response.status(), response.json().await.expect("JSON"))
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.collector.address())
    }

    /// Asks under another name than its address.
    pub(crate) async fn get_as(&self, host: &str, path: &str) -> StatusCode {
        self.client.get(self.url(path)).header("host", host).send().await.expect("an answer").status()
    }

    pub(crate) async fn get_if_changed(&self, path: &str, tag: &str) -> StatusCode {
        self.client.get(self.url(path)).header("if-none-match", tag).send().await.expect("an answer").status()
    }

    pub(crate) async fn post(&self, path: &str) -> StatusCode {
        self.client.post(self.url(path)).send().await.expect("an answer").status()
    }

    pub(crate) async fn stream(&self, path: &str) -> States {
        let response = self.client.get(self.url(path)).send().await.expect("an answer");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        States { response, pending: String::new() }
    }

    pub(crate) async fn status(&self) -> Value {
        serde_json::from_str(&self.get("/api/v1/pools").await.2).expect("JSON")
    }

    /// Waits until the status is as described, and returns it.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut status = Value::Null;
        let waiting = async {
            loop {
                status = self.status().await;
                if holds(&status) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            panic!("never seen: {what}; the last status was {status:#}");
        }
        status
    }

    /// Waits until the pool's replica at `index` is in `state`, and returns it.
    pub(crate) async fn until_replica(&self, index: usize, state: &str) -> Value {
        let pointer = format!("/pools/0/replicas/{index}");
        let status = self
            .until(&format!("replica {index} {state}"), |status| {
                status.pointer(&pointer).is_some_and(|replica| replica["state"] == state)
            })
            .await;
        status.pointer(&pointer).cloned().expect("a replica")
    }

    /// Waits until the Envoy at `index` is as described, and returns it.
    pub(crate) async fn until_envoy(&self, index: usize, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let status = self.until(what, |status| holds(&status["envoys"][index])).await;
        status["envoys"][index].clone()
    }
}

/// Server-sent states.
pub(crate) struct States {
    response: reqwest::Response,
    pending: String,
}

impl States {
    /// The next state.
    pub(crate) async fn next_state(&mut self) -> Value {
        loop {
            if let Some((event, rest)) = self.pending.split_once("\n\n") {
                let data = event.strip_prefix("event: state\ndata: ").expect("a state");
                let state = serde_json::from_str(data).expect("JSON");
                self.pending = rest.to_owned();
                return state;
            }
            let more = tokio::time::timeout(PATIENCE, self.response.chunk()).await.expect("an event in time");
            self.pending += std::str::from_utf8(&more.expect("a stream").expect("more of it")).expect("UTF-8");
        }
    }
}

/// An address at which nothing listens for now.
pub(crate) async fn free_address() -> SocketAddr {
    Server::start("127.0.0.1:0".parse().expect("an address"), Router::new()).await.close().await
}

impl Server {
    async fn close(self) -> SocketAddr {
        let address = self.address;
        self.stop().await;
        address
    }
}

/// Whether a problem says `text`.
pub(crate) fn says(problem: &Value, text: &str) -> bool {
    problem.as_str().is_some_and(|problem| problem.contains(text))
}

/// Serves a fake Envoy on a Unix socket for the rest of the test.
pub(crate) fn serve_unix(path: &Path, state: &Arc<EnvoyState>) -> JoinHandle<()> {
    let listener = tokio::net::UnixListener::bind(path).expect("a socket");
    let router = state.router();
    tokio::spawn(async move { axum::serve(listener, router).await.expect("a server") })
}
