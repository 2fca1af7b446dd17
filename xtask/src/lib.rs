//! Builds, runs and tests Homing.
//!
//! [`tools`] finds or installs what is needed, [`stack`] runs Envoy with the filter, the collector and replicas,
//! [`fleet`] several of them, [`vllm`] installs and starts real engines, and the other modules are the commands.

#![forbid(unsafe_code)]

pub mod bench;
pub mod demo;
pub mod dist;
pub mod envoy;
pub mod fleet;
pub mod fuzz;
pub mod load;
pub mod manifests;
pub mod process;
pub mod stack;
pub mod tests;
pub mod tools;
pub mod up;
pub mod vllm;
