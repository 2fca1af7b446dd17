//! `cargo xtask bench soak`: hours in little time: does memory grow, does a counter drift?
//!
//! Two Envoys with one collector. The first one's table is so small that it overflows all the time, the second one's has the default
//! size; every conversation's home reaches both. New conversations begin all the time, replicas are killed and started again, drained and
//! taken back.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use reqwest::{Client, Method};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at, sleep};

use crate::client::{End, Exchange, chat_body};
use crate::fleet::{FleetOptions, FleetStack};
use crate::memory::Memory;
use crate::process::unless_signalled;
use crate::stack::StackOptions;
use crate::statistics::Statistics;
use crate::tools::{Tools, say};
use crate::wait::within;

/// Conversations that the small table remembers; it has twice as many places.
const SMALL: u32 = 512;

/// After this a conversation is forgotten: short, so that what is kept until then has its full size when the measurement begins.
const IDLE: Duration = Duration::from_secs(60);

/// Conversations that are under way at once, and requests of each.
const ACTIVE: u64 = 200;
const TURNS: u64 = 2;

/// Before this nothing is measured.
const WARM_UP: Duration = Duration::from_secs(90);

/// How often memory is looked at.
const SAMPLE: Duration = Duration::from_secs(5);

/// How often something happens to a replica, and how long it lasts.
const EVENT: Duration = Duration::from_secs(15);
const LASTS: Duration = Duration::from_secs(5);

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The replicas' answers: short, by stand-ins that are fast.
const TOKENS: u32 = 8;
const SPEED: &str = "50";

/// How much the mean of the last tenth of the samples may be above that of the first tenth: of what an Envoy has allocated, and of
/// what is resident.
const ALLOCATED_GROWTH: f64 = 2.0 * MIB;
const RESIDENT_GROWTH: f64 = 8.0 * MIB;

const MIB: f64 = (1 << 20) as f64;

/// Whoever shows it may drain replicas.
const TOKEN: &str = "soak";

/// Errors that busy Envoys count: another worker wrote at every try.
const USUAL: [&str; 2] = ["contended", "binding_dropped"];

