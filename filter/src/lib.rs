//! Homing as a proxy-wasm filter for a stock Envoy: a thin adapter around `homing-routing`.
//!
//! One module serves two roles, chosen by its configuration: `route` sits in the listener that clients use, `control` in the
//! listener that the collector uses. Both share Envoy's shared data, so they must have the same `vm_id`.

pub mod config;

#[cfg(target_arch = "wasm32")]
mod control;
#[cfg(target_arch = "wasm32")]
mod envoy;
#[cfg(target_arch = "wasm32")]
mod root;
#[cfg(target_arch = "wasm32")]
mod route;
