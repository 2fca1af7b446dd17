//! Homing as a proxy-wasm filter for a stock Envoy: a thin adapter around `homing-routing`.
//!
//! One module serves three roles, chosen by its configuration: `route` sits in the listener that clients use, `control` in the
//! listener that the collector uses; both share Envoy's shared data, so they must have the same `vm_id`. `model` may stand before
//! `route` where one listener serves several models.

// Nothing here may panic: a panic kills the VM and every stream on its worker.
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

pub mod config;

#[cfg(target_arch = "wasm32")]
mod control;
#[cfg(target_arch = "wasm32")]
mod envoy;
#[cfg(target_arch = "wasm32")]
mod model;
#[cfg(target_arch = "wasm32")]
mod module;
#[cfg(target_arch = "wasm32")]
mod root;
#[cfg(target_arch = "wasm32")]
mod route;
