//! A fleet under load, a fault, and the judgement.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, sleep};

use super::report::Row;
use crate::agents::{Agents, Ended, Habits};
use crate::client::{End, Exchange};
use crate::fleet::{FleetOptions, FleetStack};
use crate::stack::{Replica, StackOptions};
use crate::statistics::{Statistics, running};
use crate::tools::Tools;
use crate::wait::{eventually, within};

/// Agents at work, and what each does: most of the time each has a request on its way.
const AGENTS: usize = 32;
const HABITS: Habits = Habits { pause: Duration::from_millis(60), turns: 60, tokens: 120, stream: true };

/// How many times faster than real ones the stand-ins compute: an answer lasts about half a second.
const SPEED: &str = "5";

/// A replica is busy that has half of what it would have if they were spread evenly over four.
const BUSY: u64 = AGENTS as u64 / 8;

/// Turns before the fault: every agent has had some.
const BEFORE: usize = 250;

/// How long the load goes on once the fault has ended.
const AFTER: Duration = Duration::from_secs(5);

/// A fault that still does harm so long before the load's end is not over.
const CALM: Duration = Duration::from_secs(1);

/// A request that takes longer than this, and half as long again as every one before the fault, has met it.
const LATE: Duration = Duration::from_secs(2);

/// After so long every fault must be over.
const LIMIT: Duration = Duration::from_secs(10);

/// How long counters may take until they are right: a VM that failed is noticed after four seconds.
const SETTLED: Duration = Duration::from_secs(15);

/// A conversation's home may still be unknown to the other Envoys while it is younger.
const YOUNG: Duration = Duration::from_secs(1);

/// Errors that every busy Envoy may count.
const USUAL: [&str; 2] = ["contended", "binding_dropped"];

/// What may take requests with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Culprit {
    /// Nothing: no request may be lost.
    Nothing,
    /// A replica, those it had begun to answer.
    Replica(SocketAddr),
    /// One of the Envoys, those that were on their way through it, or came while it was away.
    Envoy(usize),
    /// A worker of an Envoy, those that were on their way when it failed.
    Worker,
}

/// When a fault was over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Recovery {
    /// From its begin until the last request that it cost or made late had ended.
    AnsweredSinceBegin,
    /// The same from its end.
    AnsweredSinceEnd,
    /// From its begin until the last turn was sent that was not served where the turn before was.
    AtHomeSinceBegin,
    /// The same from its end.
    AtHomeSinceEnd,
    /// As the row has seen it, in this time.
    Seen(Duration, &'static str),
}

impl Recovery {
    fn means(self) -> &'static str {
        match self {
            Self::AnsweredSinceBegin => "its begin to the end of the last request that failed or was late",
            Self::AnsweredSinceEnd => "its end to the end of the last request that failed or was late",
            Self::AtHomeSinceBegin => "its begin to the last turn that left its home",
            Self::AtHomeSinceEnd => "its end to the last turn that left its home",
            Self::Seen(_, means) => means,
        }
    }
}

/// What the counters of a new process have of the requests that were sent to it and to the one before.
#[derive(Clone, Copy)]
struct Recount {
    /// Every request that was sent later.
    since: Instant,
    /// None of those that had ended before; without it, it may have any.
    gone: Option<Instant>,
}

/// A fleet at work.
pub(super) struct Trial {
    pub(super) fleet: FleetStack,
    pub(super) agents: Agents,
    began: Option<Instant>,
    ended: Option<Instant>,
    /// What the first Envoy's counters have, if it has become another process.
    recount: Option<Recount>,
    /// Kinds of errors that this fault brings.
    errors: Vec<&'static str>,
    notes: Vec<String>,
}

/// One Envoy of two workers, a collector and four stand-ins; a replica that sends nothing for 3 s is given up.
pub(super) fn options() -> FleetOptions {
    let replica_args = ["--speed", SPEED].map(str::to_owned).to_vec();
    let retry = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0/route/retry_policy";
    let edits = vec![(format!("{retry}/per_try_idle_timeout"), "3s".into())];
    let stack = StackOptions { concurrency: 2, replica_args, edits, ..StackOptions::default() };
    FleetOptions { stack, envoys: 1, collectors: 1, ..FleetOptions::default() }
}

