//! Pictures of the console under load, light and dark, on a desktop and on a phone. `cargo xtask screenshots` runs it.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use homing_tests::browser::{Screen, Visitor};
use homing_tests::{eventually, stack_at_speed, tools};
use tokio::process::{Child, Command};
use xtask::stack::{MODEL, Stack, StackOptions};

/// The largest picture that is kept, in bytes.
const MAX_BYTES: usize = 200_000;

/// Takes pictures of the console under load.
#[derive(Parser)]
struct Options {
    /// Where they go.
    #[arg(long, default_value = "docs/images")]
    out: PathBuf,
    /// How long the load runs before the pictures are taken, in seconds.
    #[arg(long, default_value_t = 100)]
    seconds: u64,
    /// A console that runs already, instead of a stack of its own.
    #[arg(long, value_name = "URL")]
    console: Option<String>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    std::fs::create_dir_all(&options.out)?;
    if let Some(console) = &options.console {
        return take(&options, console).await;
    }
    // Sessions come and go five times as fast as real ones: with larger caches, those of two minutes fit all the same.
    let replica_args = ["--kv-tokens", "400000"].map(str::to_owned).into();
    let stack = stack_at_speed(StackOptions { replica_args, ..StackOptions::default() }, 5.0).await?;
    let mut load = load(&stack, options.seconds + 60)?;
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let taken = take(&options, &format!("http://{console}")).await;
    load.kill().await?;
    taken
}

/// Six agent sessions at a time, which four replicas hold.
fn load(stack: &Stack, seconds: u64) -> Result<Child> {
    let mut command = Command::new(&tools().bench);
    command.args(["load", "--json", "--model", MODEL, "--url", &format!("http://{}", stack.proxy), "--sessions", "6"]);
    command.args(["--duration", &format!("{seconds}s"), "--speed", "5"]);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).kill_on_drop(true);
    command.spawn().context("starting the load")
}

async fn take(options: &Options, console: &str) -> Result<()> {
    let visitor = Visitor::start(Screen::DESKTOP).await?;
    for (name, screen) in [("desktop", Screen::DESKTOP), ("phone", Screen::PHONE)] {
        for (scheme, screen) in [("light", screen), ("dark", screen.dark())] {
            visitor.set_screen(screen).await?;
            visitor.open(console).await?;
            eventually("the page to be live with charts", async || {
                visitor.ask("document.body.dataset.link === 'live' && document.querySelector('.line') !== null").await
            })
            .await?;
            let picture = visitor.picture().await?;
            let file = options.out.join(format!("console-{name}-{scheme}.png"));
            ensure!(picture.len() < MAX_BYTES, "{} would have {} bytes; {MAX_BYTES} are kept", file.display(), picture.len());
            std::fs::write(&file, picture).with_context(|| format!("writing {}", file.display()))?;
            println!("{}", file.display());
        }
    }
    Ok(())
}
