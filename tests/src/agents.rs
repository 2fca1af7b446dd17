//! Agents that talk through the proxy without a pause, and keep account of how each of their requests ended.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{Turn, chat_body, eventually};

/// The pause before a request is sent again that failed.
const AGAIN: Duration = Duration::from_millis(20);

/// Tokens of an ordinary answer.
const SHORT: u32 = 60;

/// Tokens of an answer that lasts until it is no longer wanted.
const LONG: u32 = 3000;

/// What all agents do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// One turn after the other. Every third agent wants its answers whole, the others streamed.
    Talk,
    /// One long streamed answer each, which is given up when they do something else.
    Hold,
    /// Nothing, once the turn under way has ended.
    Rest,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// With its whole answer.
    Whole,
    /// The agent wanted no more of its answer.
    GivenUp,
    /// No connection to the proxy: it never left.
    NoConnection,
    /// The connection broke.
    Broken,
    /// Otherwise: with an error of the proxy's or a replica's.
    Failed(String),
}

/// One request.
#[derive(Clone, Debug)]
pub struct Account {
    /// When it was sent.
    pub sent: Instant,
    /// When its answer began, and what that said of its routing.
    pub begun: Option<(Instant, Turn)>,
    /// When it ended.
    pub ended: Instant,
    /// How.
    pub end: End,
}

/// Agents at work until this is dropped.
#[derive(Debug)]
pub struct Agents {
    count: usize,
    doing: watch::Sender<Doing>,
    accounts: Arc<Mutex<Vec<Account>>>,
    /// What each agent has under way; one that rests has nothing.
    under_way: Arc<Mutex<Vec<Option<Doing>>>>,
    _tasks: JoinSet<()>,
}

impl Agents {
    /// Starts them.
    ///
    /// # Errors
    /// If no client can be made.
    pub fn start(proxy: SocketAddr, count: usize) -> Result<Self> {
        let doing = watch::Sender::new(Doing::Talk);
        let accounts = Arc::<Mutex<Vec<Account>>>::default();
        let under_way = Arc::new(Mutex::new(vec![None; count]));
        let mut tasks = JoinSet::new();
        for number in 0..count {
            // As agents do, each keeps its connection.
            let agent = Agent { number, url: format!("http://{proxy}/v1/chat/completions"), client: Client::builder().build()? };
            let (doing, accounts, under_way) = (doing.subscribe(), Arc::clone(&accounts), Arc::clone(&under_way));
            tasks.spawn(async move { agent.work(doing, &accounts, &under_way).await });
        }
        Ok(Self { count, doing, accounts, under_way, _tasks: tasks })
    }

    /// Tells them what to do, and waits until all of them do it.
    ///
    /// # Errors
    /// If they do not.
    pub async fn all(&self, doing: Doing) -> Result<()> {
        self.doing.send_replace(doing);
        let wanted = (doing != Doing::Rest).then_some(doing);
        eventually(&format!("all agents to {doing:?}"), async || Ok(lock(&self.under_way).iter().all(|own| *own == wanted))).await
    }

    /// Waits until so many more requests have ended for each agent.
    ///
    /// # Errors
    /// If they do not.
    pub async fn go_on(&self, more: usize) -> Result<()> {
        let wanted = lock(&self.accounts).len() + more * self.count;
        eventually("the load to go on", async || Ok(lock(&self.accounts).len() >= wanted)).await
    }

    /// Every request that has ended since this was last asked.
    ///
    /// # Errors
    /// If there is none.
    pub fn take(&self) -> Result<Vec<Account>> {
        let accounts = std::mem::take(&mut *lock(&self.accounts));
        ensure!(!accounts.is_empty(), "no request has ended");
        Ok(accounts)
    }
}

struct Agent {
    number: usize,
    url: String,
    client: Client,
}

impl Agent {
    async fn work(self, mut doing: watch::Receiver<Doing>, accounts: &Mutex<Vec<Account>>, under_way: &Mutex<Vec<Option<Doing>>>) {
        loop {
            let now = *doing.borrow_and_update();
            lock(under_way)[self.number] = (now == Doing::Talk).then_some(now);
            if now == Doing::Rest {
                if doing.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let (sent, mut begun) = (Instant::now(), None);
            let end = match self.send(now).await {
                Err(end) => end,
                Ok(response) => {
                    let turn = Turn::of(&response);
                    begun = Some((Instant::now(), turn.clone()));
                    lock(under_way)[self.number] = Some(now);
                    tokio::select! {
                        end = self.read(response, &turn) => end,
                        _ = doing.wait_for(|other| *other != Doing::Hold), if now == Doing::Hold => End::GivenUp,
                    }
                }
            };
            let again = !matches!(end, End::Whole | End::GivenUp);
            lock(accounts).push(Account { sent, begun, ended: Instant::now(), end });
            if again {
                sleep(AGAIN).await;
            }
        }
    }

    fn streamed(&self, doing: Doing) -> bool {
        doing == Doing::Hold || !self.number.is_multiple_of(3)
    }

    async fn send(&self, doing: Doing) -> Result<Response, End> {
        let text = format!("agent {}", self.number);
        let mut body = chat_body(&text, if doing == Doing::Hold { LONG } else { SHORT });
        body["stream"] = json!(self.streamed(doing));
        let request = self.client.post(&self.url).header("x-session-id", &text).json(&body);
        request.send().await.map_err(|error| if error.is_connect() { End::NoConnection } else { End::Broken })
    }

    async fn read(&self, response: Response, turn: &Turn) -> End {
        let streamed = response.headers().get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let Ok(body) = response.bytes().await else { return End::Broken };
        let whole = if streamed { body.ends_with(b"data: [DONE]\n\n") } else { serde_json::from_slice::<Value>(&body).is_ok() };
        match (turn.status, whole) {
            (200, true) => End::Whole,
            (200, false) => End::Broken,
            (status, _) => End::Failed(format!("{status} {}", String::from_utf8_lossy(&body))),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
