//! What a filter costs in a proxy: the same requests through several listeners of one proxy, side by side.
//!
//! A *subject* is a listener and what it is called; the first one is what the others are compared with. A *case* is one kind of
//! request. Rounds are short, and in each every case goes to every subject in turn, each round beginning with another one: what
//! else the machine does hits all subjects alike, and a ratio is taken within a round before the median over rounds is.

mod aims;
pub mod cpu;
mod driver;
pub mod ext_proc;
mod report;
mod request;
pub mod upstream;

pub use aims::Aim;
pub use driver::{Driver, Homes, Load};
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

/// The longest that a subject is warmed up with one kind of request.
const WARM_UP: Duration = Duration::from_millis(500);

/// How long the proxy is watched while it has nothing to do.
const IDLE: Duration = Duration::from_secs(2);

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// What it is called.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// It keeps each conversation on one upstream and uses all of them, or the run fails.
    pub keeps_homes: bool,
    /// It reads no bodies: only requests that name their conversation in a header go there.
    pub header_only: bool,
    /// A process that works for this subject alone, whose CPU time is part of what a request costs.
    pub helper: Option<u32>,
}

impl Subject {
    fn takes(&self, case: &Case) -> bool {
        !self.header_only || case.id == IdPlace::Header
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not NAME=IP:PORT[,keeps-homes][,header-only][,helper=PID]");
        let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
        let mut words = rest.split(',');
        let address = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        let mut subject = Self { name: name.to_owned(), address, keeps_homes: false, header_only: false, helper: None };
        for word in words {
            match word.split_once('=') {
                None if word == "keeps-homes" => subject.keeps_homes = true,
                None if word == "header-only" => subject.header_only = true,
                Some(("helper", pid)) => subject.helper = Some(pid.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            }
        }
        Ok(subject)
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
    /// The proxy's workers, for the report.
    pub workers: usize,
    /// How many upstreams are behind every subject; their answers say which of them gave it.
    pub upstreams: usize,
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
/// Settings that make no sense, a subject that cannot be reached or does not keep homes as it should, or any answer that is not a 200.
pub fn run(config: &ProxyConfig) -> Result<Report> {
    ensure!(config.rounds > 0 && !config.time.is_zero(), "nothing is measured: give at least one round and some seconds");
    ensure!(!config.subjects.is_empty() && !config.cases.is_empty(), "nothing is measured: give at least one subject and case");
    ensure!(!config.subjects[0].header_only, "the first subject is what all others are compared with: it must take every case");
    let mut subjects = Vec::new();
    for subject in &config.subjects {
        subjects.push((subject, Driver::connect(subject.address, config.connections, config.conversations)?));
    }
    let requests: Vec<_> = config.cases.iter().map(|case| (case, Request::new(case.body_bytes, case.id))).collect();

    let progress = Progress { shown: config.progress };
    for (subject, driver) in &mut subjects {
        progress.show(&format!("warm-up: {}", subject.name));
        let first = [IdPlace::Header, IdPlace::Body].map(|id| Case { body_bytes: WARM_UP_BYTES, id });
        for case in first.iter().filter(|case| subject.takes(case)) {
            let request = Request::new(case.body_bytes, case.id);
            driver.run_once(&request).with_context(|| format!("warming up {}", subject.name))?;
        }
        for (_, request) in requests.iter().filter(|(case, _)| subject.takes(case)) {
            driver.run_for(request, config.time.min(WARM_UP)).with_context(|| format!("warming up {}", subject.name))?;
        }
    }
    let before = cpu::time(config.pid)?;
    thread::sleep(IDLE);
    let idle = cpu::time(config.pid)?.saturating_sub(before).as_secs_f64() / IDLE.as_secs_f64();

    let cells: usize = config.subjects.iter().map(|subject| config.cases.iter().filter(|case| subject.takes(case)).count()).sum();
    let mut left = config.time * u32::try_from(config.rounds * cells)?;
    let mut figures: Vec<Vec<Vec<Figures>>> = vec![vec![Vec::new(); subjects.len()]; requests.len()];
    for round in 0..config.rounds {
        progress.show(&format!("round {} of {}, {} s to go", round + 1, config.rounds, left.as_secs()));
        for (index, (case, request)) in requests.iter().enumerate() {
            for turn in 0..subjects.len() {
                let at = (round + index + turn) % subjects.len();
                let (subject, driver) = &mut subjects[at];
                if subject.takes(case) {
                    let measured = measure(config.pid, subject, driver, request, config.time);
                    figures[index][at].push(measured.with_context(|| format!("measuring {}", subject.name))?);
                    left = left.saturating_sub(config.time);
                }
            }
        }
    }
    progress.end();
    let homes: Vec<_> = subjects.iter().map(|(_, driver)| driver.homes()).collect();
    for (subject, homes) in config.subjects.iter().zip(&homes).filter(|(subject, _)| subject.keeps_homes) {
        homes.ensure_kept(config.upstreams).with_context(|| format!("{} did not do what it is measured for", subject.name))?;
    }
    Ok(Report::new(config, idle, &figures, &homes))
}

/// One subject with one kind of request in one round.
fn measure(pid: u32, subject: &Subject, driver: &mut Driver, request: &Request, time: Duration) -> Result<Figures> {
    let spent = || Ok::<_, anyhow::Error>((cpu::time(pid)?, subject.helper.map_or(Ok(Duration::ZERO), cpu::time)?));
    let before = spent()?;
    let load = driver.run_for(request, time)?;
    let after = spent()?;
    ensure!(load.requests() > 0, "nothing was answered within {time:?}");
    Ok(Figures::new(&load, after.0.saturating_sub(before.0), after.1.saturating_sub(before.1)))
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

/// A header whose value is a number, such as `content-length`.
fn number(headers: &[httparse::Header<'_>], name: &str) -> Option<usize> {
    let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(header.value).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::upstream::Answer;
    use super::*;

    fn subject(name: &str, address: SocketAddr) -> Subject {
        Subject { name: name.to_owned(), address, keeps_homes: false, header_only: false, helper: None }
    }

    /// One short round of small requests.
    fn config(subjects: Vec<Subject>) -> ProxyConfig {
        ProxyConfig {
            subjects,
            pid: std::process::id(),
            workers: 1,
            upstreams: 1,
            cases: [IdPlace::Header, IdPlace::Body].map(|id| Case { body_bytes: 1000, id }).to_vec(),
            rounds: 1,
            time: Duration::from_millis(200),
            connections: 2,
            conversations: 4,
            progress: false,
        }
    }

    #[test]
    fn a_subject_that_takes_longer_is_found_to() {
        let server = |name: &str, ms| {
            let answer = Answer { delay: Duration::from_millis(ms), ..Answer::default() };
            subject(name, upstream::start(1, answer).unwrap()[0])
        };
        let config = ProxyConfig {
            cases: vec![Case { body_bytes: 1000, id: IdPlace::Header }, Case { body_bytes: 9000, id: IdPlace::Body }],
            rounds: 3,
            time: Duration::from_millis(500),
            ..config(vec![server("fast", 10), server("slow", 40)])
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
    fn what_reads_no_bodies_gets_none_that_name_their_conversation() {
        let servers = upstream::start(2, upstream::Answer::default()).unwrap();
        let mut header_only = subject("header only", servers[1]);
        (header_only.header_only, header_only.helper) = (true, Some(std::process::id()));
        let report = run(&config(vec![subject("plain", servers[0]), header_only])).unwrap();
        let names = |case: &CaseReport| case.subjects.iter().map(|subject| subject.name.clone()).collect::<Vec<_>>();
        assert_eq!(report.cases.iter().map(names).collect::<Vec<_>>(), [vec!["plain", "header only"], vec!["plain"]]);
        // This process is proxy and helper in one, so each has half of what is counted.
        let figures = report.cases[0].subjects[1].figures;
        assert!((0.4..0.6).contains(&(figures.helper_cpu_us / figures.cpu_us)), "{figures:?}");
        assert_eq!(report.cases[0].subjects[0].figures.helper_cpu_us, 0.0);
    }

    #[test]
    fn a_subject_that_does_not_use_all_upstreams_fails_the_run() {
        let mut only_one = subject("only one", upstream::start(1, Answer::default()).unwrap()[0]);
        only_one.keeps_homes = true;
        let config = ProxyConfig { upstreams: 2, ..config(vec![only_one]) };
        let error = format!("{:#}", run(&config).unwrap_err());
        assert!(error.contains("only one did not do what it is measured for") && error.contains("1 of 2 upstreams"), "{error}");
    }

    #[test]
    fn a_subject_is_read_as_it_is_written() {
        let plain: Subject = "plain=127.0.0.1:80".parse().unwrap();
        assert_eq!(plain, subject("plain", "127.0.0.1:80".parse().unwrap()));
        let other: Subject = "other=127.0.0.1:80,keeps-homes,header-only,helper=7".parse().unwrap();
        assert_eq!((other.keeps_homes, other.header_only, other.helper), (true, true, Some(7)));
        for wrong in ["plain", "plain=", "plain=127.0.0.1:80,homes", "plain=127.0.0.1:80,helper=x"] {
            assert!(wrong.parse::<Subject>().unwrap_err().contains("NAME=IP:PORT"), "{wrong}");
        }
    }
}
