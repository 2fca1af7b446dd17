//! Which replicas take no new turns, and who said so.
//!
//! Three may say it: the configuration, a file that is watched, and a caller of the API. A replica drains while at least one does.
//! What the API said is kept in memory until the collector ends.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{RwLock, RwLockReadGuard};

use homing_routing::replica::ReplicaName;
use serde::{Deserialize, Serialize};

use crate::discovery::watched::{self, WatchedFile};

/// Who said that a replica drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrainedBy {
    /// `drain: true` in the configuration.
    Configuration,
    /// The drain file.
    File,
    /// A caller of the API.
    Api,
}

/// What the drain file and the API said; shared.
#[derive(Debug, Default)]
pub struct Drains(RwLock<Drained>);

/// What the drain file and the API said. A name without a rank stands for every rank at its address.
#[derive(Clone, Debug, Default)]
pub struct Drained {
    /// Replicas that callers of the API drain.
    pub api: BTreeSet<ReplicaName>,
    /// Replicas in the drain file, when it was last right.
    pub file: BTreeSet<ReplicaName>,
    /// What is wrong with the drain file.
    pub file_problem: Option<String>,
    /// Whether there is a drain file that was not read yet, well or badly.
    pub awaits_file: bool,
}

impl Drains {
    /// Nothing was said yet; `has_file` tells whether a drain file will say something.
    pub fn new(has_file: bool) -> Self {
        Self(RwLock::new(Drained { awaits_file: has_file, ..Drained::default() }))
    }

    /// What was said. Do not wait for anything while holding it.
    pub fn read(&self) -> RwLockReadGuard<'_, Drained> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes what was said.
    pub fn update<T>(&self, change: impl FnOnce(&mut Drained) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Follows the drain file for ever, and tells whenever it was read. While it cannot be, what it last said holds.
    pub(crate) async fn follow(&self, path: &Path, was_read: impl Fn()) {
        let mut file = WatchedFile::new(path);
        loop {
            let names = file.changed().await.and_then(|content| read_names(&content));
            let name = path.display();
            match &names {
                Ok(names) => tracing::info!("drain file {name}: {} replicas", names.len()),
                Err(problem) => tracing::warn!("drain file {name}: {problem}; what it said last still holds"),
            }
            self.update(|drained| {
                drained.awaits_file = false;
                match names {
                    Ok(names) => (drained.file, drained.file_problem) = (names, None),
                    Err(problem) => drained.file_problem = Some(problem),
                }
            });
            was_read();
        }
    }
}

impl Drained {
    /// Who drains `replica`; `configured` tells whether the configuration does.
    pub fn by(&self, replica: ReplicaName, configured: bool) -> Vec<DrainedBy> {
        let said = [
            (DrainedBy::Configuration, configured),
            (DrainedBy::File, names(&self.file, replica)),
            (DrainedBy::Api, names(&self.api, replica)),
        ];
        said.into_iter().filter_map(|(who, says)| says.then_some(who)).collect()
    }

    /// Whether the file or the API drains `replica`.
    pub fn contains(&self, replica: ReplicaName) -> bool {
        names(&self.file, replica) || names(&self.api, replica)
    }
}

fn names(list: &BTreeSet<ReplicaName>, replica: ReplicaName) -> bool {
    !list.is_empty() && (list.contains(&replica) || list.contains(&ReplicaName::endpoint(replica.address)))
}

/// A YAML list of names; `[]` for none.
fn read_names(content: &[u8]) -> Result<BTreeSet<ReplicaName>, String> {
    let names: Vec<ReplicaName> = watched::read_yaml(content, "a list of replicas, such as `- 10.0.0.1:8000`")?;
    Ok(names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> ReplicaName {
        text.parse().expect("a name")
    }

    #[test]
    fn a_name_without_a_rank_drains_every_rank_there() {
        let drained = Drained { file: [name("10.0.0.1:80"), name("10.0.0.2:80#1")].into(), ..Drained::default() };
        for (replica, drains) in [("10.0.0.1:80", true), ("10.0.0.1:80#3", true), ("10.0.0.2:80#1", true), ("10.0.0.2:80#0", false)]
        {
            assert_eq!(drained.contains(name(replica)), drains, "{replica}");
        }
    }

    #[test]
    fn everyone_who_drains_a_replica_is_named() {
        let replica = name("10.0.0.1:80");
        let mut drained = Drained { api: [replica].into(), file: [replica].into(), ..Drained::default() };
        assert_eq!(drained.by(replica, true), [DrainedBy::Configuration, DrainedBy::File, DrainedBy::Api]);
        drained.api.clear();
        assert_eq!(drained.by(replica, false), [DrainedBy::File]);
    }

    #[test]
    fn a_drain_file_is_a_list_and_anything_else_is_refused_with_what_is_allowed() {
        assert_eq!(read_names(b"- 10.0.0.1:80\n- '[::1]:80'\n- 10.0.0.1:80#1  # two of them\n").map(|names| names.len()), Ok(3));
        assert_eq!(read_names(b"[]\n").map(|names| names.len()), Ok(0));
        for (broken, says) in
            [("", "holds nothing"), ("# none\n", "holds nothing"), ("- gpu-1:80\n", "ip:port"), ("a: b\n", "a list of replicas")]
        {
            let problem = read_names(broken.as_bytes()).expect_err(broken);
            assert!(problem.contains(says), "{broken:?}: {problem}");
        }
        assert!(read_names(b"- \xff\n").expect_err("no UTF-8").contains("UTF-8"));
    }

    proptest! {
        #[test]
        fn any_file_is_names_that_read_back_or_refused_in_a_line(content in mutated(seeds("drains"))) {
            match read_names(&content) {
                Ok(names) => prop_assert_eq!(read_names(&serde_json::to_vec(&names).expect("JSON")), Ok(names)),
                Err(problem) => prop_assert!(watched::is_short(&problem), "{problem:?}"),
            }
        }
    }
}
