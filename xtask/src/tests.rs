//! `cargo xtask test`: every check a change must pass.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::manifests;
use crate::process::run_group;
use crate::tools::{self, ENVOYS, Tools, cargo, run, say};
use crate::vllm::Vllm;

/// Which checks to run.
#[derive(Debug, Args)]
pub struct TestOptions {
    /// Only the end-to-end tests whose names contain this.
    #[arg(long, value_name = "NAME")]
    end_to_end: Option<String>,
    /// Only the end-to-end tests on real vLLM servers. The first time, this installs vLLM; the tests take some minutes.
    #[arg(long, conflicts_with = "end_to_end")]
    vllm: bool,
    /// Only the end-to-end tests, on an Envoy of this version; `all` for every version that is supported. Each is installed when missing.
    #[arg(long, value_name = "VERSION", conflicts_with = "vllm", value_parser = envoys().collect::<Vec<_>>())]
    envoy: Option<String>,
    /// Only the collector, a replica and Envoy killed and started again in all 36 orders under load, of which the end-to-end tests take 6.
    /// About ten minutes.
    #[arg(long, conflicts_with_all = ["end_to_end", "vllm"])]
    restarts: bool,
}

fn envoys() -> impl Iterator<Item = &'static str> {
    ENVOYS.into_iter().chain(["all"])
}

/// Runs the checks.
///
/// # Errors
/// The first one that fails.
pub async fn test(options: &TestOptions) -> Result<()> {
    if options.vllm {
        return on_vllm().await;
    }
    if options.restarts {
        return restarts().await;
    }
    let only_some = options.end_to_end.is_some() || options.envoy.is_some();
    if !only_some {
        format_and_lints()?;
        say("unit and property tests");
        run(cargo().args(["test", "--quiet", "--workspace", "--exclude", "homing-tests"]))?;
        on_wasm32()?;
        manifests::check()?;
    }
    let tools = Tools::ensure()?;
    let envoys = match options.envoy.as_deref() {
        None => vec![tools.envoy],
        Some("all") => ENVOYS.into_iter().map(tools::envoy_of).collect::<Result<_>>()?,
        Some(version) => vec![tools::envoy_of(version)?],
    };
    for envoy in envoys {
        end_to_end(&envoy, options.end_to_end.as_deref().as_slice()).await?;
    }
    if !only_some {
        end_to_end(&tools::envoy_of(ENVOYS[0])?, &ON_THE_OLDEST).await?;
    }
    Ok(())
}

/// What every run tries on the oldest Envoy too: the tests in which Envoys differ most, in a minute. `--envoy all` tries all of them.
const ON_THE_OLDEST: [&str; 6] = ["admission::line::", "bodies::", "configuration::", "control::", "models::", "routing::"];

/// The end-to-end tests on one Envoy; with names, those that contain one of them.
async fn end_to_end(envoy: &Path, names: &[&str]) -> Result<()> {
    say(&format!("end-to-end tests on {}", envoy_version(envoy)?));
    each_names_a_test(names)?;
    let mut command = cargo();
    // The tests find what was built; two at a time leave each a core.
    command.args(["test", "--package", "homing-tests", "--no-fail-fast", "--"]).args(names).args(["--test-threads", "2"]);
    command.env("HOMING_ENVOY", envoy).current_dir(tools::root());
    run_group(command).await
}

/// Fails for a name that is part of no test's: nothing would run, and that would count as success.
fn each_names_a_test(names: &[&str]) -> Result<()> {
    let list = ["test", "--quiet", "--package", "homing-tests", "--", "--list"];
    let output = cargo().args(list).current_dir(tools::root()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the tests cannot be listed ({})", output.status);
    let tests = String::from_utf8_lossy(&output.stdout).into_owned();
    match names.iter().find(|name| !tests.lines().any(|test| test.ends_with(": test") && test.contains(**name))) {
        Some(name) => {
            bail!("no end-to-end test has `{name}` in its name: `cargo test --package homing-tests -- --list` has them all")
        }
        None => Ok(()),
    }
}

/// What an Envoy calls itself, such as `Envoy 1.40.0`.
fn envoy_version(envoy: &Path) -> Result<String> {
    let output = Command::new(envoy).arg("--version").output().with_context(|| format!("starting {}", envoy.display()))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // <path>  version: <commit>/<version>/<state>/<build>/<TLS library>
    let version = said
        .split("version: ")
        .nth(1)
        .and_then(|said| said.split('/').nth(1))
        .with_context(|| format!("{} does not say its version", envoy.display()))?;
    Ok(format!("Envoy {version}"))
}

/// The long version of the end-to-end test of restarts.
async fn restarts() -> Result<()> {
    const TEST: &str = "every_order_of_kills";
    let tools = Tools::ensure()?;
    each_names_a_test(&[TEST])?;
    say("every order of kills with every order of starts");
    let mut command = cargo();
    command.args(["test", "--package", "homing-tests", "--test", "browser", "--", "--ignored", "--nocapture", TEST]);
    command.env("HOMING_ENVOY", &tools.envoy).current_dir(tools::root());
    run_group(command).await
}

/// The tests on real engines. They are ignored by default, since each starts servers that need half a minute and both cores.
async fn on_vllm() -> Result<()> {
    let tools = Tools::ensure()?;
    Vllm::ensure().await?;
    say("end-to-end tests on a real Envoy and real vLLM servers");
    let mut command = cargo();
    command.args(["test", "--package", "homing-tests", "--test", "vllm", "--", "--ignored", "--test-threads", "1"]);
    // What they wait for is worth seeing.
    command.arg("--nocapture").env("HOMING_ENVOY", &tools.envoy).current_dir(tools::root());
    run_group(command).await
}

fn format_and_lints() -> Result<()> {
    say("format");
    run(cargo().args(["fmt", "--all", "--check"]))?;
    say("lints");
    run(cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"]))?;
    // The filter's adapter is compiled only for Envoy.
    tools::build_filter()?;
    run(cargo().args(["clippy", "--quiet", "--package", "homing-filter", "--target", "wasm32-wasip1", "--", "--deny", "warnings"]))
}

/// Takes pictures of the console under load.
///
/// # Errors
/// If something cannot be built, installed or started.
pub fn screenshots() -> Result<()> {
    run(cargo().args(["run", "--quiet", "--package", "homing-tests", "--bin", "screenshots"]))
}

/// The routing crate's tests where pointers have 32 bits, as in Envoy.
fn on_wasm32() -> Result<()> {
    let mut command = cargo();
    tools::under_node(command.args(["test", "--quiet", "--package", "homing-routing", "--lib"]))?;
    say("routing tests on wasm32, under Node");
    // A panic ends the program there, so what it says must be out by then.
    run(command.args(["--", "--nocapture"]))
}
