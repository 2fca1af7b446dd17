//! Tasks that come and go with what they are about, such as the polls of endpoints.

use std::collections::HashMap;
use std::hash::Hash;

use tokio::task::{AbortHandle, JoinSet};

/// Running tasks, by what each is about. Dropping it ends them.
pub(super) struct Tasks<K> {
    tasks: JoinSet<()>,
    handles: HashMap<K, AbortHandle>,
}

impl<K> Default for Tasks<K> {
    fn default() -> Self {
        Self { tasks: JoinSet::new(), handles: HashMap::new() }
    }
}

impl<K: Eq + Hash> Tasks<K> {
    pub(super) fn start(&mut self, about: K, task: impl Future<Output = ()> + Send + 'static) {
        self.handles.insert(about, self.tasks.spawn(task));
    }

    /// Returns once they have ended: one that came back at once would share its metrics with the old one. `false` if one failed.
    pub(super) async fn stop(&mut self, about: impl IntoIterator<Item = K>) -> bool {
        let stopped = about.into_iter().filter_map(|about| self.handles.remove(&about)).map(|handle| handle.abort()).count();
        for _ in 0..stopped {
            if !matches!(self.tasks.join_next().await, Some(Err(error)) if error.is_cancelled()) {
                return false;
            }
        }
        true
    }

    /// Waits until one ends by itself; for ever if there is none.
    pub(super) async fn failed(&mut self) {
        if self.tasks.join_next().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
