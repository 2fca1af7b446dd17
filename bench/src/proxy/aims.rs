//! What the measurement is for, in a line each: Homing beside a plain proxy, beside a filter that does nothing, and beside what else
//! could choose an upstream in a proxy.

use super::report::{Figures, Spread, size, text};
use super::{IdPlace, ProxyConfig};
use serde::Serialize;
use std::fmt;

/// The body that Homing is compared with a plain proxy at.
const BODY_BYTES: usize = 64 << 10;

/// One figure of the comparison, over all rounds. Requests name their conversation in a header.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Aim {
    /// What is compared, and in what.
    pub what: &'static str,
    /// The size of the body.
    pub body_bytes: usize,
    /// The quotient of each round's figures, or microseconds where `what` says so.
    pub figure: Spread,
}

/// The subjects of a round that a line needs, by name.
type Line = (&'static str, [&'static str; 3], Option<usize>, fn([&Figures; 3]) -> f64);

/// What is compared, in whose figures, at which size (all if none), and how.
const LINES: [Line; 6] = [
    ("homing / plain, CPU", ["homing", "plain", "plain"], Some(BODY_BYTES), |[homing, plain, _]| homing.cpu_us / plain.cpu_us),
    ("homing / plain, requests per second", ["homing", "plain", "plain"], Some(BODY_BYTES), |[homing, plain, _]| {
        homing.requests_per_s / plain.requests_per_s
    }),
    ("homing / empty, CPU", ["homing", "empty", "empty"], None, |[homing, empty, _]| homing.cpu_us / empty.cpu_us),
    ("lua / homing, CPU more than plain", ["lua", "homing", "plain"], None, more),
    ("ext_proc / homing, CPU more than plain", ["ext_proc", "homing", "plain"], None, more),
    ("ext_proc, CPU us of the processor alone", ["ext_proc", "plain", "plain"], None, |[processor, ..]| processor.helper_cpu_us),
];

fn more([other, homing, plain]: [&Figures; 3]) -> f64 {
    (other.cpu_us - plain.cpu_us) / (homing.cpu_us - plain.cpu_us)
}

/// The figures are by case, subject and round.
pub(super) fn of(config: &ProxyConfig, figures: &[Vec<Vec<Figures>>]) -> Vec<Aim> {
    let at = |name| config.subjects.iter().position(|subject| subject.name == name);
    let mut aims = Vec::new();
    for (what, names, only, of) in LINES {
        let [Some(first), Some(second), Some(third)] = names.map(at) else { continue };
        for (case, by_subject) in config.cases.iter().zip(figures) {
            if case.id == IdPlace::Header && only.is_none_or(|bytes| bytes == case.body_bytes) {
                let rounds = by_subject[first].iter().zip(&by_subject[second]).zip(&by_subject[third]);
                let figure = Spread::of(rounds.map(|((first, second), third)| of([first, second, third])));
                aims.push(Aim { what, body_bytes: case.body_bytes, figure });
            }
        }
    }
    aims
}

/// A line for all sizes of what is compared.
pub(super) fn write(f: &mut fmt::Formatter<'_>, aims: &[Aim]) -> fmt::Result {
    if !aims.is_empty() {
        writeln!(f, "\nWith the id in the header, each the median of the rounds' quotients, with the lowest and the highest:")?;
    }
    for line in aims.chunk_by(|one, next| one.what == next.what) {
        write!(f, "{:<41}", line[0].what)?;
        let sizes: Vec<_> = line.iter().map(|aim| format!("{}: {:<16}", size(aim.body_bytes), text(&aim.figure, 2))).collect();
        writeln!(f, "{}", sizes.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Case, Subject};
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_line_has_the_sizes_and_subjects_that_were_measured() {
        let subject = |name: &str| format!("{name}=127.0.0.1:1").parse::<Subject>().unwrap();
        let config = ProxyConfig {
            subjects: ["plain", "homing", "ext_proc"].map(subject).to_vec(),
            pid: 1,
            workers: 1,
            upstreams: 4,
            cases: [(1 << 10, IdPlace::Header), (BODY_BYTES, IdPlace::Header), (BODY_BYTES, IdPlace::Body)]
                .map(|(body_bytes, id)| Case { body_bytes, id })
                .to_vec(),
            rounds: 1,
            time: Duration::ZERO,
            connections: 1,
            conversations: 1,
            progress: false,
        };
        let figures = |requests_per_s, cpu_us, helper_cpu_us| {
            vec![Figures { requests_per_s, p50_us: 1.0, p99_us: 1.0, cpu_us, helper_cpu_us, cpus_busy: 1.0 }]
        };
        let case = vec![figures(1000.0, 100.0, 0.0), figures(800.0, 125.0, 0.0), figures(400.0, 200.0, 60.0)];
        let found = of(&config, &[case.clone(), case.clone(), case]);
        let figure = |what: &str, body_bytes| {
            let aims = found.iter().filter(|aim| aim.what == what && aim.body_bytes == body_bytes);
            aims.map(|aim| aim.figure.median).collect::<Vec<_>>()
        };
        assert_eq!(found.len(), 6, "{found:?}");
        assert_eq!(figure("homing / plain, CPU", BODY_BYTES), [1.25]);
        assert_eq!(figure("homing / plain, requests per second", BODY_BYTES), [0.8]);
        for body_bytes in [1 << 10, BODY_BYTES] {
            assert_eq!(figure("ext_proc / homing, CPU more than plain", body_bytes), [4.0]);
            assert_eq!(figure("ext_proc, CPU us of the processor alone", body_bytes), [60.0]);
        }
    }
}