/// How long.
#[derive(Debug, Args)]
pub struct SoakOptions {
    /// Minutes, of which the first one and a half warm up.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(3..))]
    minutes: u64,
    /// Requests a second.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rate: u32,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Memory of one process over the run, in bytes: the mean of the first tenth, of the last tenth, and the greatest.
#[derive(Clone, Copy, Debug, Serialize)]
struct Course {
    start: f64,
    end: f64,
    largest: f64,
}

impl Course {
    fn of(samples: &[u64]) -> Self {
        let tenth = (samples.len() / 10).max(1);
        let mean = |part: &[u64]| part.iter().sum::<u64>() as f64 / part.len().max(1) as f64;
        let (start, end) = (mean(&samples[..tenth.min(samples.len())]), mean(&samples[samples.len().saturating_sub(tenth)..]));
        Self { start, end, largest: samples.iter().copied().max().unwrap_or(0) as f64 }
    }
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Soak {
    minutes: u64,
    requests: u64,
    conversations: u64,
    kills: u64,
    drains: u64,
    /// Failed requests that a killed replica carried.
    carried: u64,
    /// Other failed requests.
    failed: u64,
    outcomes: BTreeMap<String, u64>,
    errors: BTreeMap<String, u64>,
    memory: BTreeMap<&'static str, Course>,
    wrong: Vec<String>,
}

/// A request that failed.
#[derive(Clone, Debug)]
struct Failure {
    sent: Instant,
    ended: Instant,
    replica: Option<String>,
    end: End,
}

/// A replica that was killed, and when it was back.
struct Outage {
    replica: String,
    killed: Instant,
    back: Instant,
}

/// Sends requests, lets replicas come and go, and looks at memory and counters.
///
/// # Errors
/// If something cannot be built or started; if memory grew, a counter drifted, or a request failed that no killed replica carried.
pub async fn soak(options: &SoakOptions) -> Result<()> {
    let soak = unless_signalled(run(options)).await?;
    if options.json {
        println!("{}", serde_json::to_string(&soak)?);
    } else {
        println!("{}", soak.text());
    }
    ensure!(soak.wrong.is_empty(), "not as it must be: {}", soak.wrong.join("; "));
    Ok(())
}

async fn run(options: &SoakOptions) -> Result<Soak> {
    let tools = Tools::ensure()?;
    let replica_args = ["--speed", SPEED].map(str::to_owned).to_vec();
    let idle = json!(format!("{}s", IDLE.as_secs()));
    let route = vec![json!({ "max_conversations": SMALL, "idle_timeout": idle }), json!({ "idle_timeout": idle })];
    let stack = StackOptions { concurrency: 2, replica_args, ..StackOptions::default() };
    let fleet_options =
        FleetOptions { stack, envoys: 2, collectors: 1, route, api_token: TOKEN.to_owned(), ..FleetOptions::default() };
    let mut fleet = FleetStack::start(&tools, &fleet_options).await?;
    let (start, end) = (Instant::now(), Instant::now() + Duration::from_secs(60 * options.minutes));

    let mut load = Load::start(&fleet, options.rate, end)?;
    let (mut samples, mut outages, mut drains) = (Samples::default(), Vec::new(), 0);
    let mut ticks = interval_at(start + WARM_UP, SAMPLE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut event, mut number) = (start + EVENT, 0);
    say(&format!("{} requests a second for {} minutes", options.rate, options.minutes));
    while Instant::now() + LASTS < end {
        tokio::select! {
            _ = ticks.tick() => {
                samples.take(&fleet).await?;
                if samples.number.is_multiple_of(12) {
                    eprintln!("    {:>3} min: {}", start.elapsed().as_secs() / 60, samples.latest());
                }
            }
            () = tokio::time::sleep_until(event) => {
                let place = number % fleet.replicas.len();
                // Every other time it is a kill.
                if number.is_multiple_of(2) {
                    outages.push(kill(&mut fleet, place).await?);
                } else {
                    drain(&fleet, place).await?;
                    drains += 1;
                }
                number += 1;
                event += EVENT;
            }
        }
    }
    load.finish().await?;
    judge(options, &fleet, &load, &samples, &outages, drains).await
}

/// Kills a replica and starts it again some time later.
async fn kill(fleet: &mut FleetStack, place: usize) -> Result<Outage> {
    let (replica, killed) = (fleet.replicas[place].1.to_string(), Instant::now());
    fleet.replicas[place].0.kill().await?;
    let back = Instant::now();
    sleep(LASTS).await;
    fleet.restart_replica(place).await?;
    Ok(Outage { replica, killed, back })
}

/// Drains a replica and takes it back some time later.
async fn drain(fleet: &FleetStack, place: usize) -> Result<()> {
    let (console, replica) = (fleet.collectors[0].console, fleet.replicas[place].1);
    let url = format!("http://{console}/api/v1/replicas/{replica}/drain");
    for method in [Method::POST, Method::DELETE] {
        let undo = method == Method::DELETE;
        if undo {
            sleep(LASTS).await;
        }
        Client::new().request(method, &url).bearer_auth(TOKEN).send().await?.error_for_status()?;
    }
    Ok(())
}

/// Requests at a fixed rate, whatever becomes of them.
struct Load {
    task: JoinSet<Result<u64>>,
    sent: u64,
    /// Of each Envoy, the requests that reached it.
    reached: Arc<Mutex<Vec<u64>>>,
    failures: Arc<Mutex<Vec<Failure>>>,
}

impl Load {
    fn start(fleet: &FleetStack, rate: u32, end: Instant) -> Result<Self> {
        let urls: Vec<_> = fleet.proxies.iter().map(|proxy| format!("http://{}/v1/chat/completions", proxy.proxy)).collect();
        let (reached, failures) = (Arc::new(Mutex::new(vec![0; urls.len()])), Arc::<Mutex<Vec<_>>>::default());
        let client = Client::builder().timeout(PATIENCE).build()?;
        let (all_reached, all_failures) = (Arc::clone(&reached), Arc::clone(&failures));
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut requests = JoinSet::new();
            let mut ticks = interval(Duration::from_secs(1) / rate);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut sent = 0;
            while Instant::now() < end {
                ticks.tick().await;
                let (number, conversation) = (sent, conversation(sent));
                sent += 1;
                let proxy = number as usize % urls.len();
                let (client, url) = (client.clone(), urls[proxy].clone());
                let (reached, failures) = (Arc::clone(&all_reached), Arc::clone(&all_failures));
                requests.spawn(async move {
                    let id = format!("soak-{conversation}");
                    let body = chat_body(&id.repeat(20), TOKENS);
                    let exchange = Exchange::of(&client, &url, &id, body, number.is_multiple_of(2)).await;
                    reached.lock().unwrap_or_else(PoisonError::into_inner)[proxy] += u64::from(exchange.end != End::NoConnection);
                    if !exchange.is_whole() {
                        let replica = exchange.turn().map(|turn| turn.replica.clone());
                        let failure = Failure { sent: exchange.sent, ended: exchange.ended, replica, end: exchange.end };
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
                    }
                });
                while requests.try_join_next().is_some() {}
            }
            while requests.join_next().await.is_some() {}
            Ok(sent)
        });
        Ok(Self { task, sent: 0, reached, failures })
    }

