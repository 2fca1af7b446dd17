//! Tables and figures of several runs of the load generator: one HTML file that needs nothing else, and each figure as SVG and PNG.
//!
//! Runs that differ in nothing but the round (or the seed) are one *cell*: their mean is shown, and how far they spread. Cells of one
//! workload are one *section*, with a line for each label and a column for each *stage*: so many sessions at once, or a minute.

mod axis;
mod cells;
mod figure;
mod frontier;
mod metric;
mod page;
mod png;
mod runs;
mod style;

pub use cells::{Cell, Section, Stage, Summary};
pub use frontier::{FrontierPoint, frontier_svg};
pub use metric::Metric;

use anyhow::{Context, Result};
use clap::Args;
use figure::Figure;
use std::fs;
use std::path::{Path, PathBuf};

/// The page's file.
const PAGE: &str = "report.html";

/// Compares several runs of `load`: tables and figures in one HTML file, and each figure as SVG and PNG.
///
/// A run's label says what was measured (`load --label`); without one it is the file's name. Runs with the same label, workload and
/// stage are rounds of each other.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Results of `load --json`: one of them, several lines, or lists.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Directory for the report; made if it is not there.
    #[arg(long)]
    out: PathBuf,
    /// The report's title.
    #[arg(long, default_value = "Load on several replicas")]
    title: String,
}

impl ReportArgs {
    /// Writes the report and returns the files it wrote, the page first.
    ///
    /// # Errors
    /// Files that cannot be read, are no results, or cannot be written.
    pub fn run(&self) -> Result<Vec<PathBuf>> {
        write(&runs::read(&self.files)?, &self.title, &self.out)
    }
}

/// Writes the report on these runs into a directory and returns the files, the page first.
///
/// # Errors
/// Files that cannot be written.
pub fn write(runs: &[crate::load::LoadReport], title: &str, out: &Path) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}: give another --out", out.display()))?;
    let mut written = vec![out.join(PAGE)];
    let mut sections = Vec::new();
    for section in cells::sections(runs) {
        let mut figures = Vec::new();
        for figure in Figure::all(&section) {
            let svg = figure.svg().with_context(|| format!("cannot draw {}", figure.name))?;
            for (extension, bytes) in [("svg", svg.clone().into_bytes()), ("png", png::render(&svg)?)] {
                let path = out.join(format!("{}-{}.{extension}", section.slug(), figure.name));
                save(&path, &bytes)?;
                written.push(path);
            }
            figures.push(svg);
        }
        sections.push(page::SectionView::new(&section, figures));
    }
    save(&written[0], page::render(title, sections)?.as_bytes())?;
    Ok(written)
}

fn save(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
