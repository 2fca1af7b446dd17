//! What came of a fault.

use serde::{Deserialize, Serialize};

/// One fault's row.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Row {
    /// The fault.
    pub(super) name: String,
    /// Why it was not made, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) skipped: Option<String>,
    /// Requests that agents sent.
    pub(super) requests: usize,
    /// Of them, those lost with what carried them.
    pub(super) carried: usize,
    /// Of them, those lost otherwise.
    pub(super) other: usize,
    /// Seconds until it was over.
    pub(super) recovered_s: Option<f64>,
    /// From when to what that is.
    pub(super) recovered: String,
    /// What else is worth telling.
    pub(super) notes: Vec<String>,
    /// What is not as it must be.
    pub(super) wrong: Vec<String>,
}

impl Row {
    /// One that could not be made.
    pub(super) fn skipped(why: &str) -> Self {
        Self { skipped: Some(why.to_owned()), ..Self::default() }
    }

    pub(super) fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// In one line.
    pub(super) fn brief(&self) -> String {
        if let Some(why) = &self.skipped {
            return format!("skipped: {why}");
        }
        let lost = format!("{} requests, lost {} carried and {} others", self.requests, self.carried, self.other);
        let wrong = if self.wrong.is_empty() { "right".to_owned() } else { self.wrong.join("; ") };
        format!("{lost}; {} {}; {wrong}", self.seconds(), self.recovered)
    }

    fn seconds(&self) -> String {
        self.recovered_s.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds:.1} s"))
    }
}

/// All rows as a Markdown table.
pub(super) fn table(rows: &[Row]) -> String {
    let mut lines = vec![
        "| fault | requests | lost with what carried them | lost otherwise | recovered after | which is | counters | |".to_owned(),
        "|---|--:|--:|--:|--:|---|---|---|".to_owned(),
    ];
    for row in rows {
        let name = &row.name;
        lines.push(if let Some(why) = &row.skipped {
            format!("| `{name}` | | | | | skipped: {why} | | |")
        } else {
            let counters = if row.wrong.is_empty() { "right".to_owned() } else { row.wrong.join("; ") };
            let (requests, carried, other, seconds, recovered) =
                (row.requests, row.carried, row.other, row.seconds(), &row.recovered);
            format!(
                "| `{name}` | {requests} | {carried} | {other} | {seconds} | {recovered} | {counters} | {} |",
                row.notes.join("; ")
            )
        });
    }
    lines.join("\n")
}
