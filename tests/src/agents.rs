//! Agents that talk through the proxy without a pause, and keep account of how each of their requests ended.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use reqwest::{Client, Response};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
pub use xtask::client::End;
use xtask::client::{self, Exchange};

use crate::{Turn, chat_body, eventually};

/// The pause before a request is sent again that failed.
const AGAIN: Duration = Duration::from_millis(20);

/// Tokens of an ordinary answer.
const SHORT: u32 = 30;

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

/// One request, and whose it was.
#[derive(Clone, Debug)]
pub struct Account {
    /// The agent.
    pub agent: usize,
    /// What came of it.
    pub exchange: Exchange,
}

/// What one agent is at.
#[derive(Clone, Debug, Default)]
struct Desk {
    /// What it has under way; nothing while it rests.
    doing: Option<Doing>,
    /// Turns it has begun: those it wants whole count once they are sent, those it wants streamed once their answers begin.
    begun: usize,
    /// Where its last answer came from.
    replica: String,
}

/// Agents at work until this is dropped.
#[derive(Debug)]
pub struct Agents {
    count: usize,
    doing: watch::Sender<Doing>,
    accounts: Arc<Mutex<Vec<Account>>>,
    desks: Arc<Mutex<Vec<Desk>>>,
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
        let desks = Arc::new(Mutex::new(vec![Desk::default(); count]));
        let mut tasks = JoinSet::new();
        for number in 0..count {
            // As agents do, each keeps its connection.
            let agent = Agent { number, url: format!("http://{proxy}/v1/chat/completions"), client: Client::builder().build()? };
            let (doing, accounts, desks) = (doing.subscribe(), Arc::clone(&accounts), Arc::clone(&desks));
            tasks.spawn(async move { agent.work(doing, &accounts, |change| change(&mut lock(&desks)[number])).await });
        }
        Ok(Self { count, doing, accounts, desks, _tasks: tasks })
    }

    /// Tells them what to do, and waits until all of them do it.
    ///
    /// # Errors
    /// If they do not.
    pub async fn all(&self, doing: Doing) -> Result<()> {
        self.doing.send_replace(doing);
        let wanted = (doing != Doing::Rest).then_some(doing);
        eventually(&format!("all agents to {doing:?}"), async || Ok(lock(&self.desks).iter().all(|desk| desk.doing == wanted)))
            .await
    }

    /// Waits until so many more requests have ended for each agent.
    ///
    /// # Errors
    /// If they do not.
    pub async fn go_on(&self, more: usize) -> Result<()> {
        let wanted = lock(&self.accounts).len() + more * self.count;
        eventually("the load to go on", async || Ok(lock(&self.accounts).len() >= wanted)).await
    }

    /// Whether an agent wants its answers streamed while it talks.
    pub fn streams(agent: usize) -> bool {
        !agent.is_multiple_of(3)
    }

    /// Waits until an agent has begun another turn, and says which replica served the last.
    ///
    /// # Errors
    /// If it does not.
    pub async fn another_turn(&self, agent: usize) -> Result<String> {
        let before = lock(&self.desks)[agent].begun;
        eventually("another turn", async || Ok(lock(&self.desks)[agent].begun > before)).await?;
        Ok(lock(&self.desks)[agent].replica.clone())
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
    async fn work(self, mut doing: watch::Receiver<Doing>, accounts: &Mutex<Vec<Account>>, desk: impl Fn(&dyn Fn(&mut Desk))) {
        loop {
            let now = *doing.borrow_and_update();
            desk(&|desk| desk.doing = (now == Doing::Talk).then_some(now));
            if now == Doing::Rest {
                if doing.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let streamed = now == Doing::Hold || Agents::streams(self.number);
            desk(&|desk| desk.begun += usize::from(!streamed));
            let (sent, mut begun) = (Instant::now(), None);
            let end = match self.send(now, streamed).await {
                Err(end) => end,
                Ok(response) => {
                    let turn = Turn::of(&response);
                    begun = Some((Instant::now(), turn.clone()));
                    desk(&|desk| {
                        *desk = Desk { doing: Some(now), begun: desk.begun + usize::from(streamed), replica: turn.replica.clone() };
                    });
                    tokio::select! {
                        end = client::read(response, streamed) => end,
                        _ = doing.wait_for(|other| *other != Doing::Hold), if now == Doing::Hold => End::GivenUp,
                    }
                }
            };
            let again = !matches!(end, End::Whole | End::GivenUp);
            lock(accounts).push(Account { agent: self.number, exchange: Exchange { sent, begun, ended: Instant::now(), end } });
            if again {
                sleep(AGAIN).await;
            }
        }
    }

    async fn send(&self, doing: Doing, streamed: bool) -> Result<Response, End> {
        let text = format!("agent {}", self.number);
        let mut body = chat_body(&text, if doing == Doing::Hold { LONG } else { SHORT });
        body["stream"] = json!(streamed);
        client::begin(&self.client, &self.url, &text, &body).await
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
