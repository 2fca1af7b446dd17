//! Agent sessions on a fleet of modelled engines, in virtual time: minutes of load in a second, the same every time.
//!
//! [`workload`] says what sessions send, [`policy`] where each turn goes (Homing's own routing code, and others beside it), and
//! [`run`] lets time pass: the engines' steps, the sessions' turns and the collector's snapshots.

mod policy;
mod report;
mod spill;
mod workload;
mod world;

pub use policy::{Choice, HomingOptions, Policy, PolicyName, View};
pub use report::SimulationReport;
pub use spill::{SpillLine, compare};
pub use workload::{Workload, WorkloadName};
pub use world::{Simulation, run};

#[cfg(test)]
mod tests;
