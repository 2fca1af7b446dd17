//! `cargo xtask deny`: what the dependencies may be, by deny.toml.

use anyhow::{Context, Result};
use clap::Args;

use crate::tools::{self, run, say};

/// What to check.
#[derive(Debug, Args)]
pub struct DenyOptions {
    /// Look for known holes as well: fetches the RustSec database from its repository.
    #[arg(long)]
    advisories: bool,
}

/// Checks the dependencies.
///
/// # Errors
/// If one is not as deny.toml wants it, or the RustSec database cannot be fetched.
pub fn deny(options: &DenyOptions) -> Result<()> {
    let mut command = tools::cargo_deny()?;
    command.args(["--all-features", "--locked", "check", "bans", "licenses", "sources"]);
    if options.advisories {
        command.arg("advisories");
    }
    say("licences, sources and bans of the dependencies");
    run(&mut command).context("deny.toml says what is allowed, and why")
}
