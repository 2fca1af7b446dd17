//! Installs vLLM's CPU build with pinned packages, what lets it start without a GPU, and the model.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::{Command as Blocking, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{VLLM_VERSION, Vllm};
use crate::tools::{find_in_path, lock_file, make_venv, root, say, tools_dir};

/// Python's minor versions that every package has a wheel for.
const PYTHONS: std::ops::RangeInclusive<u32> = 11..=13;

/// Written when everything else is in place; it holds what was installed.
const MARKER: &str = "installed";

impl Vllm {
    /// Installs vLLM if it is missing, its requirements have changed, or an earlier installation did not finish.
    ///
    /// # Errors
    /// If this machine cannot have it or a step fails; the message says what to do.
    pub async fn ensure() -> Result<Self> {
        let vllm = Self { home: tools_dir().join(format!("vllm-{VLLM_VERSION}")) };
        let (requirements, prepare) = (folder().join("requirements.txt"), folder().join("prepare.py"));
        let wanted = fs::read_to_string(&requirements)? + &fs::read_to_string(&prepare)?;
        let _lock = lock().await?;
        if fs::read_to_string(vllm.home.join(MARKER)).is_ok_and(|installed| installed == wanted) {
            return Ok(vllm);
        }
        let python = check_machine()?;
        say(&format!("installing vLLM {VLLM_VERSION} for the CPU: once, about 2 minutes, 2.6 GB in {}", vllm.home.display()));
        // What an interrupted installation left may be half a package; pip would take it for a whole one.
        if vllm.home.exists() {
            fs::remove_dir_all(&vllm.home).with_context(|| format!("removing {}", vllm.home.display()))?;
        }
        let started = Instant::now();
        make_venv(&python, &vllm.home)?;
        install_packages(&vllm.home, &requirements).await.context("vLLM's packages could not be installed; try it again")?;
        say("making what stands in for CUDA, and the model");
        let status = Command::new(vllm.python()).arg(&prepare).arg(vllm.model()).kill_on_drop(true).status().await?;
        ensure!(status.success(), "{} failed ({status})", prepare.display());
        fs::write(vllm.home.join(MARKER), wanted)?;
        say(&format!("vLLM is installed; it took {} s", started.elapsed().as_secs()));
        Ok(vllm)
    }

    /// The virtual environment's Python.
    pub(super) fn python(&self) -> PathBuf {
        self.home.join("bin/python")
    }

    /// The command `vllm`.
    pub(super) fn program(&self) -> PathBuf {
        self.home.join("bin/vllm")
    }

    /// The model's folder.
    pub(super) fn model(&self) -> PathBuf {
        self.home.join("model")
    }
}

/// The Python scripts and the pinned packages.
pub(super) fn folder() -> PathBuf {
    root().join("xtask/vllm")
}

/// The tools' lock. Another installation can take minutes, so that waiting for it must not keep signals from being noticed.
async fn lock() -> Result<File> {
    let file = lock_file()?;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                if !std::mem::replace(&mut told, true) {
                    say("waiting for another build or installation");
                }
                sleep(Duration::from_millis(100)).await;
            }
            Err(TryLockError::Error(error)) => return Err(error).context("locking the tools"),
        }
    }
}

/// Fails where the packages cannot work; returns a Python they can work with.
fn check_machine() -> Result<PathBuf> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")),
        "vLLM's CPU build is pinned for x86_64 Linux with glibc only; run this without --vllm, with stand-in replicas"
    );
    for tool in ["gcc", "readelf"] {
        ensure!(
            find_in_path(tool).is_some(),
            "{tool} is missing: install a C compiler and binutils (on Debian, apt-get install gcc)"
        );
    }
    let names = std::iter::once("python3".to_owned()).chain(PYTHONS.rev().map(|minor| format!("python3.{minor}")));
    let found = names
        .filter_map(|name| find_in_path(&name))
        .find(|python| minor_version(python).is_some_and(|minor| PYTHONS.contains(&minor)));
    let (oldest, newest) = (PYTHONS.start(), PYTHONS.end());
    found.with_context(|| {
        format!("vLLM's packages are pinned for Python 3.{oldest} to 3.{newest}, and PATH has none of them: install one")
    })
}

/// The `y` of Python 3.y.
fn minor_version(python: &Path) -> Option<u32> {
    let script = "import sys; print(sys.version_info.minor if sys.version_info.major == 3 else 0)";
    let output = Blocking::new(python).args(["-c", script]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Runs pip and says every ten seconds how far it is.
async fn install_packages(home: &Path, requirements: &Path) -> Result<()> {
    let total = fs::read_to_string(requirements)?.lines().filter(|line| line.contains("==")).count();
    // pip, once interrupted, leaves gigabytes behind; here the next installation removes them.
    let temporary = home.join("tmp");
    fs::create_dir_all(&temporary)?;
    let mut pip = Command::new(home.join("bin/pip"))
        .args(["install", "--no-deps", "--require-hashes", "--only-binary", ":all:"])
        .args(["--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--requirement"])
        .arg(requirements)
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("starting pip")?;
    let mut lines = BufReader::new(pip.stdout.take().context("pip's output")?).lines();
    let started = Instant::now();
    let mut tick = interval(Duration::from_secs(10));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut fetched, mut unpacking) = (0, false);
    loop {
        tokio::select! {
            line = lines.next_line() => match line? {
                None => break,
                Some(line) if line.starts_with("Collecting ") => fetched += 1,
                Some(line) => unpacking |= line.starts_with("Installing collected packages"),
            },
            _ = tick.tick() => {
                let doing = if unpacking { "unpacking".to_owned() } else { format!("fetched {fetched} of {total} packages") };
                say(&format!("  {doing}, {} s", started.elapsed().as_secs()));
            }
        }
    }
    let status = pip.wait().await?;
    if !status.success() {
        bail!("pip failed ({status}); it says why above");
    }
    fs::remove_dir_all(&temporary).context("removing pip's temporary files")
}
