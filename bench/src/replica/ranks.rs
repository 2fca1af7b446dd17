//! The engines behind one port: vLLM's data-parallel ranks.

use super::driver::{Driver, EngineHandle, Observed};
use super::error::ApiError;
use crate::balancer::{Balancer, BalancerKind, REFRESH};
use crate::engine::{Engine, EngineConfig, Gauges};
use axum::http::HeaderMap;
use futures_util::future::join_all;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

/// The engines, by local index.
pub(super) struct Ranks {
    engines: Vec<EngineHandle>,
    balancer: Mutex<Balancer>,
}

/// A request's engine. Dropped when the request has ended, which the balancer is told if it chose.
pub(super) struct Placement {
    ranks: Arc<Ranks>,
    rank: usize,
    balanced: bool,
}

impl Ranks {
    /// Starts the engines, whose clocks run `speed` times faster than the real one, and what feeds the balancer.
    pub(super) fn start(tasks: &mut JoinSet<()>, count: usize, config: &EngineConfig, speed: f64, kind: BalancerKind) -> Arc<Self> {
        let engines = (0..count).map(|_| {
            let (driver, handle) = Driver::new(Engine::new(config.clone()), speed);
            tasks.spawn(driver.run());
            handle
        });
        let ranks = Arc::new(Self { engines: engines.collect(), balancer: Mutex::new(Balancer::new(kind, count)) });
        if count > 1 {
            // The runtime's timer has milliseconds.
            let every = REFRESH.div_f64(speed).max(Duration::from_millis(1));
            tasks.spawn(Self::keep_balancer_informed(ranks.clone(), every));
        }
        ranks
    }

    async fn keep_balancer_informed(self: Arc<Self>, every: Duration) {
        let mut tick = interval(every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let Some(observed) = self.observe().await else { return };
            let gauges: Vec<Gauges> = observed.iter().map(|observed| observed.gauges.unwrap_or_default()).collect();
            self.balancer().refresh(&gauges);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.engines.len()
    }

    /// The rank that a request names, by its local index; what is not a number is ignored.
    pub(super) fn asked_for(&self, headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
        let asked = headers.get("x-data-parallel-rank").and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
        let Some(rank) = asked else { return Ok(None) };
        match usize::try_from(rank) {
            Ok(index) if index < self.len() => Ok(Some(index)),
            _ => Err(ApiError::Rank { rank, ranks: self.len() }),
        }
    }

    /// A place at the rank that was asked for, or at the balancer's choice.
    pub(super) fn place(self: &Arc<Self>, asked: Option<usize>) -> Placement {
        let rank = asked.unwrap_or_else(|| self.balancer().choose());
        Placement { ranks: self.clone(), rank, balanced: asked.is_none() }
    }

    /// Each engine's metrics; None if one is gone.
    pub(super) async fn observe(&self) -> Option<Vec<Observed>> {
        join_all(self.engines.iter().map(EngineHandle::observe)).await.into_iter().collect()
    }

    /// Puts all engines to sleep, or wakes them.
    pub(super) fn sleep(&self, asleep: bool) {
        self.engines.iter().for_each(|engine| engine.sleep(asleep));
    }

    /// A panic elsewhere does not spoil it.
    fn balancer(&self) -> MutexGuard<'_, Balancer> {
        self.balancer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Placement {
    pub(super) fn engine(&self) -> &EngineHandle {
        &self.ranks.engines[self.rank]
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        if self.balanced {
            self.ranks.balancer().ended(self.rank);
        }
    }
}
