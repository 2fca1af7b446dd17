//! The routing decision of Homing: pure, without I/O and without a clock of its own.
//!
//! The same code runs in Envoy's filter (wasm32), in the simulator and in the tests; where it runs is a [`host::Host`].
//!
//! - [`identity`] names the conversation of a request.
//! - [`router`] decides where it goes and learns from where it went; [`pool`] is what it knows of the replicas, [`table`] which
//!   replica each conversation calls home.
//! - [`control`] takes the collector's snapshots ([`sync`]) into shared data ([`snapshot`]).
//! - [`metric`] and [`outcome`] are the statistics.
//!
//! Nothing here may panic: a panic kills Envoy's VM and every stream on its worker. Clippy denies what can.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]
pub mod admission;
pub mod binding;
mod codec;
pub mod control;
pub mod estimate;
pub mod host;
pub mod identity;
mod journal;
mod lanes;
mod ledger;
pub mod metric;
pub mod outcome;
pub mod policy;
pub mod pool;
pub mod replica;
pub mod router;
mod shared;
mod since;
pub mod snapshot;
mod sweep;
pub mod sync;
pub mod table;
