//! Finding Envoys, and telling those that there are now.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::follow_name;
use super::names::Lookup;
use super::tasks::Tasks;
use crate::config::{EnvoyConfig, EnvoyPlace};
use crate::fleet::{Envoy, Fleet};
use crate::sync::{self, Access};
use crate::telemetry::Telemetry;

/// What exchanges with the fleet's Envoys.
pub(crate) struct Exchanger {
    pub(crate) fleet: Arc<Fleet>,
    /// How each entry's Envoys are reached, in the configuration's order.
    pub(crate) access: Vec<Access>,
    pub(crate) interval: Duration,
    pub(crate) telemetry: Arc<Telemetry>,
}

impl Exchanger {
    /// Finds Envoys and exchanges with each in a task of its own, for ever; returns when a part of it failed.
    pub(crate) async fn run<L: Lookup + Clone + 'static>(self, config: Vec<EnvoyConfig>, lookup: L) {
        let mut names = JoinSet::new();
        for (entry, envoy) in config.into_iter().enumerate() {
            let EnvoyPlace::Dns(dns) = envoy.place else { continue };
            let fleet = Arc::clone(&self.fleet);
            let found = move |addresses, problem| fleet.found_envoys(entry, addresses, problem);
            names.spawn(follow_name(lookup.clone(), dns, found));
        }
        let mut exchanges = Tasks::default();
        for envoy in self.fleet.envoys() {
            self.start(&mut exchanges, envoy);
        }
        loop {
            tokio::select! {
                () = self.fleet.envoy_sources_changed() => {}
                // Neither ends unless it fails.
                Some(_) = names.join_next() => return,
                () = exchanges.failed() => return,
            }
            let change = self.fleet.reconcile_envoys();
            for envoy in &change.removed {
                tracing::info!("envoy {} is gone and told no more", envoy.url);
            }
            if !exchanges.stop(change.removed.iter().map(|envoy| envoy.number)).await {
                return;
            }
            for envoy in change.added {
                tracing::info!("envoy {} is found", envoy.url);
                self.start(&mut exchanges, envoy);
            }
        }
    }

    fn start(&self, exchanges: &mut Tasks<u64>, envoy: Arc<Envoy>) {
        let (fleet, access, telemetry) = (Arc::clone(&self.fleet), self.access[envoy.entry].clone(), Arc::clone(&self.telemetry));
        exchanges.start(envoy.number, sync::run(fleet, envoy, access, self.interval, telemetry));
    }
}