    /// Waits until every request has ended.
    async fn finish(&mut self) -> Result<()> {
        self.sent = self.task.join_next().await.context("the load")???;
        Ok(())
    }
}

/// Whose request this is: [`ACTIVE`] conversations take turns until each has had [`TURNS`], then others do.
fn conversation(request: u64) -> u64 {
    request / (ACTIVE * TURNS) * ACTIVE + request % ACTIVE
}

/// Memory of each process, by what it is called.
#[derive(Default)]
struct Samples {
    number: usize,
    of: BTreeMap<&'static str, Vec<u64>>,
}

const ENVOYS: [[&str; 2]; 2] = [
    ["Envoy, small table, allocated", "Envoy, small table, resident"],
    ["Envoy, default table, allocated", "Envoy, default table, resident"],
];
const COLLECTOR: &str = "collector, resident";

impl Samples {
    async fn take(&mut self, fleet: &FleetStack) -> Result<()> {
        for (proxy, [allocated, resident]) in fleet.proxies.iter().zip(ENVOYS) {
            let memory = Memory::of_envoy(proxy.envoy.as_ref().context("an Envoy")?).await?;
            self.of.entry(allocated).or_default().push(memory.allocated);
            self.of.entry(resident).or_default().push(memory.resident);
        }
        let collector = fleet.collectors[0].process.as_ref().context("the collector")?;
        self.of.entry(COLLECTOR).or_default().push(Memory::of(collector)?.resident);
        self.number += 1;
        Ok(())
    }

    fn latest(&self) -> String {
        let of = |(name, samples): (&&str, &Vec<u64>)| format!("{name} {:.1}", samples.last().copied().unwrap_or(0) as f64 / MIB);
        self.of.iter().map(of).collect::<Vec<_>>().join("; ") + " MiB"
    }
}