/// The same, and nothing spills: a turn that leaves its home leaves it for the fault.
pub(super) fn without_spilling() -> FleetOptions {
    let mut options = options();
    options.stack.pool = serde_json::json!({ "spill_threshold": 64 });
    options
}

impl Trial {
    /// Starts a fleet and lets agents work until every one has had some turns.
    pub(super) async fn start(tools: &Tools, options: &FleetOptions) -> Result<Self> {
        let fleet = FleetStack::start(tools, options).await?;
        let proxies: Vec<_> = fleet.proxies.iter().map(|proxy| proxy.proxy).collect();
        let agents = Agents::start(&proxies, AGENTS, HABITS)?;
        agents.go_on(BEFORE).await?;
        let (errors, notes) = (Vec::new(), Vec::new());
        Ok(Self { fleet, agents, began: None, ended: None, recount: None, errors, notes })
    }

    /// The place of the replica that has served the most turns.
    pub(super) fn victim(&self) -> usize {
        let turns = self.agents.ended();
        let served = |replica: &Replica| {
            let name = replica.1.to_string();
            turns.iter().filter(|turn| turn.exchange.turn().is_some_and(|turn| turn.replica == name)).count()
        };
        let most = self.fleet.replicas.iter().enumerate().max_by_key(|(_, replica)| served(replica));
        most.map_or(0, |(place, _)| place)
    }

    /// Waits until a replica has answers under way.
    pub(super) async fn until_busy(&self, place: usize) -> Result<()> {
        let replica = self.fleet.replicas[place].1;
        eventually("a busy replica", async || Ok(running(replica).await? >= BUSY)).await
    }

    /// The fault begins.
    pub(super) fn begin(&mut self) {
        self.began = Some(Instant::now());
    }

    /// The fault has ended.
    pub(super) fn end(&mut self) {
        self.ended = Some(Instant::now());
    }

    /// The first Envoy is another process from now on. Whether it starts with some of what the one before had counted.
    pub(super) fn counts_anew(&mut self, inherits: bool) {
        self.recount = Some(Recount { since: Instant::now(), gone: self.began.filter(|_| !inherits) });
    }

