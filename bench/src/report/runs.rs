//! Results from files.

use crate::load::LoadReport;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(Box<LoadReport>),
    More(Vec<LoadReport>),
}

/// The runs of all files. A run without a label gets its file's name.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<LoadReport>> {
    let mut runs = Vec::new();
    for file in files {
        let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let found = parse(&text).with_context(|| {
            format!("{} has no results: give what `homing-bench load --json` printed, one object or more, or lists", file.display())
        })?;
        runs.extend(found.into_iter().map(|run| labelled(run, file)));
    }
    Ok(runs)
}

fn parse(text: &[u8]) -> Result<Vec<LoadReport>> {
    let mut runs = Vec::new();
    for found in serde_json::Deserializer::from_slice(text).into_iter::<OneOrMore>() {
        match found? {
            OneOrMore::One(run) => runs.push(*run),
            OneOrMore::More(more) => runs.extend(more),
        }
    }
    ensure!(!runs.is_empty(), "it is empty");
    Ok(runs)
}

fn labelled(mut run: LoadReport, file: &Path) -> LoadReport {
    if run.label.is_empty() {
        run.label = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    }
    run
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_runs_that_can_be_written_or_refused(text in mutated(seeds("results"))) {
            if let Ok(runs) = parse(&text) {
                let written = serde_json::to_vec(&runs).unwrap();
                prop_assert_eq!(parse(&written).unwrap().len(), runs.len());
            }
        }
    }
}
