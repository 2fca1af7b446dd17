//! The routing decision of Homing.
#![forbid(unsafe_code)]
mod bindings;
mod codec;
pub mod control;
pub mod host;
pub mod identity;
mod ledger;
pub mod metric;
pub mod outcome;
pub mod policy;
pub mod pool;
pub mod replica;
pub mod router;
pub mod snapshot;
mod sweep;
pub mod sync;
pub mod table;
#[cfg(test)]
mod testing;
