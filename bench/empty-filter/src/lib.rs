//! A proxy-wasm filter that lets everything pass: Envoy calls it in every phase of a request, and it does nothing there.
//!
//! Beside it, Homing's filter shows what its own work costs, apart from what Envoy takes to call any wasm filter.

#[cfg(target_arch = "wasm32")]
mod root;
