//! The collector of Homing.
#![forbid(unsafe_code)]

pub mod config;
pub mod exposition;
pub mod vllm;