    /// These kinds of errors are what the fault is.
    pub(super) fn allow(&mut self, kinds: &[&'static str]) {
        self.errors.extend(kinds);
    }

    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Lets the load go on for a while, ends it, and compares what came of it with what must have.
    pub(super) async fn judge(self, culprit: Culprit, recovery: Recovery) -> Result<Row> {
        let (began, ended) = (self.began.context("the fault has begun")?, self.ended.context("the fault has ended")?);
        sleep(AFTER).await;
        let load_end = Instant::now();
        let turns = self.agents.finish().await?;
        let mut wrong = Vec::new();

        let is_lost = |turn: &&Ended| !turn.exchange.is_whole();
        let (carried, other): (Vec<_>, Vec<_>) =
            turns.iter().filter(is_lost).partition(|turn| is_carried(turn, culprit, began, ended));
        if let Some(turn) = other.first() {
            let (at, exchange) = (turn.exchange.sent.saturating_duration_since(began), &turn.exchange);
            wrong.push(format!("{} lost, such as one sent {at:.1?} after the begin: {:?}", other.len(), exchange.end));
        }
        let before = turns.iter().map(|turn| &turn.exchange).filter(|exchange| exchange.ended < began);
        let slowest = before.map(|exchange| exchange.ended - exchange.sent).max().unwrap_or_default();
        let late = LATE.max(slowest * 3 / 2);
        let last = match recovery {
            Recovery::Seen(..) => None,
            Recovery::AnsweredSinceBegin | Recovery::AnsweredSinceEnd => turns
                .iter()
                .map(|turn| &turn.exchange)
                .filter(|exchange| !exchange.is_whole() || exchange.ended - exchange.sent > late)
                .map(|exchange| exchange.ended)
                .max(),
            Recovery::AtHomeSinceBegin | Recovery::AtHomeSinceEnd => {
                let left = turns.iter().filter(|turn| turn.age > YOUNG && turn.stayed() == Some(false));
                left.map(|turn| turn.exchange.sent).max()
            }
        };
        let since = match recovery {
            Recovery::AnsweredSinceEnd | Recovery::AtHomeSinceEnd => ended,
            _ => began,
        };
        let took = match recovery {
            Recovery::Seen(took, _) => took,
            _ => last.map_or(Duration::ZERO, |last| last.saturating_duration_since(since)),
        };
        let is_over = last.is_none_or(|last| last + CALM < load_end) && took < LIMIT;
        if !is_over {
            wrong.push(format!("not over {took:.1?} later"));
        }
        wrong.extend(counters(&self.fleet, &turns, self.recount, &self.errors, carried.len()).await?);
        Ok(Row {
            requests: turns.len(),
            carried: carried.len(),
            other: other.len(),
            recovered_s: is_over.then_some(took.as_secs_f64()),
            recovered: recovery.means().to_owned(),
            notes: self.notes,
            wrong,
            ..Row::default()
        })
    }
}

/// Whether a request that was lost was carried by what failed.
fn is_carried(turn: &Ended, culprit: Culprit, began: Instant, ended: Instant) -> bool {
    let exchange = &turn.exchange;
    let met = exchange.sent <= ended && exchange.ended >= began;
    met && match culprit {
        Culprit::Nothing => false,
        Culprit::Replica(replica) => exchange.turn().is_some_and(|turn| turn.replica == replica.to_string()),
        Culprit::Envoy(index) => turn.proxy == index,
        // It failed at once.
        Culprit::Worker => exchange.sent <= ended && exchange.end != End::NoConnection,
    }
}

/// What is wrong with the counters once the load has ended.
async fn counters(
    fleet: &FleetStack,
    turns: &[Ended],
    recount: Option<Recount>,
    allowed: &[&str],
    carried: usize,
) -> Result<Vec<String>> {
    let mut last = Vec::new();
    let right = within(SETTLED, "counters", async || {
        last.clear();
        for (index, proxy) in fleet.proxies.iter().enumerate() {
            let statistics = Statistics::read(proxy.admin()?).await?;
            for gauge in ["homing_in_flight", "homing_lane_in_flight", "homing_held_requests"] {
                if !statistics.all_zero(gauge) {
                    last.push(format!("{gauge} of Envoy {index} is {}", statistics.sum(gauge, &[]) as i64));
                }
            }
            let reached = turns.iter().filter(|turn| turn.proxy == index && turn.exchange.end != End::NoConnection);
            let reached: Vec<_> = reached.map(|turn| &turn.exchange).collect();
            let recount = recount.filter(|_| index == 0);
            let count = |of: &dyn Fn(&&&Exchange) -> bool| reached.iter().filter(of).count() as u64;
            let must = count(&|exchange| recount.is_none_or(|recount| exchange.sent > recount.since));
            let may = count(&|exchange| recount.and_then(|recount| recount.gone).is_none_or(|gone| exchange.ended >= gone));
            // What a VM had that failed is counted as given back, or never was.
            let leaked = if allowed.contains(&"leak") { carried as u64 } else { 0 };
            let (expected, counted) = (must - leaked.min(must)..=may, statistics.sum("homing_requests_total", &[]));
            if !expected.contains(&counted) {
                last.push(format!("Envoy {index} counted {counted} requests, not {expected:?}"));
            }
            for (labels, count) in statistics.0.get("homing_errors_total").into_iter().flatten().filter(|(_, count)| *count > 0) {
                if !USUAL.iter().chain(allowed).any(|kind| labels.contains(kind)) {
                    last.push(format!("Envoy {index} counted {count} errors {labels}"));
                }
            }
        }
        for index in 0..fleet.collectors.len() {
            let status = fleet.status(index).await?;
            let replicas = status["pools"][0]["replicas"].as_array().context("replicas")?;
            ensure!(replicas.len() == fleet.replicas.len(), "collector {index} lists {} replicas", replicas.len());
            let busy = replicas.iter().any(|replica| replica["in_flight"] != 0);
            if busy {
                last.push(format!("collector {index} shows requests in flight"));
            }
        }
        Ok(last.is_empty())
    });
    // Patience that ran out is told by what was wrong last.
    match right.await {
        Ok(()) => Ok(Vec::new()),
        Err(error) if last.is_empty() => Err(error),
        Err(_) => Ok(last),
    }
}
