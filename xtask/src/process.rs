//! Child processes that end with their owner and keep what they said.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use crate::wait::eventually;

/// How long a process has to say that it is ready.
const READY: Duration = Duration::from_secs(60);

/// How long a process group has to end in order.
const GROUP_END: Duration = Duration::from_secs(15);

/// A running child. It is killed when this is dropped; a process group is ended in order first.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    leads_group: bool,
}

impl Process {
    /// Starts a program; what it writes to stderr goes to a file in `dir`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, program: &Path, args: &[String], dir: &Path) -> Result<Self> {
        Self::spawn(name, program, dir, Stdio::null(), |command| command.args(args))
    }

    /// Starts a program as the leader of a process group of its own. It ends the group when its stdin ends, so that the group
    /// outlives neither this nor the whole process that started it, and kills it when its stdin brings a line. What it writes to stdout goes to the log too.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_group(name: &str, program: &Path, args: &[String], env: &[(&str, String)], dir: &Path) -> Result<Self> {
        let stdout = open_log(name, dir)?.1.into();
        let mut process = Self::spawn(name, program, dir, stdout, |command| {
            command.args(args).envs(env.iter().map(|(key, value)| (key, value))).stdin(Stdio::piped()).process_group(0)
        })?;
        process.leads_group = true;
        Ok(process)
    }

    /// Starts a program that writes one line of JSON to stdout once it is ready, and returns that line.
    ///
    /// # Errors
    /// If it cannot be started, ends, or says nothing within a minute.
    pub async fn start_ready(name: &str, program: &Path, args: &[String], dir: &Path) -> Result<(Self, serde_json::Value)> {
        let mut process = Self::spawn(name, program, dir, Stdio::piped(), |command| command.args(args))?;
        let stdout = process.child.stdout.take().context("its output")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(READY, lines.next_line()).await.ok().and_then(Result::ok).flatten();
        let Some(line) = line else { bail!("{name} did not become ready.\n{}", process.tail()) };
        let ready = serde_json::from_str(&line).with_context(|| format!("{name} said `{line}` where JSON was expected"))?;
        Ok((process, ready))
    }

    fn spawn(
        name: &str,
        program: &Path,
        dir: &Path,
        stdout: Stdio,
        more: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Result<Self> {
        let (log, stderr) = open_log(name, dir)?;
        let mut command = Command::new(program);
        command.current_dir(dir).stdin(Stdio::null()).stdout(stdout).stderr(stderr).kill_on_drop(true);
        let child = more(&mut command).spawn().with_context(|| format!("starting {name} ({})", program.display()))?;
        Ok(Self { name: name.to_owned(), child, log, leads_group: false })
    }

    /// Its process id; `None` once it has ended.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills it, or the group it leads, at once and waits until it is gone.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub async fn kill(&mut self) -> Result<()> {
        if let Some(mut stdin) = self.child.stdin.take().filter(|_| self.leads_group) {
            // The leader can clean up behind what it kills; an error means that it has ended.
            let _ = stdin.write_all(b"kill\n").await;
            let _ = timeout(GROUP_END, self.child.wait()).await;
            self.kill_group();
        }
        self.child.kill().await.with_context(|| format!("stopping {}", self.name))
    }

    /// Stops it where it is, or lets it go on. Its connections stay open, and the system accepts new ones for it. Returns when every thread
    /// has stopped: until then one may answer.
    ///
    /// # Errors
    /// If it has ended.
    pub async fn freeze(&self, frozen: bool) -> Result<()> {
        let (pid, signal) = (self.pid()?, if frozen { Signal::STOP } else { Signal::CONT });
        kill_process(pid, signal).with_context(|| format!("stopping {} or letting it go on", self.name))?;
        let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
        eventually("every thread to stop", async || Ok(!frozen || are_stopped(&tasks)?)).await
    }

    fn pid(&self) -> Result<Pid> {
        let id = self.child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        id.with_context(|| format!("{} has ended", self.name))
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// If it did not succeed; the message has its last words.
    pub async fn wait(&mut self) -> Result<()> {
        // Its stdin stays open meanwhile: the end of that would end it.
        let stdin = self.child.stdin.take();
        let status = self.child.wait().await;
        drop(stdin);
        let status = status?;
        ensure!(status.success(), "{} failed ({status}).\n{}", self.name, self.tail());
        Ok(())
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

    /// Tells a group to end, without waiting for it.
    pub(crate) fn ask_to_end(&mut self) {
        if self.leads_group {
            drop(self.child.stdin.take());
        }
    }

    /// Kills the group it leads, if it leads one and has not ended.
    fn kill_group(&self) {
        if let Some(group) = self.pid().ok().filter(|_| self.leads_group) {
            // It fails only if there is nothing left to kill.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.leads_group {
            self.ask_to_end();
            let started = Instant::now();
            while started.elapsed() < GROUP_END && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            self.kill_group();
        }
    }
}

/// Does something, unless SIGINT or SIGTERM comes first. Both are caught, so that what it holds is dropped and stopped in order.
///
/// # Errors
/// Those of the work; and that it was interrupted or terminated.
pub async fn unless_signalled<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

/// Runs a command and whatever it starts, all of which a signal to this process ends.
///
/// # Errors
/// If it cannot be started, does not succeed, or a signal ended it.
pub async fn run_group(command: std::process::Command) -> Result<()> {
    let mut command = Command::from(command);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut child = command.process_group(0).stdin(Stdio::null()).spawn().with_context(|| format!("starting {command:?}"))?;
    let group = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)).context("its process id")?;
    tokio::select! {
        status = child.wait() => {
            let status = status?;
            ensure!(status.success(), "{:?} failed ({status})", command.as_std());
            return Ok(());
        }
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    kill_process_group(group, Signal::TERM).context("stopping it")?;
    let end = Instant::now() + GROUP_END;
    // The command may end before what it has started, and a stopped process ends by nothing else than KILL.
    while Instant::now() < end && (child.try_wait()?.is_none() || test_kill_process_group(group).is_ok()) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // It fails only if there is nothing left to kill.
    let _ = kill_process_group(group, Signal::KILL);
    child.wait().await?;
    bail!("stopped by a signal")
}

fn open_log(name: &str, dir: &Path) -> Result<(PathBuf, File)> {
    let log = dir.join(format!("{name}.log"));
    let file = File::options().create(true).append(true).open(&log).with_context(|| format!("writing {}", log.display()))?;
    Ok((log, file))
}

/// Whether all tasks of this folder in /proc are stopped.
fn are_stopped(tasks: &str) -> Result<bool> {
    for task in fs::read_dir(tasks)? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        // The state stands behind the name, which is in parentheses and may have any characters: proc_pid_stat(5).
        if !stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}
