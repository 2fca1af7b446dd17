//! Agent sessions on a fleet of modelled engines, in virtual time: minutes of load in a second, the same every time.
//!
//! A [workload](crate::workload) says what sessions send, a [policy](PolicyName) where each request goes (Homing's own routing code, and
//! others beside it), and [`run`] lets time pass: the engines' steps, the sessions' calls and the policies' looks at metrics.

mod frontier;
mod policy;
mod reference;
mod report;
mod spill;
mod world;

pub use frontier::{FrontierArgs, frontier};
pub use policy::{Fleet, HomingOptions, Policy, PolicyName, Routed, View};
pub use reference::{ModelRow, Published, ReferenceRow, compare_with_reference};
pub use report::{Figures, SimulationReport};
pub use spill::compare;
pub use world::{Simulation, run, run_stages};

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs simulations on as many threads as the machine has CPUs: the figures of each, in their order.
pub fn run_all(simulations: &[Simulation]) -> Vec<Figures> {
    on_all_cpus(simulations, run)
}

fn on_all_cpus<T: Send>(simulations: &[Simulation], run: impl Fn(&Simulation) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(simulations.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let at = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(simulation) = simulations.get(at)
                {
                    let result = run(simulation);
                    results.lock().expect("no thread panics with the lock held").push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics with the lock held");
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests;
