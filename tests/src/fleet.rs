//! Clients of several Envoys: agents whose turns go to any of them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use reqwest::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{Turn, chat_body, eventually};

/// The pause between an agent's turns, and the turns of its conversation.
const PAUSE: Duration = Duration::from_millis(60);
const TURNS: u32 = 60;

/// A turn that ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The conversation.
    pub conversation: String,
    /// Which of its turns, from 0.
    pub number: u32,
    /// Which Envoy it went to.
    pub proxy: usize,
    /// When it began.
    pub began: Instant,
    /// How long after its conversation's first turn that was.
    pub age: Duration,
    /// The replica that served the turn before it.
    pub before: Option<String>,
    /// Its answer, or why there was none.
    pub answer: Result<Turn, String>,
}

impl Ended {
    /// Whether it was served.
    pub fn is_served(&self) -> bool {
        self.answer.as_ref().is_ok_and(|turn| turn.status == 200)
    }

    /// Whether it was served where the turn before it was; nothing for first turns and failed ones.
    pub fn stayed(&self) -> Option<bool> {
        let (turn, before) = (self.answer.as_ref().ok()?, self.before.as_ref()?);
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
    pub fn start(proxies: &[SocketAddr], count: usize) -> Result<Self> {
        let (ended, open, stop) =
            (Arc::new(Mutex::new(Vec::new())), watch::Sender::new(vec![true; proxies.len()]), watch::Sender::new(false));
        let client = Client::builder().timeout(Duration::from_secs(20)).build()?;
        let mut tasks = JoinSet::new();
        for agent in 0..count {
            let (client, ended, proxies) = (client.clone(), Arc::clone(&ended), proxies.to_vec());
            let (open, stop) = (open.subscribe(), stop.subscribe());
            tasks.spawn(async move {
                // They do not begin in step.
                sleep(PAUSE * u32::try_from(agent % 16).unwrap_or(0) / 16).await;
                for session in 0.. {
                    if *stop.borrow() {
                        return;
                    }
                    converse(&client, &proxies, &format!("agent-{agent}-{session}"), &open, &stop, &ended).await;
                }
            });
        }
        Ok(Self { ended, open, tasks, stop })
    }

    /// Waits until this many turns have ended, and sees the rest of the conversations off as [`Self::finish`] does.
    ///
    /// # Errors
    /// If an agent panicked, or half a minute was too short.
    pub async fn finish_after(self, turns: usize) -> Result<Vec<Ended>> {
        eventually("the turns", async || Ok(self.ended.lock().unwrap_or_else(PoisonError::into_inner).len() >= turns)).await?;
        self.finish().await
    }

    /// Sends no more turns to an Envoy, as a load balancer does that noticed it, or sends some again.
    pub fn set_open(&self, proxy: usize, open: bool) {
        self.open.send_modify(|all| all[proxy] = open);
    }

    /// The turns that have ended.
    pub fn ended(&self) -> Vec<Ended> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone()
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

async fn converse(
    client: &Client,
    proxies: &[SocketAddr],
    conversation: &str,
    open: &watch::Receiver<Vec<bool>>,
    stop: &watch::Receiver<bool>,
    ended: &Mutex<Vec<Ended>>,
) {
    let first = Instant::now();
    let mut before = None;
    let mut text = conversation.repeat(20);
    let mut random = conversation.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte));
    for number in 0..TURNS {
        if *stop.borrow() {
            return;
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let usable: Vec<_> = open.borrow().iter().enumerate().filter(|(_, open)| **open).map(|(index, _)| index).collect();
        let proxy = usable[(random >> 33) as usize % usable.len()];
        text.push_str(" and another turn that says a little more than the one before it did");
        let began = Instant::now();
        let answer = turn(client, proxies[proxy], conversation, &text).await.map_err(|error| format!("{error:#}"));
        let this = Ended {
            conversation: conversation.to_owned(),
            number,
            proxy,
            began,
            age: began - first,
            before: before.clone(),
            answer,
        };
        if let Ok(turn) = &this.answer {
            before = Some(turn.replica.clone());
        }
        ended.lock().unwrap_or_else(PoisonError::into_inner).push(this);
        sleep(PAUSE).await;
    }
}

/// One turn at one Envoy, read to its end.
///
/// # Errors
/// If there is no answer.
pub async fn turn(client: &Client, proxy: SocketAddr, conversation: &str, text: &str) -> Result<Turn> {
    let request = client.post(format!("http://{proxy}/v1/chat/completions")).header("x-session-id", conversation);
    let response = request.json(&chat_body(text, 4)).send().await?;
    let turn = Turn::of(&response);
    response.bytes().await?;
    Ok(turn)
}

/// The share of turns that stayed where the turn before them was, of those of conversations older than `age` that began from `from` on.
pub fn stayed(turns: &[Ended], age: Duration, from: Instant) -> f64 {
    let counted: Vec<_> = turns.iter().filter(|turn| turn.age > age && turn.began >= from).filter_map(Ended::stayed).collect();
    counted.iter().filter(|stayed| **stayed).count() as f64 / counted.len().max(1) as f64
}
