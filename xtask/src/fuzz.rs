//! `cargo xtask fuzz`: every property that must hold for any bytes, with fresh inputs for as long as wanted.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;

use crate::tools::{cargo, root, say};

/// The crates with readers of foreign bytes.
const PACKAGES: [&str; 4] = ["homing-routing", "homing-filter", "homing-collector", "homing-bench"];

/// By convention the names of these properties begin so.
const PREFIX: &str = "any_";

/// How long a property is tried before the next one is.
const SLICE: Duration = Duration::from_secs(2);

/// Inputs of a property's first turn, which tells how long one takes.
const FIRST_CASES: u64 = 100;

/// How long to try.
#[derive(Debug, Args)]
pub struct FuzzOptions {
    /// Minutes, after the build.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Only the properties whose names contain this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// A property, and how it fared.
#[derive(Debug)]
struct Property {
    test: PathBuf,
    name: String,
    /// Inputs tried.
    tried: u64,
    /// Inputs of its next turn.
    cases: u64,
}

/// What the workers share.
#[derive(Debug)]
struct Queue {
    /// Properties of which nobody has a turn.
    waiting: VecDeque<Property>,
    /// Turns taken.
    turns: usize,
    /// Whether one does not hold.
    failed: bool,
}

/// What cargo tells of something it built.
#[derive(Deserialize)]
struct Built {
    executable: Option<PathBuf>,
}

/// Tries every property in turn, as many at once as there are cores, until the time is over.
///
/// # Errors
/// If an input breaks one; the message has the smallest such input and where it is kept.
pub fn fuzz(options: &FuzzOptions) -> Result<()> {
    say("building the tests");
    let only = options.only.as_deref().unwrap_or_default();
    let properties: VecDeque<_> = properties()?.into_iter().filter(|property| property.name.contains(only)).collect();
    ensure!(!properties.is_empty(), "no property's name contains `{only}`");
    let (count, begun, time) = (properties.len(), Instant::now(), Duration::from_secs(options.minutes * 60));
    say(&format!("{count} properties for {} minutes", options.minutes));
    let queue = Mutex::new(Queue { waiting: properties, turns: 0, failed: false });
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || -> Result<()> {
        while begun.elapsed() < time && !lock().failed {
            let Some(mut property) = lock().waiting.pop_front() else { return Ok(()) };
            let held = property.take_turn(SLICE.min(time.saturating_sub(begun.elapsed())));
            let mut queue = lock();
            queue.failed |= held.is_err();
            held?;
            queue.waiting.push_back(property);
            queue.turns += 1;
            if queue.turns.is_multiple_of(count) {
                let tried = || queue.waiting.iter().map(|property| property.tried);
                let (all, least, seconds) = (tried().sum::<u64>(), tried().min().unwrap_or(0), begun.elapsed().as_secs());
                say(&format!(
                    "{}:{:02} of {} min: {all} inputs, at least {least} a property",
                    seconds / 60,
                    seconds % 60,
                    options.minutes
                ));
            }
        }
        Ok(())
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(count);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker panicked")))
    })?;
    let mut properties: Vec<_> = lock().waiting.drain(..).collect();
    properties.sort_by_key(|property| property.tried);
    println!("{:>12}  property", "inputs");
    properties.iter().for_each(|property| println!("{:>12}  {}", property.tried, property.name));
    Ok(())
}

impl Property {
    /// Tries it with fresh inputs for about this long.
    fn take_turn(&mut self, slice: Duration) -> Result<()> {
        let begun = Instant::now();
        let mut test = Command::new(&self.test);
        test.args([&self.name, "--exact"]).current_dir(root()).env("PROPTEST_CASES", self.cases.to_string());
        // However many inputs are passed over as none of the property's.
        test.env("PROPTEST_MAX_GLOBAL_REJECTS", u32::MAX.to_string());
        // A trace for each input that shrinking tries would hide the smallest.
        let output = test.env("RUST_BACKTRACE", "0").stdin(Stdio::null()).output().with_context(|| format!("starting {test:?}"))?;
        if !output.status.success() {
            eprintln!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            bail!(
                "`{}` does not hold. Above is the smallest input that breaks it, and the file that keeps it, from which every later test \
                 run tries it again: mend the reader, and put the input into the corpus (corpus/README.md)",
                self.name
            );
        }
        self.tried += self.cases;
        let fits = self.cases as f64 * slice.as_secs_f64() / begun.elapsed().as_secs_f64();
        // The first turns are mostly the start of a process.
        self.cases = (fits as u64).clamp(1, self.cases * 8);
        Ok(())
    }
}

/// Builds the tests and lists the properties. They are debug builds: those check every sum.
fn properties() -> Result<Vec<Property>> {
    let mut build = cargo();
    build.args(["test", "--lib", "--no-run", "--message-format", "json-render-diagnostics"]).current_dir(root());
    for package in PACKAGES {
        build.args(["--package", package]);
    }
    let built = build.stderr(Stdio::inherit()).output().with_context(|| format!("starting {build:?}"))?;
    ensure!(built.status.success(), "the tests do not build");
    let lines = built.stdout.split(|byte| *byte == b'\n');
    let tests = lines.filter_map(|line| serde_json::from_slice::<Built>(line).ok()?.executable);
    let mut properties = Vec::new();
    for test in tests {
        let list = Command::new(&test).args([PREFIX, "--list", "--format", "terse"]).output()?;
        let list = String::from_utf8(list.stdout).context("the list of tests")?;
        let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
        let names = names.filter(|name| name.rsplit("::").next().is_some_and(|last| last.starts_with(PREFIX)));
        properties.extend(names.map(|name| Property { test: test.clone(), name: name.to_owned(), tried: 0, cases: FIRST_CASES }));
    }
    Ok(properties)
}
