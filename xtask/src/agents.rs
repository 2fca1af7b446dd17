//! Agents whose turns go to any of some Envoys, and the account of how each turn ended.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use reqwest::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::client::{Exchange, chat_body};
use crate::wait::eventually;

/// How long the whole of a turn may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// What agents do.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// The pause between a turn's end and the next one.
    pub pause: Duration,
    /// Turns of a conversation; then a new one begins.
    pub turns: u32,
    /// Tokens of an answer.
    pub tokens: u32,
    /// Whether two answers of three are streamed; none is, if not.
    pub stream: bool,
}

/// A turn that ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The conversation.
    pub conversation: String,
    /// Which of its turns, from 0.
    pub number: u32,
    /// Which Envoy it went to.
    pub proxy: usize,
    /// How long after its conversation's first turn it was sent.
    pub age: Duration,
    /// The replica that served the turn before it.
    pub before: Option<String>,
    /// What came of it.
    pub exchange: Exchange,
}

impl Ended {
    /// Whether it was served where the turn before it was; nothing for first turns and those without an answer.
    pub fn stayed(&self) -> Option<bool> {
        let (turn, before) = (self.exchange.turn().filter(|turn| !turn.replica.is_empty())?, self.before.as_ref()?);
        Some(turn.replica == *before)
    }
}

/// Agents at work.
#[derive(Debug)]
pub struct Agents {
    ended: Arc<Mutex<Vec<Ended>>>,
    open: watch::Sender<Vec<bool>>,
    tasks: JoinSet<()>,
    stop: watch::Sender<bool>,
}

impl Agents {
    /// Sends `count` agents to work, each with one conversation after the other. Every turn goes to any Envoy that is open, over a
    /// connection that may have been used before.
    ///
    /// # Errors
    /// If there can be no client.
    pub fn start(proxies: &[SocketAddr], count: usize, habits: Habits) -> Result<Self> {
        let (ended, open, stop) =
            (Arc::new(Mutex::new(Vec::new())), watch::Sender::new(vec![true; proxies.len()]), watch::Sender::new(false));
        let client = Client::builder().timeout(PATIENCE).build()?;
        let urls: Vec<_> = proxies.iter().map(|proxy| format!("http://{proxy}/v1/chat/completions")).collect();
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let agent = Agent {
                client: client.clone(),
                urls: urls.clone(),
                habits,
                streams: habits.stream && !number.is_multiple_of(3),
                open: open.subscribe(),
                stop: stop.subscribe(),
                ended: Arc::clone(&ended),
            };
            tasks.spawn(async move {
                // They do not begin in step.
                sleep(habits.pause * u32::try_from(number % 16).unwrap_or(0) / 16).await;
                for session in 0.. {
                    if *agent.stop.borrow() {
                        return;
                    }
                    agent.converse(&format!("agent-{number}-{session}")).await;
                }
            });
        }
        Ok(Self { ended, open, tasks, stop })
    }

    /// Waits until this many more turns have ended.
    ///
    /// # Errors
    /// If half a minute is too short.
    pub async fn go_on(&self, turns: usize) -> Result<()> {
        let wanted = lock(&self.ended).len() + turns;
        eventually("the turns", async || Ok(lock(&self.ended).len() >= wanted)).await
    }

    /// Sends no more turns to an Envoy, as a load balancer does that noticed it, or sends some again.
    pub fn set_open(&self, proxy: usize, open: bool) {
        self.open.send_modify(|all| all[proxy] = open);
    }

    /// The turns that have ended.
    pub fn ended(&self) -> Vec<Ended> {
        lock(&self.ended).clone()
    }

    /// Ends all conversations with their next turn, and returns every turn.
    ///
    /// # Errors
    /// If an agent panicked.
    pub async fn finish(mut self) -> Result<Vec<Ended>> {
        self.stop.send_replace(true);
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("an agent")?;
        }
        Ok(self.ended())
    }
}

struct Agent {
    client: Client,
    urls: Vec<String>,
    habits: Habits,
    streams: bool,
    open: watch::Receiver<Vec<bool>>,
    stop: watch::Receiver<bool>,
    ended: Arc<Mutex<Vec<Ended>>>,
}

impl Agent {
    async fn converse(&self, conversation: &str) {
        let first = Instant::now();
        let mut before = None;
        let mut text = conversation.repeat(20);
        let mut random = conversation.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte));
        for number in 0..self.habits.turns {
            if *self.stop.borrow() {
                return;
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let usable: Vec<_> = self.open.borrow().iter().enumerate().filter(|(_, open)| **open).map(|(index, _)| index).collect();
            let proxy = usable[(random >> 33) as usize % usable.len()];
            text.push_str(" and another turn that says a little more than the one before it did");
            let age = first.elapsed();
            let body = chat_body(&text, self.habits.tokens);
            let exchange = Exchange::of(&self.client, &self.urls[proxy], conversation, body, self.streams).await;
            let ended = Ended { conversation: conversation.to_owned(), number, proxy, age, before: before.clone(), exchange };
            // An answer of Envoy's own names no replica.
            if let Some(turn) = ended.exchange.turn().filter(|turn| !turn.replica.is_empty()) {
                before = Some(turn.replica.clone());
            }
            lock(&self.ended).push(ended);
            sleep(self.habits.pause).await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
