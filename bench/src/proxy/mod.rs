//! What a filter costs in a proxy: the same requests through several listeners of one proxy, side by side.
//!
//! A *subject* is a listener and what it is called; the first one is what the others are compared with. A *case* is one kind of
//! request. Rounds are short, and in each every case goes to every subject in turn, each round beginning with another one: what
//! else the machine does hits all subjects alike, and a ratio is taken within a round before the median over rounds is.

pub mod cpu;
mod driver;
mod report;
mod request;
pub mod upstream;

pub use driver::{Driver, Load};
pub use report::{CaseReport, Figures, Ratios, Report, Spread, SubjectReport};
pub use request::{IdPlace, Request};

use anyhow::{Context, Result, ensure};
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

/// The size of the bodies that make every conversation known to a subject before anything is measured.
const WARM_UP_BYTES: usize = 1 << 10;

/// How long the proxy is watched while it has nothing to do.
const IDLE: Duration = Duration::from_secs(2);

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// What it is called.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('=').and_then(|(name, address)| Some((name, address.parse().ok()?)));
        let (name, address) = parsed.ok_or_else(|| format!("`{text}` is not NAME=IP:PORT"))?;
        Ok(Self { name: name.to_owned(), address })
    }
}

/// One kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The size of the body.
    pub body_bytes: usize,
    /// Where the conversation is named.
    pub id: IdPlace,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// The listeners, all of the same process; the first one is what the others are compared with.
    pub subjects: Vec<Subject>,
    /// The proxy's process.
    pub pid: u32,
    /// The kinds of requests.
    pub cases: Vec<Case>,
    /// How often each case goes to each subject.
    pub rounds: usize,
    /// How long each time.
    pub time: Duration,
    /// Connections at once.
    pub connections: u32,
    /// Conversations the requests belong to.
    pub conversations: u32,
    /// Whether progress is shown on stderr.
    pub progress: bool,
}

/// Measures.
///
/// # Errors
/// Settings that make no sense, a subject that cannot be reached, or any answer that is not a 200.
pub fn run(config: &ProxyConfig) -> Result<Report> {
    ensure!(config.rounds > 0 && !config.time.is_zero(), "nothing is measured: give at least one round and some seconds");
    ensure!(!config.subjects.is_empty() && !config.cases.is_empty(), "nothing is measured: give at least one subject and case");
    let mut subjects = Vec::new();
    for subject in &config.subjects {
        subjects.push((subject, Driver::connect(subject.address, config.connections, config.conversations)?));
    }
    let requests: Vec<_> = config.cases.iter().map(|case| Request::new(case.body_bytes, case.id)).collect();

    let progress = Progress { shown: config.progress };
    for (subject, driver) in &mut subjects {
        progress.show(&format!("warm-up: {}", subject.name));
        for id in [IdPlace::Header, IdPlace::Body] {
            driver.run_once(&Request::new(WARM_UP_BYTES, id)).with_context(|| format!("warming up {}", subject.name))?;
        }
        for request in &requests {
            driver.run_for(request, config.time).with_context(|| format!("warming up {}", subject.name))?;
        }
    }
    let before = cpu::time(config.pid)?;
    thread::sleep(IDLE);
    let idle = cpu::time(config.pid)?.saturating_sub(before).as_secs_f64() / IDLE.as_secs_f64();

    let mut figures: Vec<Vec<Vec<Figures>>> = vec![vec![Vec::new(); subjects.len()]; requests.len()];
    for round in 0..config.rounds {
        progress.show(&format!("round {} of {}", round + 1, config.rounds));
        for (case, request) in requests.iter().enumerate() {
            for turn in 0..subjects.len() {
                let index = (round + case + turn) % subjects.len();
                let (subject, driver) = &mut subjects[index];
                let before = cpu::time(config.pid)?;
                let load = driver.run_for(request, config.time).with_context(|| format!("measuring {}", subject.name))?;
                let spent = cpu::time(config.pid)?.saturating_sub(before);
                ensure!(load.requests() > 0, "{} answered nothing within {:?}", subject.name, config.time);
                figures[case][index].push(Figures::new(&load, spent));
            }
        }
    }
    progress.end();
    Ok(Report::new(config, idle, &figures))
}

/// On a terminal a line is written over; elsewhere each is a line of its own.
struct Progress {
    shown: bool,
}

impl Progress {
    fn show(&self, text: &str) {
        if self.shown {
            let (before, after) = if io::stderr().is_terminal() { ("\r", "\x1b[K") } else { ("", "\n") };
            eprint!("{before}{text}{after}");
            let _ = io::stderr().flush();
        }
    }

    fn end(&self) {
        if self.shown && io::stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
    }
}

/// What a message says of its body's length.
fn content_length(headers: &[httparse::Header<'_>]) -> Option<usize> {
    let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"))?;
    std::str::from_utf8(header.value).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::upstream::Answer;
    use super::*;

    #[test]
    fn a_subject_that_takes_longer_is_found_to() {
        let server = |name: &str, ms| {
            let answer = Answer { delay: Duration::from_millis(ms), ..Answer::default() };
            Subject { name: name.to_owned(), address: upstream::start(1, answer).unwrap()[0] }
        };
        let config = ProxyConfig {
            subjects: vec![server("fast", 10), server("slow", 40)],
            pid: std::process::id(),
            cases: vec![Case { body_bytes: 1000, id: IdPlace::Header }, Case { body_bytes: 9000, id: IdPlace::Body }],
            rounds: 3,
            time: Duration::from_millis(500),
            connections: 2,
            conversations: 4,
            progress: false,
        };
        let report = run(&config).unwrap();
        assert_eq!(report.cases.len(), 2);
        for case in &report.cases {
            let [fast, slow] = &case.subjects[..] else { panic!("two subjects") };
            assert!(fast.ratios.is_none());
            let ratios = slow.ratios.as_ref().unwrap();
            // Four times as long, with room for a busy machine.
            assert!((2.0..5.0).contains(&ratios.p50.median), "{:?}", ratios.p50);
            assert!((0.2..0.5).contains(&ratios.requests_per_s.median), "{:?}", ratios.requests_per_s);
            assert!(fast.figures.cpu_us > 0.0 && slow.figures.cpu_us > 0.0);
        }
    }

    #[test]
    fn a_subject_is_read_as_it_is_written() {
        let subject: Subject = "plain=127.0.0.1:80".parse().unwrap();
        assert_eq!((subject.name.as_str(), subject.address.port()), ("plain", 80));
        assert!("plain".parse::<Subject>().unwrap_err().contains("NAME=IP:PORT"));
    }
}