async fn judge(
    options: &SoakOptions,
    fleet: &FleetStack,
    load: &Load,
    samples: &Samples,
    outages: &[Outage],
    drains: u64,
) -> Result<Soak> {
    let mut wrong = Vec::new();
    let failures = load.failures.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let is_carried = |failure: &&Failure| {
        let met = |outage: &Outage| {
            failure.replica.as_ref() == Some(&outage.replica) && failure.sent <= outage.back && failure.ended >= outage.killed
        };
        outages.iter().any(met)
    };
    let (carried, failed): (Vec<_>, Vec<_>) = failures.iter().partition(is_carried);
    if let Some(failure) = failed.first() {
        wrong.push(format!(
            "{} requests failed that no killed replica carried, such as one at {:?}: {:?}",
            failed.len(),
            failure.replica,
            failure.end
        ));
    }

    let mut statistics = Vec::new();
    let mut drifted = Vec::new();
    let reached = load.reached.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let settled = within(PATIENCE, "counters", async || {
        (statistics, drifted) = (Vec::new(), Vec::new());
        for (index, proxy) in fleet.proxies.iter().enumerate() {
            let own = Statistics::read(proxy.admin()?).await?;
            for gauge in ["homing_in_flight", "homing_lane_in_flight"] {
                if !own.all_zero(gauge) {
                    drifted.push(format!("{gauge} of Envoy {index} is {}", own.sum(gauge, &[]) as i64));
                }
            }
            let counted = own.sum("homing_requests_total", &[]);
            if counted != reached[index] {
                drifted.push(format!("Envoy {index} counted {counted} of {} requests", reached[index]));
            }
            statistics.push(own);
        }
        let pool = &fleet.status(0).await?["pools"][0];
        if pool["routing"]["in_flight"] != 0 {
            drifted.push(format!("the collector shows {} in flight", pool["routing"]["in_flight"]));
        }
        Ok(drifted.is_empty())
    });
    if let Err(error) = settled.await {
        ensure!(!drifted.is_empty(), error);
        wrong.extend(drifted);
    }
    let outcomes = by_label(&statistics, "homing_requests_total", "outcome");
    let errors = by_label(&statistics, "homing_errors_total", "kind");
    for (kind, count) in errors.iter().filter(|(kind, count)| **count > 0 && !USUAL.contains(&kind.as_str())) {
        wrong.push(format!("{count} errors of the kind {kind}"));
    }

    let memory: BTreeMap<_, _> = samples.of.iter().map(|(name, samples)| (*name, Course::of(samples))).collect();
    for (name, course) in &memory {
        let most = if name.ends_with("allocated") { ALLOCATED_GROWTH } else { RESIDENT_GROWTH };
        let grown = course.end - course.start;
        if grown > most {
            wrong.push(format!("{name} has grown by {:.1} MiB", grown / MIB));
        }
    }
    Ok(Soak {
        minutes: options.minutes,
        requests: load.sent,
        conversations: load.sent.checked_sub(1).map_or(0, |last| conversation(last) + 1),
        kills: outages.len() as u64,
        drains,
        carried: carried.len() as u64,
        failed: failed.len() as u64,
        outcomes,
        errors,
        memory,
        wrong,
    })
}

/// The sums of a statistic over all Envoys, by one of its labels.
fn by_label(statistics: &[Statistics], name: &str, label: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (labels, value) in statistics.iter().flat_map(|own| own.0.get(name).into_iter().flatten()) {
        let value_of = |pair: &str| Some(pair.strip_prefix(label)?.strip_prefix("=\"")?.trim_end_matches('"').to_owned());
        if let Some(of) = labels.split(',').find_map(value_of) {
            *sums.entry(of).or_default() += value;
        }
    }
    sums
}

impl Soak {
    /// As Markdown.
    fn text(&self) -> String {
        let pairs = |counts: &BTreeMap<String, u64>| {
            let pairs: Vec<_> =
                counts.iter().filter(|(_, count)| **count > 0).map(|(name, count)| format!("{name} {count}")).collect();
            if pairs.is_empty() { "none".to_owned() } else { pairs.join(", ") }
        };
        let mut text = format!(
            "{} minutes, {} requests of {} conversations, {} kills of a replica, {} drains.\n\n",
            self.minutes, self.requests, self.conversations, self.kills, self.drains
        );
        let _ = writeln!(text, "- failed with a replica that was killed: {}; otherwise: {}", self.carried, self.failed);
        let _ = writeln!(text, "- outcomes: {}", pairs(&self.outcomes));
        let _ = writeln!(text, "- `homing_errors_total`: {}", pairs(&self.errors));
        let counters = if self.wrong.is_empty() { "right".to_owned() } else { self.wrong.join("; ") };
        let _ = writeln!(text, "- judgement: {counters}\n");
        text.push_str("| MiB | at the start | at the end | largest |\n|---|--:|--:|--:|");
        for (name, Course { start, end, largest }) in &self.memory {
            let _ = write!(text, "\n| {name} | {:.1} | {:.1} | {:.1} |", start / MIB, end / MIB, largest / MIB);
        }
        text
    }
}
