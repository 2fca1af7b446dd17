//! Runs brought together: sections, stages, and what the rounds of one cell have in common.

use super::metric::Metric;
use crate::load::LoadReport;
use std::fmt;

/// The runs of one workload in one kind of loop.
#[derive(Clone, Debug)]
pub struct Section {
    /// The workload's name.
    pub workload: String,
    /// Stages, in their order.
    pub stages: Vec<Stage>,
    /// Labels, in the order in which they were first seen.
    pub labels: Vec<String>,
    /// Every combination that was run.
    pub cells: Vec<Cell>,
}

/// How much load there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// Sessions at once.
    Sessions(usize),
    /// Sessions that come a minute.
    Rate(f64),
    /// What the trace has.
    AsItComes,
}

/// The rounds of one label at one stage.
#[derive(Clone, Debug)]
pub struct Cell {
    /// What was measured.
    pub label: String,
    /// With how much load.
    pub stage: Stage,
    /// Its rounds, at least one.
    pub rounds: Vec<LoadReport>,
}

/// A figure over the rounds of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The mean of those rounds that have the figure.
    pub mean: f64,
    /// The least of them.
    pub least: f64,
    /// The most of them.
    pub most: f64,
}

impl Stage {
    fn of(run: &LoadReport) -> Self {
        match run.rate {
            Some(rate) => Self::Rate(rate),
            None if run.sessions == 0 => Self::AsItComes,
            None => Self::Sessions(run.sessions),
        }
    }

    fn order(self) -> (u8, f64) {
        match self {
            Self::Sessions(sessions) => (0, sessions as f64),
            Self::Rate(rate) => (1, rate),
            Self::AsItComes => (2, 0.0),
        }
    }

    /// What its number counts.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Sessions(_) => "sessions at once",
            Self::Rate(_) => "sessions a minute",
            Self::AsItComes => "sessions as they come",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sessions(sessions) => write!(f, "{sessions}"),
            Self::Rate(rate) => write!(f, "{rate}"),
            Self::AsItComes => f.write_str("all"),
        }
    }
}

impl Cell {
    /// A figure over its rounds; none if no round has it.
    pub fn summary(&self, metric: Metric) -> Option<Summary> {
        let values: Vec<_> = self.rounds.iter().filter_map(|run| metric.of(run)).collect();
        let extreme = |pick: fn(f64, f64) -> f64| values.iter().copied().reduce(pick);
        Some(Summary {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            least: extreme(f64::min)?,
            most: extreme(f64::max)?,
        })
    }
}

impl Section {
    /// The cell of a label at a stage, if it was run.
    pub fn cell(&self, label: &str, stage: Stage) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.label == label && cell.stage == stage)
    }

    /// What its stages count.
    pub fn unit(&self) -> &'static str {
        self.stages.first().map_or("", |stage| stage.unit())
    }

    /// Its name in those of files.
    pub fn slug(&self) -> String {
        let name = format!("{} {}", self.workload, self.stages.first().map_or("", |stage| stage.kind()));
        let clean: String =
            name.chars().map(|char| if char.is_ascii_alphanumeric() { char.to_ascii_lowercase() } else { '-' }).collect();
        clean.trim_matches('-').to_owned()
    }
}

impl Stage {
    fn kind(self) -> &'static str {
        match self {
            Self::Sessions(_) => "closed",
            Self::Rate(_) => "open",
            Self::AsItComes => "trace",
        }
    }
}

/// The sections of these runs, in the order in which they were first seen.
pub(super) fn sections(runs: &[LoadReport]) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for run in runs {
        let stage = Stage::of(run);
        let same = |section: &&mut Section| section.workload == run.workload && section.stages[0].kind() == stage.kind();
        let section = match sections.iter_mut().find(same) {
            Some(section) => section,
            None => {
                let workload = run.workload.clone();
                sections.push(Section { workload, stages: vec![stage], labels: Vec::new(), cells: Vec::new() });
                let last = sections.len() - 1;
                &mut sections[last]
            }
        };
        if !section.stages.contains(&stage) {
            section.stages.push(stage);
        }
        if !section.labels.contains(&run.label) {
            section.labels.push(run.label.clone());
        }
        match section.cells.iter_mut().find(|cell| cell.label == run.label && cell.stage == stage) {
            Some(cell) => cell.rounds.push(run.clone()),
            None => section.cells.push(Cell { label: run.label.clone(), stage, rounds: vec![run.clone()] }),
        }
    }
    for section in &mut sections {
        section.stages.sort_by(|one, other| one.order().0.cmp(&other.order().0).then(one.order().1.total_cmp(&other.order().1)));
    }
    sections
}
