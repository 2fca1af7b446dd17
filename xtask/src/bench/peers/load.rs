//! One run: a stage's load through one variant, and what the replicas and the machine say of it.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::machine::{Busy, ProcessorTime};
use super::variant::Running;
use crate::load::{Pace, load};
use crate::tools::Tools;

/// The header that names a session, for routers that are told which one to look at.
pub(super) const SESSION_HEADER: &str = "x-session-id";

/// Requests that a stand-in replica remembers; of one that has as many, some may be forgotten.
const REMEMBERED: usize = 256;

/// A load: what `homing-bench load` is asked for besides where and how long.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stage {
    /// Its name on the command line and in the results.
    pub(super) name: String,
    /// Arguments of `homing-bench load`.
    pub(super) args: Vec<String>,
}

impl std::str::FromStr for Stage {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let words = |text: String| text.split_whitespace().map(str::to_owned).collect();
        let positive = |number: &str| number.parse::<f64>().is_ok_and(|number| number.is_finite() && number > 0.0);
        let sessions = |number: &str| number.parse::<u32>().is_ok_and(|sessions| sessions > 0);
        let args = match name.split_once(':') {
            None if sessions(name) => words(format!("--sessions {name}")),
            Some(("open", rate)) if positive(rate) => words(format!("--workload open --rate {rate}")),
            Some(("skewed", number)) if sessions(number) => words(format!("--workload skewed --sessions {number}")),
            _ => return Err("give a number of sessions, such as 8, or open:SESSIONS-A-MINUTE, or skewed:SESSIONS".into()),
        };
        Ok(Self { name: name.to_owned(), args })
    }
}

/// A finished run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Run {
    /// The variant.
    pub(super) variant: String,
    /// The stage.
    pub(super) stage: String,
    /// Counted from 1; all variants of a round send the same sessions.
    pub(super) round: u64,
    /// What was measured.
    #[serde(flatten)]
    pub(super) figures: Figures,
}

/// What a run showed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Turns that came to the replica of the turn before, in per cent of those that had one before, from what the replicas
    /// received; none if a replica forgot some of it.
    pub(super) stayed: Option<f64>,
    /// How busy processors were; none where that cannot be read.
    pub(super) busy: Option<Busy>,
    /// What `homing-bench load --json` printed.
    pub(super) report: Value,
}

/// Sends the load through a variant and looks at what came of it.
pub(super) async fn run(tools: &Tools, through: &Running, label: &str, stage: &Stage, round: u64, pace: Pace) -> Result<Figures> {
    let round = round.to_string();
    let own = ["--seed", &round, "--round", &round, "--label", label, "--replica-header", through.replica_header];
    let args: Vec<_> = own.map(str::to_owned).into_iter().chain(stage.args.iter().cloned()).collect();
    let before = ProcessorTime::now();
    let report: Value = load(tools, &through.url, &through.replicas, pace, &args).await?;
    let busy = before.zip(ProcessorTime::now()).and_then(|(before, after)| after.since(before));
    let mut received = Vec::new();
    for address in &through.replicas {
        received.push(reqwest::get(format!("http://{address}/debug/requests")).await?.json::<Vec<Received>>().await?);
    }
    // A router that keeps the session's header to itself may name the replica in its answers.
    let stayed = stayed(&received).or_else(|| report["stayed"].as_f64());
    Ok(Figures { stayed, busy, report })
}

/// A request as a stand-in replica recorded it.
#[derive(Debug, Deserialize)]
struct Received {
    method: String,
    headers: Vec<(String, String)>,
    body_length: usize,
}

/// Turns at the replica of the turn before, in per cent, from what each replica received. Each turn of a session is longer than the
/// one before, which puts them in order; one that came twice was tried again, and the last replica in the list is taken.
fn stayed(replicas: &[Vec<Received>]) -> Option<f64> {
    if replicas.iter().any(|received| received.len() >= REMEMBERED) {
        return None;
    }
    let mut turns = Vec::new();
    for (replica, received) in replicas.iter().enumerate() {
        for request in received.iter().filter(|request| request.method == "POST") {
            if let Some((_, session)) = request.headers.iter().find(|(name, _)| name == SESSION_HEADER) {
                turns.push((session.as_str(), request.body_length, replica));
            }
        }
    }
    turns.sort_unstable();
    turns.dedup_by(|later, first| {
        let again = (later.0, later.1) == (first.0, first.1);
        if again {
            first.2 = later.2;
        }
        again
    });
    let followed: Vec<_> = turns.windows(2).filter(|pair| pair[0].0 == pair[1].0).collect();
    let at_the_same = followed.iter().filter(|pair| pair[0].2 == pair[1].2).count();
    (!followed.is_empty()).then(|| 100.0 * at_the_same as f64 / followed.len() as f64)
}

/// The sum of a metric's samples at a replica.
pub(super) async fn metric(replica: SocketAddr, name: &str, label: &str) -> Result<f64> {
    let text = reqwest::get(format!("http://{replica}/metrics")).await?.text().await?;
    let line = text.lines().find(|line| line.starts_with(name)).with_context(|| format!("the replica has no metric {name}"))?;
    let after = line.split_once(&format!("{label}=\"")).map(|(_, after)| after);
    let Some(value) = after.and_then(|after| after.split('"').next()?.parse().ok()) else { bail!("{name} has no {label}") };
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(session: &str, body_length: usize) -> Received {
        let headers = vec![("host".to_owned(), "h".to_owned()), (SESSION_HEADER.to_owned(), session.to_owned())];
        Received { method: "POST".into(), headers, body_length }
    }

    #[test]
    fn turns_stay_if_they_come_to_the_replica_of_the_turn_before() {
        let probe = Received { method: "GET".into(), headers: Vec::new(), body_length: 0 };
        let replicas = [vec![turn("a", 10), turn("b", 10), turn("a", 20), probe], vec![turn("a", 30), turn("a", 40)]];
        // a: 10 -> 20 stays, 20 -> 30 moves, 30 -> 40 stays; b has one turn only.
        assert_eq!(stayed(&replicas), Some(100.0 * 2.0 / 3.0));
        assert_eq!(stayed(&[vec![turn("a", 1)], Vec::new()]), None);
    }

    #[test]
    fn a_turn_that_was_tried_again_counts_where_it_was_tried_last() {
        assert_eq!(stayed(&[vec![turn("a", 10)], vec![turn("a", 10), turn("a", 20)]]), Some(100.0));
    }

    #[test]
    fn nothing_is_said_when_a_replica_may_have_forgotten_requests() {
        let many = (1..=REMEMBERED).map(|length| turn("a", length)).collect();
        assert_eq!(stayed(&[many]), None);
    }

    #[test]
    fn a_stage_is_named_by_what_it_sends() {
        let stage: Stage = "16".parse().expect("a stage");
        assert_eq!(stage, Stage { name: "16".into(), args: vec!["--sessions".into(), "16".into()] });
        let stage: Stage = "open:6.5".parse().expect("a stage");
        assert_eq!(stage.args, ["--workload", "open", "--rate", "6.5"]);
        for wrong in ["0", "x", "open", "open:0", "skewed:1.5", "long:4"] {
            assert!(wrong.parse::<Stage>().is_err(), "{wrong}");
        }
    }
}
