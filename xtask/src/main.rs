//! The commands of a developer and of someone who tries Homing out.

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, runs and tests Homing")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Drive agent sessions through Envoy with affinity off and on, and print what it changed. About three minutes.
    Demo(xtask::demo::DemoOptions),
    /// Run the whole stack until Ctrl-C.
    Up(xtask::up::UpOptions),
    /// Measure something.
    #[command(subcommand)]
    Bench(xtask::bench::BenchCommand),
    /// Run every check: format, lints, unit and property tests, wasm32, end to end.
    Test(xtask::tests::TestOptions),
    /// Take pictures of the console under load into docs/images. About three minutes.
    Screenshots,
    /// Check the Kubernetes manifests, the compose file and the Dockerfile, as far as that needs no cluster and no Docker.
    Manifests,
    /// Build what is shipped: the module, the binaries and an OCI image of the module, into target/dist.
    Dist,
    /// Check the dependencies' licences and sources; with `--advisories`, known holes too.
    Deny(xtask::deny::DenyOptions),
    /// Try every reader of foreign bytes with damaged inputs for some minutes.
    Fuzz(xtask::fuzz::FuzzOptions),
}

fn main() -> Result<()> {
    let command = Cli::parse().command;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match command {
        Command::Demo(options) => runtime.block_on(xtask::demo::demo(options)),
        Command::Up(options) => runtime.block_on(xtask::up::up(options)),
        Command::Screenshots => xtask::tests::screenshots(),
        Command::Manifests => xtask::manifests::check(),
        Command::Deny(options) => xtask::deny::deny(&options),
        Command::Dist => xtask::dist::dist(),
        Command::Fuzz(options) => xtask::fuzz::fuzz(&options),
        Command::Test(options) => runtime.block_on(xtask::tests::test(&options)),
        Command::Bench(command) => runtime.block_on(xtask::bench::bench(command)),
    }
}
