//! The collector, a replica and Envoy, killed and started again in every order, under load.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use homing_tests::agents::{Account, Agents, Doing, End};
use homing_tests::browser::{Screen, Visitor};
use homing_tests::stack_at_speed;
use serde_json::Value;
use tokio::time::{Instant, sleep};
use xtask::client::Exchange;
use xtask::stack::{Stack, StackOptions};
use xtask::statistics::running;

use crate::{SOON, console, opened};

const AGENTS: usize = 6;

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Collector,
    Replica,
    Envoy,
}
use Part::{Collector, Envoy, Replica};

/// Every order of three parts.
const ORDERS: [[Part; 3]; 6] = [
    [Collector, Replica, Envoy],
    [Collector, Envoy, Replica],
    [Replica, Collector, Envoy],
    [Replica, Envoy, Collector],
    [Envoy, Collector, Replica],
    [Envoy, Replica, Collector],
];

#[tokio::test(flavor = "multi_thread")]
async fn in_every_order_of_kills_and_of_starts_only_what_a_killed_process_held_is_lost_and_the_page_is_right_soon_after()
-> Result<()> {
    // Six of the thirty-six pairs, in which each order of kills and each of starts comes once.
    let pairs = ORDERS.iter().copied().zip(ORDERS.iter().rev().copied());
    all_of(pairs, Duration::from_millis(500)).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes; `cargo xtask test --restarts` runs it"]
async fn every_order_of_kills_with_every_order_of_starts() -> Result<()> {
    let pairs = ORDERS.iter().flat_map(|kills| ORDERS.iter().map(|starts| (*kills, *starts)));
    // Longer than whatever is tried again ever pauses.
    all_of(pairs, Duration::from_millis(2500)).await
}

async fn all_of(pairs: impl Iterator<Item = ([Part; 3], [Part; 3])>, apart: Duration) -> Result<()> {
    let stack = stack_at_speed(StackOptions::default(), 2.0).await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    let agents = Agents::start(stack.proxy, AGENTS)?;
    let mut trial = Trial { stack, visitor, agents, victim: 0, outages: BTreeMap::new(), apart };
    for (number, (kills, starts)) in pairs.enumerate() {
        let what = format!("killed {kills:?}, started {starts:?}");
        let (took, losses) = trial.round(number % AGENTS, kills, starts).await.with_context(|| what.clone())?;
        eprintln!("{what}: right after {took:?}, {losses:?}");
    }
    // What the page could not load while the collector was away is no fault of the page.
    let complaints: Vec<_> = trial.visitor.complaints().into_iter().filter(|text| !text.contains("net::ERR_")).collect();
    assert_eq!(complaints, Vec::<String>::new());
    Ok(())
}

struct Trial {
    stack: Stack,
    visitor: Visitor,
    agents: Agents,
    /// The replica that is killed.
    victim: usize,
    outages: BTreeMap<Part, Outage>,
    /// The time between two kills or starts.
    apart: Duration,
}

/// When a part was killed, was dead, and ran again.
#[derive(Clone, Copy, Debug)]
struct Outage {
    killed: Instant,
    killed_ms: u64,
    dead: Instant,
    back: Instant,
}

/// Requests that a kill met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Losses {
    /// Broken off by the death of Envoy.
    at_envoy: usize,
    /// Broken off by the death of the replica, their answers having begun.
    at_replica: usize,
    /// Saved from the replica that died, their answers not having begun.
    moved: usize,
}

