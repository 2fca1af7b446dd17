//! Several Envoys that agree.

use std::time::Duration;

use anyhow::{Context, Result};
use homing_tests::fleet::{stayed, turn};
use homing_tests::{eventually, tools};
use reqwest::Client;
use serde_json::json;
use tokio::time::{Instant, sleep};
use xtask::agents::{Agents, Ended, Habits};
use xtask::fleet::{FleetOptions, FleetStack};
use xtask::stack::StackOptions;

const SECOND: Duration = Duration::from_secs(1);

/// Turns of all agents together: most of them finish a conversation.
const TURNS: usize = 1_500;

async fn fleet(envoys: usize, collectors: usize, redis: bool) -> Result<FleetStack> {
    let replica_args = ["--speed", "20"].map(str::to_owned).to_vec();
    // Nothing spills: a turn that leaves its home leaves it because the Envoys do not agree.
    let pool = json!({ "spill_threshold": 64 });
    let stack = StackOptions { concurrency: 1, replica_args, pool, ..StackOptions::default() };
    FleetStack::start(tools(), &FleetOptions { stack, envoys, collectors, redis, ..FleetOptions::default() }).await
}

fn agents(fleet: &FleetStack) -> Result<Agents> {
    let proxies: Vec<_> = fleet.proxies.iter().map(|proxy| proxy.proxy).collect();
    let habits = Habits { pause: Duration::from_millis(60), turns: 60, tokens: 4, stream: false };
    Agents::start(&proxies, 24, habits)
}

/// Lets agents work for so many turns.
async fn some_turns(fleet: &FleetStack) -> Result<Vec<Ended>> {
    let agents = agents(fleet)?;
    agents.go_on(TURNS).await?;
    agents.finish().await
}

