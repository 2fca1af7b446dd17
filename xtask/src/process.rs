//! Child processes that end with their owner and keep what they said.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// How long a process has to say that it is ready.
const READY: Duration = Duration::from_secs(60);

/// A running child. It is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program; what it writes to stderr goes to a file in `dir`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, program: &Path, args: &[String], dir: &Path) -> Result<Self> {
        Self::spawn(name, program, args, dir, Stdio::null())
    }

    /// Starts a program that writes one line of JSON to stdout once it is ready, and returns that line.
    ///
    /// # Errors
    /// If it cannot be started, ends, or says nothing within a minute.
    pub async fn start_ready(name: &str, program: &Path, args: &[String], dir: &Path) -> Result<(Self, serde_json::Value)> {
        let mut process = Self::spawn(name, program, args, dir, Stdio::piped())?;
        let stdout = process.child.stdout.take().context("its output")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(READY, lines.next_line()).await.ok().and_then(Result::ok).flatten();
        let Some(line) = line else { bail!("{name} did not become ready.\n{}", process.tail()) };
        let ready = serde_json::from_str(&line).with_context(|| format!("{name} said `{line}` where JSON was expected"))?;
        Ok((process, ready))
    }

    fn spawn(name: &str, program: &Path, args: &[String], dir: &Path, stdout: Stdio) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let stderr = File::options().create(true).append(true).open(&log).with_context(|| format!("writing {}", log.display()))?;
        let child = Command::new(program)
            .args(args)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {name} ({})", program.display()))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Its process id; `None` once it has ended.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills it at once and waits until it is gone.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub async fn kill(&mut self) -> Result<()> {
        self.child.kill().await.with_context(|| format!("stopping {}", self.name))
    }

    /// Fails with its last words if it has ended.
    ///
    /// # Errors
    /// If it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}).\n{}", self.name, self.tail()),
        }
    }

    /// The last lines it wrote to stderr.
    pub fn tail(&self) -> String {
        let text = std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}
