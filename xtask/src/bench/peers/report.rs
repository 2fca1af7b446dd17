//! Runs as tables: what each variant did at each stage, over the rounds.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::load::Run;
use super::machine::Busy;

/// Between these lines of a document stand the figures, and nothing else.
const BEGIN: &str = "<!-- figures: written by `cargo xtask bench peers --out` -->";
const END: &str = "<!-- end of figures -->";

/// Above this share of busy processors, in per cent, a run begins to measure the machine.
const BUSY_LIMIT: f64 = 70.0;

/// All runs of a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Results {
    /// How many times faster than real time the replicas computed.
    pub(super) speed: f64,
    /// Seconds of real time that each run took.
    pub(super) seconds: u64,
    /// In the order they were made.
    pub(super) runs: Vec<Run>,
}

/// A column: its heading, digits behind the point, and where a run has it.
type Column = (&'static str, usize, fn(&Run) -> Option<f64>);

const COLUMNS: [Column; 6] = [
    ("prefix hits %", 1, |run| run.figures.report["prefix_hits"].as_f64()),
    ("TTFB p50 s", 2, |run| run.figures.report["ttfb_p50_s"].as_f64()),
    ("TTFB p95 s", 2, |run| run.figures.report["ttfb_p95_s"].as_f64()),
    ("TTFB mean s", 2, |run| run.figures.report["ttfb_s"]["mean"].as_f64()),
    ("output tok/min", 0, |run| run.figures.report["output_tokens_per_minute"].as_f64()),
    ("stayed %", 1, |run| run.figures.stayed),
];

impl Results {
    /// The tables in Markdown, one a stage, each with a line for each variant.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!(
            "{} rounds; each run {} s at {} times real time, {:.0} s of the model's time. Mean over the rounds, and in brackets\n\
             the lowest and the highest.\n",
            self.names(|run| run.round.to_string()).len(),
            self.seconds,
            self.speed,
            self.seconds as f64 * self.speed,
        );
        let headings: Vec<_> = COLUMNS.iter().map(|(heading, ..)| *heading).collect();
        let variants = self.names(|run| run.variant.clone());
        for stage in self.names(|run| run.stage.clone()) {
            let heading = match stage.split_once(':') {
                None => format!("{stage} sessions"),
                Some(("open", rate)) => format!("Open loop, {rate} sessions a minute"),
                Some((kind, sessions)) => format!("{sessions} sessions, {kind}"),
            };
            let _ = writeln!(text, "\n### {heading}\n\n| variant | {} | errors |", headings.join(" | "));
            let _ = writeln!(text, "|---|{}--:|", "--:|".repeat(headings.len()));
            for variant in &variants {
                let runs: Vec<_> = self.runs.iter().filter(|run| run.stage == stage && run.variant == *variant).collect();
                if runs.is_empty() {
                    continue;
                }
                let cells: Vec<_> = COLUMNS.iter().map(|(_, digits, of)| cell(runs.iter().map(|run| of(run)), *digits)).collect();
                let _ = writeln!(text, "| {variant} | {} | {} |", cells.join(" | "), errors(&runs));
            }
        }
        let _ = writeln!(text, "\n{}", self.machine());
        text
    }

    /// How busy processors were, which says whether the figures are the model's.
    fn machine(&self) -> String {
        let busy: Vec<_> = self.runs.iter().filter_map(|run| Some((run.figures.busy?, run))).collect();
        let Some((most, run)) = busy.iter().max_by(|a, b| a.0.run.total_cmp(&b.0.run)) else {
            return "How busy the machine's processors were is not known.".into();
        };
        let mean = |of: fn(&Busy) -> f64| busy.iter().map(|(busy, _)| of(busy)).sum::<f64>() / busy.len() as f64;
        let above = busy.iter().filter(|(busy, _)| busy.machine > BUSY_LIMIT).count();
        format!(
            "Load generator, router and replicas kept {:.0} % of the machine's processors busy in the mean run and {:.0} % in\n\
             the busiest ({}, {}); with everything else that ran, it was {:.0} % in the mean, and above {BUSY_LIMIT:.0} % in\n\
             {above} of {} runs.",
            mean(|busy| busy.run),
            most.run,
            run.variant,
            run.stage,
            mean(|busy| busy.machine),
            busy.len(),
        )
    }

    /// Different values, in the order they first occur.
    fn names(&self, of: impl Fn(&Run) -> String) -> Vec<String> {
        let mut names = Vec::new();
        for name in self.runs.iter().map(of) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

/// `mean (lowest-highest)` of the rounds that have the figure.
fn cell(values: impl Iterator<Item = Option<f64>>, digits: usize) -> String {
    let values: Vec<f64> = values.flatten().collect();
    if values.is_empty() {
        return "-".into();
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let (lowest, highest) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(*value), high.max(*value)));
    if values.len() == 1 { format!("{mean:.digits$}") } else { format!("{mean:.digits$} ({lowest:.digits$}-{highest:.digits$})") }
}

