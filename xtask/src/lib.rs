//! Builds, runs and tests Homing.
//!
//! [`tools`] finds or installs what is needed, [`stack`] runs Envoy with the filter, the collector and replicas,
//! [`fleet`] several of them, [`agents`] sends them turns, [`vllm`] installs and starts real engines, and the other modules are the commands.

#![forbid(unsafe_code)]

pub mod agents;
pub mod bench;
pub mod client;
pub mod demo;
pub mod deny;
pub mod dist;
pub mod envoy;
pub mod fleet;
pub mod fuzz;
pub mod load;
pub mod manifests;
pub mod memory;
pub mod process;
pub mod pusher;
pub mod relay;
pub mod stack;
pub mod statistics;
pub mod tests;
pub mod tools;
pub mod up;
pub mod vllm;
pub mod wait;
