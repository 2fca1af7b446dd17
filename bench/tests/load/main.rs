//! The load generator against stand-in replicas, and against endpoints that do what a stand-in does not.

mod apis;
mod closed_loop;
mod engines;
mod errors;
mod fakes;
mod open_loop;