/// Failed turns of all rounds, by kind.
fn errors(runs: &[&Run]) -> String {
    let mut kinds = std::collections::BTreeMap::<&str, u64>::new();
    for (kind, count) in runs.iter().filter_map(|run| run.figures.report["errors"].as_object()).flatten() {
        *kinds.entry(kind).or_default() += count.as_u64().unwrap_or_default();
    }
    if kinds.is_empty() {
        return "0".into();
    }
    kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

/// Puts the tables into a document between its two marker lines; a file that is not there yet is made of them alone.
pub(super) fn write_into(path: &Path, results: &Results) -> Result<()> {
    let old = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("{BEGIN}\n{END}\n"),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let new = replace(&old, &results.markdown())
        .with_context(|| format!("{} has nowhere to put the figures: it needs the lines `{BEGIN}` and `{END}`", path.display()))?;
    fs::write(path, new).with_context(|| format!("writing {}", path.display()))
}

fn replace(document: &str, figures: &str) -> Option<String> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{figures}\n{END}{after}"))
}

/// What is read of a run as it ends, in one line.
pub(super) fn line(run: &Run) -> String {
    let figures: Vec<_> = COLUMNS
        .iter()
        .filter_map(|(heading, digits, of)| of(run).map(|value| format!("{heading} {value:.digits$}")))
        .chain(run.figures.busy.map(|busy| format!("processors {:.0} % busy, {:.0} % by this run", busy.machine, busy.run)))
        .collect();
    let failed = match &run.figures.report["errors"] {
        Value::Object(kinds) if !kinds.is_empty() => format!(", errors {}", errors(&[run])),
        _ => String::new(),
    };
    format!("{}{failed}", figures.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::load::Figures;
    use super::*;

    fn run(variant: &str, stage: &str, round: u64, hits: f64) -> Run {
        let report = json!({ "prefix_hits": hits, "ttfb_p50_s": 0.5, "output_tokens_per_minute": 1000.4, "errors": {} });
        let figures = Figures { stayed: None, busy: Some(Busy { run: hits / 2.0, machine: hits }), report };
        Run { variant: variant.into(), stage: stage.into(), round, figures }
    }

    #[test]
    fn a_line_has_mean_and_range_over_the_rounds() {
        let mut runs =
            vec![run("one", "4", 1, 80.0), run("two", "4", 1, 20.0), run("one", "4", 2, 90.0), run("one", "open:6", 1, 1.0)];
        runs[2].figures.report["errors"] = json!({ "status_503": 2 });
        let text = Results { speed: 10.0, seconds: 9, runs }.markdown();
        assert!(text.contains("2 rounds; each run 9 s at 10 times real time, 90 s of the model's time"), "{text}");
        let expected = "| one | 85.0 (80.0-90.0) | 0.50 (0.50-0.50) | - | - | 1000 (1000-1000) | - | 2 status_503 |";
        assert!(text.contains("### 4 sessions\n") && text.contains(expected), "{text}");
        assert!(text.contains("| two | 20.0 | 0.50 | - | - | 1000 | - | 0 |"), "{text}");
        assert_eq!(
            text.split("### Open loop, 6 sessions a minute").nth(1).map(|rest| rest.matches("\n| ").count()),
            Some(2),
            "{text}"
        );
        assert!(text.contains("24 % of the machine's processors busy in the mean run and 45 % in\nthe busiest (one, 4)"), "{text}");
        assert!(text.contains("it was 48 % in the mean, and above 70 % in\n2 of 4 runs"), "{text}");
    }

    #[test]
    fn figures_replace_figures_and_nothing_else() {
        let document = format!("# Title\n\n{BEGIN}\nold\n{END}\n\nMore.\n");
        let once = replace(&document, "new\n").expect("markers");
        assert_eq!(once, format!("# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nMore.\n"));
        assert_eq!(replace(&once, "new\n"), Some(once));
        assert_eq!(replace("no markers", "new"), None);
    }
}
