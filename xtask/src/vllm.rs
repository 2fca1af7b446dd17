//! A real vLLM without a GPU: installed once, then run with a tiny random model.

mod install;
mod server;

use std::path::PathBuf;

pub use self::server::{free_addresses, wait_until_healthy};

/// The version that is installed. Whoever changes it also changes `xtask/vllm/requirements.txt`.
pub const VLLM_VERSION: &str = "0.26.0";

/// An installed vLLM and its model.
#[derive(Clone, Debug)]
pub struct Vllm {
    /// The virtual environment.
    home: PathBuf,
}