/// How long it takes until a conversation that one Envoy has just placed is at home at another one.
async fn agreement(fleet: &FleetStack, from: usize, to: usize, conversation: &str) -> Result<Duration> {
    let client = Client::new();
    let home = turn(&client, fleet.proxies[from].proxy, conversation, "hello").await?.replica;
    let started = Instant::now();
    // A call that generates nothing follows a home and makes none.
    eventually("agreement", async || {
        let url = format!("http://{}/v1/messages/count_tokens", fleet.proxies[to].proxy);
        let body = json!({ "model": xtask::stack::MODEL, "messages": [{ "role": "user", "content": "hello" }] });
        let answer = client.post(url).header("x-session-id", conversation).json(&body).send().await?;
        let seen = homing_tests::Turn::of(&answer);
        Ok(seen.outcome == "sticky" && seen.replica == home)
    })
    .await?;
    Ok(started.elapsed())
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_go_to_any_envoy_stay_at_home() -> Result<()> {
    let fleet = fleet(3, 1, false).await?;
    let mut slowest = Duration::ZERO;
    for number in 0..10 {
        slowest = slowest.max(agreement(&fleet, number % 3, (number + 1) % 3, &format!("new-{number}")).await?);
    }
    println!("the slowest of ten homes was known to the next Envoy after {slowest:?}");
    assert!(slowest < SECOND, "{slowest:?}");

    let began = Instant::now();
    let turns = some_turns(&fleet).await?;
    assert!(turns.iter().all(|turn| turn.exchange.is_whole()));
    let (early, settled) = (stayed(&turns, Duration::ZERO, began), stayed(&turns, SECOND, began));
    println!("{} turns; stayed {early:.4}, {settled:.4} after a conversation's first second", turns.len());
    assert!(settled >= 0.99, "{}", gone(&turns, began));
    let over_three = hits(&fleet).await?;
    drop(fleet);

    let alone = self::fleet(1, 1, false).await?;
    assert!(some_turns(&alone).await?.iter().all(|turn| turn.exchange.is_whole()));
    let over_one = hits(&alone).await?;
    println!("prompt tokens found in caches: {over_three:.4} over three Envoys, {over_one:.4} over one");
    assert!(over_one > 0.5 && over_three > over_one - 0.02, "{over_three} over three Envoys, {over_one} over one");
    Ok(())
}

/// The share of prompt tokens that the replicas found in their caches, by their own counters.
async fn hits(fleet: &FleetStack) -> Result<f64> {
    let (mut found, mut asked) = (0.0, 0.0);
    for (_, replica) in &fleet.replicas {
        let metrics = reqwest::get(format!("http://{replica}/metrics")).await?.text().await?;
        for (name, sum) in [("vllm:prefix_cache_hits_total", &mut found), ("vllm:prefix_cache_queries_total", &mut asked)] {
            let line = metrics.lines().find(|line| line.starts_with(name)).context(name)?;
            *sum += line.rsplit(' ').next().context("a value")?.parse::<f64>()?;
        }
    }
    Ok(found / asked)
}

/// The turns of conversations older than a second that were served elsewhere than the turn before them, from `from` on.
fn gone(turns: &[Ended], from: Instant) -> String {
    let gone = turns.iter().filter(|turn| turn.age > SECOND && turn.exchange.sent >= from && turn.stayed() == Some(false));
    let lines = gone.map(|turn| {
        let (at, answer) = (turn.exchange.sent - from, turn.exchange.turn().map(|turn| (&turn.outcome, &turn.replica)));
        format!("{at:?}: {} turn {} at Envoy {}: {answer:?} after {:?}", turn.conversation, turn.number, turn.proxy, turn.before)
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_restarts_is_ready_when_it_knows_every_conversation() -> Result<()> {
    let mut fleet = fleet(2, 1, false).await?;
    let client = Client::new();
    let mut homes = Vec::new();
    for number in 0..200 {
        homes.push(turn(&client, fleet.proxies[0].proxy, &format!("kept-{number}"), "hello").await?.replica);
    }
    // What an Envoy has told nobody is lost with it.
    eventually("the collector to know them", async || Ok(fleet.status(0).await?["affinity"]["conversations"] == 200)).await?;
    fleet.proxies[0].envoy.take().context("an Envoy")?.process.kill().await?;
    fleet.start_envoy(0).await?;
    fleet.until_ready(0).await?;
    for (number, home) in homes.iter().enumerate() {
        let next = turn(&client, fleet.proxies[0].proxy, &format!("kept-{number}"), "hello").await?;
        assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", home));
    }
    Ok(())
}

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Envoy(usize),
    Collector(usize),
    Redis,
}

/// Kills one process and starts it again half a second later, as a supervisor does. Returns when it was killed, and when no agent went
/// there any more, if it is an Envoy.
async fn kill_and_restart(fleet: &mut FleetStack, agents: &Agents, victim: Victim) -> Result<(Instant, Instant)> {
    let killed = Instant::now();
    let mut left = killed;
    let down = Duration::from_millis(500);
    match victim {
        Victim::Envoy(index) => {
            let mut envoy = fleet.proxies[index].envoy.take().context("an Envoy")?;
            envoy.process.kill().await?;
            // As a load balancer does whose connections break.
            agents.set_open(index, false);
            left = Instant::now();
            sleep(down).await;
            fleet.start_envoy(index).await?;
            fleet.until_ready(index).await?;
            agents.set_open(index, true);
        }
        Victim::Collector(index) => {
            fleet.collectors[index].process.take().context("a collector")?.kill().await?;
            sleep(down).await;
            fleet.start_collector(index).await?;
        }
        Victim::Redis => {
            fleet.redis.take().context("Redis")?.kill().await?;
            sleep(down).await;
            fleet.start_redis().await?;
        }
    }
    Ok((killed, left))
}

#[tokio::test(flavor = "multi_thread")]
async fn whichever_process_dies_the_others_go_on_and_agree() -> Result<()> {
    let mut fleet = fleet(3, 2, true).await?;
    let agents = agents(&fleet)?;
    sleep(2 * SECOND).await;
    // The collector that started last is the one that is heard.
    let victims = [Victim::Envoy(0), Victim::Collector(1), Victim::Redis, Victim::Collector(0), Victim::Envoy(2)];
    let mut kills = Vec::new();
    for victim in victims {
        let (killed, left) = kill_and_restart(&mut fleet, &agents, victim).await?;
        sleep((killed + 2 * SECOND).saturating_duration_since(Instant::now())).await;
        let took = agreement(&fleet, 1, 2, &format!("after-{victim:?}")).await?;
        println!("{victim:?}: back and agreed {:?} after it was killed; a new home travelled in {took:?}", killed.elapsed());
        assert!(took < 2 * SECOND, "{victim:?}: {took:?}");
        sleep(2 * SECOND).await;
        kills.push((victim, killed, left));
    }
    let turns = agents.finish().await?;

    for failed in turns.iter().filter(|turn| !turn.exchange.is_whole()) {
        let carried = kills.iter().any(|(victim, killed, left)| {
            *victim == Victim::Envoy(failed.proxy) && failed.exchange.sent <= *left && failed.exchange.ended >= *killed
        });
        assert!(carried, "{failed:?}");
    }
    let failed = turns.iter().filter(|turn| !turn.exchange.is_whole()).count();
    println!("{} turns, {failed} of them cut off with the Envoy that carried them", turns.len());
    for (victim, killed, _) in kills {
        let window: Vec<_> = turns.iter().filter(|turn| turn.exchange.sent < killed + 4 * SECOND).cloned().collect();
        let (during, after) = (stayed(&window, SECOND, killed), stayed(&window, SECOND, killed + 2 * SECOND));
        println!("{victim:?}: stayed {during:.4} from the kill on, {after:.4} from two seconds later on");
        assert!(after >= 0.99, "{victim:?}: {after}\n{}", gone(&window, killed + 2 * SECOND));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn collectors_that_all_restart_find_the_homes_in_redis() -> Result<()> {
    let mut fleet = fleet(2, 2, true).await?;
    let client = Client::new();
    let home = turn(&client, fleet.proxies[0].proxy, "stored", "hello").await?.replica;
    eventually("the store to have it", async || {
        Ok(fleet.status(0).await?["affinity"]["conversations"] == 1 && fleet.status(1).await?["affinity"]["store"]["written"] != 0)
    })
    .await?;
    // Nobody is left that knows it but the store.
    for index in 0..2 {
        fleet.collectors[index].process.take().context("a collector")?.kill().await?;
        fleet.proxies[index].envoy.take().context("an Envoy")?.process.kill().await?;
    }
    for index in 0..2 {
        fleet.start_envoy(index).await?;
        fleet.start_collector(index).await?;
    }
    for index in 0..2 {
        fleet.until_ready(index).await?;
        let next = turn(&client, fleet.proxies[index].proxy, "stored", "hello").await?;
        assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &home));
    }
    Ok(())
}