impl Trial {
    /// Kills all parts and starts them again under load, and compares what the page says then with what is the case.
    ///
    /// The replica is one at which this agent has a turn under way, while Envoy lives.
    async fn round(&mut self, agent: usize, kills: [Part; 3], starts: [Part; 3]) -> Result<(Duration, Losses)> {
        self.agents.all(Doing::Talk).await?;
        self.agents.go_on(1).await?;
        let mut through_envoy = true;
        for part in kills {
            if part == Replica && through_envoy {
                let served_by = self.agents.another_turn(agent).await?;
                let is_it = |(_, address): &(_, SocketAddr)| address.to_string() == served_by;
                self.victim = self.stack.replicas.iter().position(is_it).context("the agent's replica")?;
            }
            through_envoy &= part != Envoy;
            let (killed, killed_ms) = (Instant::now(), now_ms());
            self.kill(part).await?;
            let dead = Instant::now();
            self.outages.insert(part, Outage { killed, killed_ms, dead, back: dead });
            sleep(self.apart).await;
        }
        for (place, part) in starts.into_iter().enumerate() {
            if place > 0 {
                sleep(self.apart).await;
            }
            self.start(part).await?;
            self.outages.get_mut(&part).context("it was killed")?.back = Instant::now();
        }
        let back = self.outages[&starts[2]].back;
        // Every agent holds one request now, so that what is in flight stands still.
        self.agents.all(Doing::Hold).await?;
        self.page_is_right(back, AGENTS as u64, None).await?;
        let took = back.elapsed();
        self.agents.all(Doing::Rest).await?;
        let (losses, counted) = self.judge(&self.agents.take()?)?;
        self.page_is_right(Instant::now(), 0, Some(counted)).await?;
        if kills.iter().position(|part| *part == Replica) < kills.iter().position(|part| *part == Envoy) {
            let met = if Agents::streams(agent) { losses.at_replica } else { losses.moved };
            ensure!(met >= 1, "the agent's turn was under way at the replica: {losses:?}");
        }
        Ok((took, losses))
    }

    async fn kill(&mut self, part: Part) -> Result<()> {
        match part {
            Collector => self.stack.collector.as_mut().context("the collector")?.0.kill().await,
            Replica => self.stack.replicas[self.victim].0.kill().await,
            Envoy => self.stack.envoy.process.kill().await,
        }
    }

    async fn start(&mut self, part: Part) -> Result<()> {
        match part {
            Collector => self.stack.revive_collector().await,
            Replica => self.stack.restart_replica(self.victim).await,
            Envoy => self.stack.revive_envoy().await,
        }
    }

    /// Every request came to its end but those that a killed process held; also counts those that Envoy must have counted since it is back.
    fn judge(&self, accounts: &[Account]) -> Result<(Losses, u64)> {
        let victim = self.stack.replicas[self.victim].1.to_string();
        let (envoy, replica) = (self.outages[&Envoy], self.outages[&Replica]);
        let met = |account: &Exchange, outage: Outage| account.sent <= outage.dead && account.ended >= outage.killed;
        let (mut losses, mut refused, mut counted) = (Losses::default(), 0, 0);
        for Account { agent, exchange: account } in accounts {
            let had_begun = |at: Instant| account.begun.as_ref().is_some_and(|(begun, _)| *begun <= at);
            let served_by = account.begun.as_ref().map(|(_, turn)| turn.replica.as_str());
            match &account.end {
                End::Whole | End::GivenUp
                    if met(account, replica) && !had_begun(replica.killed) && account.sent < replica.killed =>
                {
                    let outcome = account.begun.as_ref().map(|(_, turn)| turn.outcome.as_str());
                    losses.moved += usize::from(outcome == Some("rehomed") && served_by != Some(&victim));
                }
                End::Whole | End::GivenUp => {}
                End::NoConnection if account.sent <= envoy.back && account.ended >= envoy.killed => refused += 1,
                End::Broken if met(account, envoy) => losses.at_envoy += 1,
                End::Broken if met(account, replica) && had_begun(replica.dead) && served_by == Some(&victim) => {
                    losses.at_replica += 1;
                }
                _ => anyhow::bail!(
                    "a request was lost that no killed process had: agent {agent}, {account:?}; {victim}: {:?}",
                    self.outages
                ),
            }
            let reached = account.sent > envoy.dead && account.end != End::NoConnection;
            counted += u64::from(reached);
        }
        ensure!(losses.at_envoy <= AGENTS, "each agent has one request under way: {losses:?}");
        ensure!(refused >= AGENTS, "each agent must have met the dead proxy: {refused}");
        Ok((losses, counted))
    }

