//! How busy the machine was in a run, and how much of it the run itself kept busy: above a certain share, the figures are no longer
//! those of the model.

use std::fs;

use serde::{Deserialize, Serialize};

/// Shares of all the machine's processors, in per cent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Busy {
    /// By the run: load generator, router and replicas.
    pub(super) run: f64,
    /// By anything.
    pub(super) machine: f64,
}

/// Processor time since the machine's start, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ProcessorTime {
    all: u64,
    idle: u64,
    /// Of this process and its children, also those that have ended.
    own: u64,
}

impl ProcessorTime {
    /// None where there is no `/proc`.
    pub(super) fn now() -> Option<Self> {
        let (all, idle) = machine_ticks(&fs::read_to_string("/proc/stat").ok()?)?;
        let id = std::process::id();
        let mut own = 0;
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let process: Option<u32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
            // One that has just ended has no file.
            let stat = process.and_then(|_| fs::read_to_string(entry.path().join("stat")).ok());
            if let Some(stat) = stat.as_deref().and_then(ProcessStat::parse)
                && (process == Some(id) || stat.parent == id)
            {
                own += stat.ticks + if process == Some(id) { stat.ended_children } else { 0 };
            }
        }
        Some(Self { all, idle, own })
    }

    /// What was busy since `before`, as long as no child that counted there has ended without being waited for.
    pub(super) fn since(self, before: Self) -> Option<Busy> {
        let (all, idle, own) =
            (self.all.checked_sub(before.all)?, self.idle.checked_sub(before.idle)?, self.own.checked_sub(before.own)?);
        let share = |ticks: u64| 100.0 * ticks as f64 / all as f64;
        (all > 0).then(|| Busy { run: share(own), machine: share(all.saturating_sub(idle)) })
    }
}

/// All and idle ticks from `/proc/stat`, whose first line is `cpu user nice system idle iowait irq softirq steal guest guest_nice`.
fn machine_ticks(stat: &str) -> Option<(u64, u64)> {
    let fields: Vec<u64> = stat.lines().next()?.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // Guests' time is in the first fields too.
    Some((fields.iter().take(8).sum(), fields.get(3)? + fields.get(4)?))
}

/// What `/proc/<id>/stat` says of a process (proc(5)).
#[derive(Debug, PartialEq)]
struct ProcessStat {
    parent: u32,
    ticks: u64,
    ended_children: u64,
}

impl ProcessStat {
    fn parse(stat: &str) -> Option<Self> {
        // The second field is the name in brackets, which may have anything in it; behind it comes field 3.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self { parent: fields.get(1)?.parse().ok()?, ticks: field(14)? + field(15)?, ended_children: field(16)? + field(17)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_all_processors() {
        assert_eq!(machine_ticks("cpu  10 1 9 70 10 0 0 0 5 0\ncpu0 1"), Some((100, 80)));
        assert_eq!(machine_ticks(""), None);
        let (before, after) = (ProcessorTime { all: 100, idle: 80, own: 5 }, ProcessorTime { all: 300, idle: 180, own: 45 });
        assert_eq!(after.since(before), Some(Busy { run: 20.0, machine: 50.0 }));
        assert_eq!(before.since(after), None);
    }

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let stat = "42 (a ) b (c)) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 30 4 20 0 1 0 5 6 7";
        assert_eq!(ProcessStat::parse(stat), Some(ProcessStat { parent: 7, ticks: 120, ended_children: 34 }));
        assert_eq!(ProcessStat::parse("42 (x"), None);
    }

    #[test]
    fn this_process_has_used_some_time_by_now() {
        let spin = std::time::Instant::now();
        while spin.elapsed() < std::time::Duration::from_millis(50) {
            std::hint::black_box(spin);
        }
        let own = ProcessorTime::now().map(|now| now.own);
        assert!(own > Some(0), "{own:?}");
    }
}
