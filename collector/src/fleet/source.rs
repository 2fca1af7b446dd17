//! Where endpoints or Envoys are found beside the configuration's own, and what was found there.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use super::lock;
use crate::config::DnsConfig;

/// Where endpoints or Envoys are found.
#[derive(Debug)]
pub struct Source {
    /// `dns` or `file`.
    pub kind: &'static str,
    /// The name with its port, or the path.
    pub name: String,
    state: Mutex<SourceState>,
}

/// What a source found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceState {
    /// What it last found; `None` before it found anything.
    pub addresses: Option<Vec<SocketAddr>>,
    /// What is wrong with it now.
    pub problem: Option<String>,
    /// Whether it was asked, whatever came of it.
    pub was_asked: bool,
}

// === impl Source ===

impl Source {
    pub(super) fn dns(config: &DnsConfig) -> Self {
        Self { kind: "dns", name: config.to_string(), state: Mutex::default() }
    }

    pub(super) fn file(path: &Path) -> Self {
        Self { kind: "file", name: path.display().to_string(), state: Mutex::default() }
    }

    /// What it found. Do not wait for anything while holding it.
    pub fn state(&self) -> MutexGuard<'_, SourceState> {
        lock(&self.state)
    }

    /// Takes in what it found for `owner`; `None` when it found nothing and what it found before holds. Returns whether anything is
    /// another than before.
    pub(super) fn found(&self, owner: &str, addresses: Option<Vec<SocketAddr>>, problem: Option<String>) -> bool {
        let mut state = self.state();
        if state.problem != problem {
            let Self { kind, name, .. } = self;
            match &problem {
                Some(problem) => tracing::warn!("{owner}: {kind} {name}: {problem}; what it found last is kept"),
                None => tracing::info!("{owner}: {kind} {name} is right again"),
            }
        }
        let before = state.clone();
        state.addresses = addresses.or(state.addresses.take());
        state.problem = problem;
        state.was_asked = true;
        *state != before
    }
}