    /// Waits until page and API say what is the case: at the latest so long after `since`.
    async fn page_is_right(&self, since: Instant, in_flight: u64, counted: Option<u64>) -> Result<()> {
        loop {
            let wrong = self.wrong(in_flight, counted).await?;
            let late = since.elapsed();
            if wrong.is_empty() {
                return if late < SOON { Ok(()) } else { Err(anyhow::anyhow!("the page was right only after {late:?}")) };
            }
            ensure!(late < SOON * 3, "after {late:?}: {}", wrong.join("; "));
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// What page and API say otherwise than it is.
    async fn wrong(&self, in_flight: u64, counted: Option<u64>) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |what: &str, seen: Value, is: Value| {
            if seen != is {
                wrong.push(format!("{what} is {is}, but {seen} is shown"));
            }
        };
        let mut engines = Vec::new();
        for (_, address) in &self.stack.replicas {
            engines.push(running(*address).await?);
        }
        let texts = |numbers: &[u64]| Value::from(numbers.iter().map(ToString::to_string).collect::<Vec<_>>());
        check("in flight in the engines", engines.iter().sum::<u64>().into(), in_flight.into());

        let page: Value = self.visitor.ask(PAGE).await?;
        check("the link", page["link"].clone(), "live".into());
        check("the title", page["title"].clone(), "Homing".into());
        check("the states on the page", page["states"].clone(), vec!["ready"; engines.len()].into());
        check("in flight on the page", page["in_flight"].clone(), texts(&engines));
        check("running on the page", page["running"].clone(), texts(&engines));
        check("in flight on the card", page["all_in_flight"].clone(), in_flight.to_string().into());
        check("affinity on the card", page["affinity"].clone(), "On".into());
        check("the Envoy on the page", page["envoy"].clone(), "connected".into());
        check("problems on the page", page["problems"].clone(), "".into());

        let status: Value = reqwest::get(format!("{}/api/v1/pools", console(&self.stack)?)).await?.json().await?;
        let (pool, envoy) = (&status["pools"][0], &status["envoys"][0]);
        let of =
            |key: &str| pool["replicas"].as_array().into_iter().flatten().map(|replica| replica[key].clone()).collect::<Vec<_>>();
        check("the states", of("state").into(), vec!["ready"; engines.len()].into());
        check("in flight", of("in_flight").into(), engines.clone().into());
        check("running", of("running").into(), engines.into());
        check("the Envoy", envoy["connected"].clone(), true.into());
        // The page is a second older than the API, in which an Envoy takes four.
        let taken = (page["taken"].as_u64(), envoy["answered"].as_u64());
        let up_to_date = matches!(taken, (Some(page), Some(api)) if page > 0 && page <= api && api - page <= 8);
        check(&format!("the count of snapshots taken, {taken:?}, up to date"), up_to_date.into(), true.into());
        check("the Envoy answers", (envoy["answer_age_ms"].as_u64() < Some(1000)).into(), true.into());
        let since = pool["routing"]["counting_since_ms"].as_u64();
        check("counting since the Envoy's start", (since > Some(self.outages[&Envoy].killed_ms)).into(), true.into());
        if let Some(counted) = counted {
            let requests = pool["routing"]["requests"].as_object().context("counts")?;
            check("requests", requests.values().filter_map(Value::as_u64).sum::<u64>().into(), counted.into());
            check("requests in the rows", page["counted"].clone(), counted.into());
        }
        Ok(wrong)
    }
}

/// What the page shows, at one moment.
const PAGE: &str = "(() => {
    const all = (name) => [...document.querySelectorAll(`.replicas tbody [data-f=${name}]`)].map((cell) => cell.textContent);
    const fact = (name) => document.querySelector(`[data-fact=${name}] dd`)?.textContent;
    const counts = ['sticky', 'spilled', 'pinned', 'placed', 'rehomed', 'other'].flatMap(all);
    return {
        link: document.body.dataset.link, title: document.title, states: all('state'), in_flight: all('in_flight'), running: all('running'),
        all_in_flight: fact('in-flight'), affinity: fact('affinity'), envoy: document.querySelector('.envoys [data-f=state]')?.textContent,
        taken: Number(document.querySelector('.envoys [data-f=answered]')?.textContent.replaceAll(',', '')),
        problems: [...document.querySelectorAll('.problem')].map((cell) => cell.textContent).join(''),
        counted: counts.reduce((sum, count) => sum + Number(count.replaceAll(',', '')), 0),
    };
})()";

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
