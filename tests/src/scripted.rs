//! Replicas that answer when the test says so, behind a real Envoy whose snapshots the test posts.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use xtask::pusher::{Pusher, report};
use xtask::stack::{Stack, StackOptions};

/// Names a request at a scripted replica.
pub const NAME: &str = "x-test-name";

/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// A request at a replica. It is answered when this is dropped.
#[derive(Debug)]
pub struct Arrival {
    /// What it said in [`NAME`].
    pub name: String,
    /// The replica, by its place.
    pub replica: usize,
    /// When its first byte was there.
    pub at: Instant,
    _answer: oneshot::Sender<()>,
}

/// An Envoy with scripted replicas and no collector.
#[derive(Debug)]
pub struct Scripted {
    /// Envoy and its addresses.
    pub stack: Stack,
    /// The replicas' addresses.
    pub replicas: Vec<SocketAddr>,
    cache_tokens: u64,
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    pusher: Pusher,
}

impl Scripted {
    /// Starts Envoy, with caches of this size and the pool's keys.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start(replicas: usize, cache_tokens: u64, mut options: StackOptions) -> Result<Self> {
        let (sender, arrivals) = mpsc::unbounded_channel();
        let mut addresses = Vec::new();
        for replica in 0..replicas {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            addresses.push(listener.local_addr()?);
            tokio::spawn(accept(listener, replica, sender.clone()));
        }
        let endpoint = |at: &SocketAddr| json!({ "endpoint": { "address": { "socket_address": { "address": "127.0.0.1", "port_value": at.port() } } } });
        let endpoints: Vec<_> = addresses.iter().map(endpoint).collect();
        options.replicas = 0;
        options.collector = false;
        options.edits.extend([
            ("/static_resources/clusters/0/load_assignment/endpoints/0/lb_endpoints".to_owned(), json!(endpoints)),
            ("/static_resources/clusters/0/health_checks".to_owned(), json!([])),
        ]);
        let stack = crate::fast_stack(options).await?;
        let pusher = Pusher::new(stack.control, 10);
        let mut scripted = Self { stack, replicas: addresses, cache_tokens, arrivals, pusher };
        scripted.report(|_| "ready").await?;
        Ok(scripted)
    }

    /// Tells Envoy the replicas' states, by their places.
    ///
    /// # Errors
    /// If it does not take the snapshot.
    pub async fn report(&mut self, state: impl Fn(usize) -> &'static str) -> Result<()> {
        let report = |(place, at): (usize, &SocketAddr)| report(*at, state(place), self.cache_tokens);
        let replicas: Vec<_> = self.replicas.iter().enumerate().map(report).collect();
        self.pusher.push(&replicas, 0).await
    }

    /// The next request to arrive.
    ///
    /// # Errors
    /// If none does in time.
    pub async fn arrival(&mut self) -> Result<Arrival> {
        timeout(PATIENCE, self.arrivals.recv()).await.context("no request came")?.context("the replicas are gone")
    }

    /// Whether a request has arrived that was not asked for yet.
    pub fn has_arrival(&self) -> bool {
        !self.arrivals.is_empty()
    }
}

async fn accept(listener: TcpListener, replica: usize, arrivals: mpsc::UnboundedSender<Arrival>) {
    while let Ok((connection, _)) = listener.accept().await {
        // It ends with the connection, or with the test.
        tokio::spawn(serve(connection, replica, arrivals.clone()));
    }
}

async fn serve(connection: TcpStream, replica: usize, arrivals: mpsc::UnboundedSender<Arrival>) -> Result<()> {
    let mut connection = BufReader::new(connection);
    while !connection.fill_buf().await?.is_empty() {
        let at = Instant::now();
        let (mut name, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            connection.read_line(&mut line).await?;
            let Some((header, value)) = line.trim_end().split_once(": ") else { if line == "\r\n" { break } else { continue } };
            match header {
                NAME => value.clone_into(&mut name),
                "content-length" => length = value.parse()?,
                "transfer-encoding" => bail!("a scripted replica reads only bodies of a length"),
                _ => {}
            }
        }
        connection.read_exact(&mut vec![0; length]).await?;
        let (answer, answered) = oneshot::channel();
        arrivals.send(Arrival { name, replica, at, _answer: answer })?;
        // The sender is dropped.
        let _: Result<(), _> = answered.await;
        connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}").await?;
    }
    Ok(())
}

/// How often admission did what begins like this.
///
/// # Errors
/// If Envoy does not answer.
pub async fn events(stack: &Stack, event: &str) -> Result<u64> {
    crate::sum(stack, "homing_admission_total", &[&format!("event=\"{event}")]).await
}

/// Waits until so many requests are in line.
///
/// # Errors
/// If they are not in time.
pub async fn held(stack: &Stack, wanted: u64) -> Result<()> {
    crate::eventually(&format!("{wanted} in line"), async || Ok(crate::sum(stack, "homing_held_requests", &[]).await? == wanted))
        .await
}

/// A request of about 3,000 tokens that streams for half a minute at a stand-in of a real one's speed, or until it is aborted; nothing else
/// may be in flight.
///
/// # Errors
/// If it does not begin.
pub async fn occupy(stack: &Stack) -> Result<JoinHandle<Result<()>>> {
    let mut body = crate::chat_body(&"x".repeat(12_000), 1_500);
    body["stream"] = json!(true);
    let request = Client::new().post(crate::chat_url(stack)).json(&body);
    let streams = tokio::spawn(async move {
        request.send().await?.bytes().await?;
        Ok(())
    });
    crate::eventually("one in flight", async || Ok(crate::sum(stack, "homing_in_flight", &[]).await? == 1)).await?;
    Ok(streams)
}

/// An answer to a request of [`ask`].
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// For how many milliseconds it was held.
    pub held_ms: Option<u64>,
    /// `retry-after`.
    pub retry_after: Option<u64>,
    /// The body, if it is JSON.
    pub body: Value,
}

/// Asks over a connection of its own, with a prompt of about so many tokens.
///
/// # Errors
/// If there is no answer.
pub async fn ask(url: String, name: String, session: Option<String>, tokens: usize) -> Result<Answer> {
    let client = Client::builder().pool_max_idle_per_host(0).build()?;
    let mut request = client.post(url).header(NAME, &name);
    if let Some(session) = session {
        request = request.header("x-session-id", session);
    }
    let text = format!("{name} ").repeat(tokens * 4 / (name.len() + 1));
    let response = request.json(&crate::chat_body(&text, 8)).send().await?;
    let number = |name| response.headers().get(name).and_then(|value| value.to_str().ok()?.parse().ok());
    let (status, held_ms, retry_after) = (response.status().as_u16(), number("x-homing-held-ms"), number("retry-after"));
    let body = serde_json::from_slice(&response.bytes().await?).unwrap_or_default();
    Ok(Answer { status, held_ms, retry_after, body })
}
