//! The HTML page.

use super::cells::{Section, Summary};
use super::metric::Metric;
use anyhow::{Context, Result};
use askama::Template;

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    title: &'a str,
    columns: Vec<&'static str>,
    sections: Vec<SectionView>,
}

/// A section as the page shows it.
pub(super) struct SectionView {
    heading: String,
    unit: &'static str,
    rows: Vec<Row>,
    /// SVG texts.
    figures: Vec<String>,
}

struct Row {
    stage: String,
    /// Whether it is the stage's first row.
    first: bool,
    label: String,
    rounds: usize,
    /// Means, each with its range if there is one.
    values: Vec<(String, String)>,
}

impl SectionView {
    pub(super) fn new(section: &Section, figures: Vec<String>) -> Self {
        let mut rows: Vec<Row> = Vec::new();
        for stage in &section.stages {
            let cells = section.labels.iter().filter_map(|label| section.cell(label, *stage));
            rows.extend(cells.enumerate().map(|(index, cell)| Row {
                stage: stage.to_string(),
                first: index == 0,
                label: cell.label.clone(),
                rounds: cell.rounds.len(),
                values: Metric::ALL.map(|metric| value(cell.summary(metric), metric.digits())).to_vec(),
            }));
        }
        Self { heading: format!("{}, {}", section.workload, section.unit()), unit: section.unit(), rows, figures }
    }
}

fn value(summary: Option<Summary>, digits: usize) -> (String, String) {
    let Some(Summary { mean, least, most }) = summary else { return ("–".to_owned(), String::new()) };
    let (least, most) = (format!("{least:.digits$}"), format!("{most:.digits$}"));
    (format!("{mean:.digits$}"), if least == most { String::new() } else { format!("{least}–{most}") })
}

pub(super) fn render(title: &str, sections: Vec<SectionView>) -> Result<String> {
    let columns = Metric::ALL.map(Metric::title).to_vec();
    Page { title, columns, sections }.render().context("cannot write the page")
}
