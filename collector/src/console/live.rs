//! What the console shows: the fleet's state now, its history, and a stream of both for those who watch.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::fleet::Fleet;
use crate::history::History;
use crate::status::Status;

/// How often watchers get the state when nothing but numbers changes.
const EVERY: Duration = Duration::from_secs(1);

/// How soon they learn that a replica or an Envoy came or went.
const CHANGE: Duration = Duration::from_millis(250);

/// The most streams at a time.
const MAX_STREAMS: usize = 64;

/// The fleet as it is shown.
#[derive(Debug)]
pub struct Live {
    fleet: Arc<Fleet>,
    history: Arc<History>,
    /// The newest state as JSON, made once for all streams.
    states: watch::Sender<Arc<str>>,
    /// A place for each stream.
    pub(super) streams: Arc<Semaphore>,
}

impl Live {
    /// What is shown of a fleet.
    pub fn new(fleet: Arc<Fleet>, history: Arc<History>) -> Self {
        Self { fleet, history, states: watch::Sender::new(Arc::from("")), streams: Arc::new(Semaphore::new(MAX_STREAMS)) }
    }

    /// The state now.
    pub fn status(&self) -> Status {
        Status::of(&self.fleet, &self.history, Instant::now())
    }

    /// The last hour.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// States from now on.
    pub(super) fn watch(&self) -> watch::Receiver<Arc<str>> {
        self.states.subscribe()
    }
}

/// Makes the state for those who watch, for ever. Costs nothing while nobody does.
pub(crate) async fn publish(live: Arc<Live>) {
    let mut ticks = tokio::time::interval(CHANGE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut sent, mut shown) = (None::<Instant>, Vec::new());
    loop {
        let now = ticks.tick().await;
        if live.states.receiver_count() == 0 {
            sent = None;
            continue;
        }
        let status = live.status();
        let seen = conditions(&status);
        // Ticks are a little early or late; a state a second is meant, not one in every fifth tick.
        let due = sent.is_none_or(|sent| now.duration_since(sent) + CHANGE / 2 >= EVERY);
        if !due && seen == shown {
            continue;
        }
        match serde_json::to_string(&status) {
            Ok(json) => drop(live.states.send(json.into())),
            Err(error) => tracing::error!("the state cannot be written as JSON: {error}"),
        }
        (sent, shown) = (Some(now), seen);
    }
}

/// What a watcher is told at once when it changes.
fn conditions(status: &Status) -> Vec<String> {
    let replicas = status.pools.iter().flat_map(|pool| &pool.replicas);
    let replicas = replicas.map(|replica| format!("{} {:?} {:?}", replica.report.replica, replica.report.state, replica.problem));
    let envoys = status.envoys.iter().map(|envoy| format!("{} {}", envoy.url, envoy.connected));
    replicas.chain(envoys).collect()
}
