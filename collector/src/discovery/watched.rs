//! A small file that is read again when it changes.
//!
//! It is read twice a second and compared, which sees what a watch on a file loses: an atomic rename, the swapped link of a mounted
//! Kubernetes ConfigMap, a file system without events, two writes within one tick of its clock.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt as _;

use crate::text::one_line;

/// The time between two readings.
const PERIOD: Duration = Duration::from_millis(500);

/// The longest file that is read, in bytes: 1,024 targets with labels have some 200 KB.
const MAX_BYTES: usize = 4 << 20;

type Content = Result<Vec<u8>, String>;

/// A file and what it held.
#[derive(Debug)]
pub(crate) struct WatchedFile {
    path: PathBuf,
    /// What was returned last.
    returned: Option<Content>,
    /// What the last reading brought.
    seen: Option<Content>,
}

impl WatchedFile {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), returned: None, seen: None }
    }

    /// The content or why there is none: at once the first time, then whenever it is another.
    ///
    /// A change counts when two readings in a row agree, so that a file which is just being written is not taken for a whole one.
    /// Cancel safe: a change that was not returned is returned by the next call.
    pub(crate) async fn changed(&mut self) -> Content {
        loop {
            if self.seen.is_some() {
                tokio::time::sleep(PERIOD).await;
            }
            let content = read(&self.path).await;
            let is_new = self.returned.as_ref() != Some(&content);
            let is_settled = self.seen.is_none() || self.seen.as_ref() == Some(&content);
            self.seen = Some(content.clone());
            if is_new && is_settled {
                self.returned = Some(content.clone());
                return content;
            }
        }
    }
}

async fn read(path: &Path) -> Content {
    let read = async {
        let mut content = Vec::new();
        tokio::fs::File::open(path).await?.take(MAX_BYTES as u64 + 1).read_to_end(&mut content).await?;
        Ok::<_, std::io::Error>(content)
    };
    match read.await {
        Ok(content) if content.len() > MAX_BYTES => Err(format!("longer than {} MiB", MAX_BYTES >> 20)),
        Ok(content) => Ok(content),
        Err(error) => Err(format!("cannot be read: {error}")),
    }
}

/// Reads YAML, of which JSON is a part; `expected` says what should stand there.
pub(crate) fn read_yaml<T: DeserializeOwned>(content: &[u8], expected: &str) -> Result<T, String> {
    let text = std::str::from_utf8(content).map_err(|_| "not UTF-8".to_owned())?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with('#')) {
        return Err(format!("holds nothing; write {expected}, or [] for none"));
    }
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| format!("{}; it must be {expected}", one_line(&error.to_string())))
}

/// Whether a problem is as the console and the log can show it: a line of bearable length.
#[cfg(test)]
pub(crate) fn is_short(problem: &str) -> bool {
    !problem.is_empty() && problem.chars().count() <= 500 && !problem.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_reading_is_returned_at_once_also_when_there_is_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("list");
        assert!(WatchedFile::new(&path).changed().await.expect_err("no file").contains("cannot be read"));
        std::fs::write(&path, "a").expect("a file");
        assert_eq!(WatchedFile::new(&path).changed().await, Ok(b"a".to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_rename_and_a_swapped_link_are_changes_and_the_same_content_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, other) = (folder.path().join("list"), folder.path().join("other"));
        std::fs::write(&other, "a").expect("a file");
        std::os::unix::fs::symlink(&other, &path).expect("a link");
        let mut file = WatchedFile::new(&path);
        assert_eq!(file.changed().await, Ok(b"a".to_vec()));

        let next = folder.path().join("next");
        std::fs::write(&next, "a").expect("a file");
        std::fs::rename(&next, &path).expect("a rename");
        assert!(tokio::time::timeout(PERIOD * 10, file.changed()).await.is_err(), "it holds what it held");

        std::fs::write(&other, "b").expect("a file");
        std::os::unix::fs::symlink(&other, &next).expect("a link");
        std::fs::rename(&next, &path).expect("a rename");
        assert_eq!(file.changed().await, Ok(b"b".to_vec()));

        std::fs::remove_file(&path).expect("a file less");
        assert!(file.changed().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_being_written_is_not_taken_for_a_whole_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("list");
        std::fs::write(&path, "whole").expect("a file");
        let mut file = WatchedFile::new(&path);
        assert!(file.changed().await.is_ok());
        std::fs::write(&path, "ha").expect("a file");
        // One reading sees the half, the next one the whole.
        assert!(tokio::time::timeout(PERIOD + PERIOD / 2, file.changed()).await.is_err());
        std::fs::write(&path, "half").expect("a file");
        assert_eq!(file.changed().await, Ok(b"half".to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_huge_file_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("list");
        std::fs::write(&path, vec![b' '; MAX_BYTES + 1]).expect("a file");
        assert_eq!(WatchedFile::new(&path).changed().await, Err("longer than 4 MiB".to_owned()));
    }
}
