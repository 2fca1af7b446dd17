//! A line a second on how the run goes, on stderr.

use super::drive::Run;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The line, as it is written.
pub(super) struct Line {
    writer: JoinHandle<()>,
}

impl Line {
    /// On a terminal the line is written over; elsewhere each is a line of its own.
    pub(super) fn begin(run: Arc<Run>) -> Self {
        let (before, after) = if io::stderr().is_terminal() { ("\r", "\x1b[K") } else { ("", "\n") };
        let writer = tokio::spawn(async move {
            loop {
                sleep(Duration::from_secs(1)).await;
                eprint!("{before}{}{after}", describe(&run));
                let _ = io::stderr().flush();
            }
        });
        Self { writer }
    }

    /// Writes no more, and leaves nothing of it on a terminal.
    pub(super) async fn end(self) {
        self.writer.abort();
        let _ = self.writer.await;
        if io::stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
    }
}

fn describe(run: &Run) -> String {
    let tally = run.tally();
    let (sessions, turns, now) = (tally.sessions_completed, tally.first_tokens.count(), tally.sessions_now);
    let errors: u64 = tally.errors.values().sum();
    let ttfb = tally.first_tokens.latency(run.config().speed).map_or(String::new(), |ttfb| format!(", TTFB p50 {:.2} s", ttfb.p50));
    let rest = match run.end().checked_duration_since(Instant::now()) {
        Some(_) => format!("{} of {} s", run.start().elapsed().as_secs(), run.config().duration.as_secs()),
        None => format!("waiting for {} turns", tally.on_their_way),
    };
    format!("{rest}: {now} sessions now, {sessions} done, {turns} turns{ttfb}, {errors} errors")
}
