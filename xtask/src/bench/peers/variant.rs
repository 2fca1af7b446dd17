//! What is compared, and how each is started.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

use super::calibrate::Calibration;
use super::load::SESSION_HEADER;
use super::plain_envoy::{self, EnvoyPolicy};
use crate::envoy::Envoy;
use crate::load::Pace;
use crate::process::Process;
use crate::stack::{Replica, Stack, StackOptions, start_replicas};
use crate::tools::Tools;
use crate::vllm::free_addresses;

/// Replicas behind each variant.
const REPLICAS: usize = 4;
/// Threads that Envoy serves with; the other routers take as many as there are processors.
const CONCURRENCY: usize = 2;
/// How long a router has to find its replicas.
const START: Duration = Duration::from_secs(30);

/// How vllm-router is run; its documentation recommends the first two for sessions and the third for agents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum VllmRouter {
    ConsistentHash,
    StickyLeastLoaded,
    ProgramScheduling,
}

/// How smg is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Smg {
    /// Its default policy, which goes by the text of the prompt.
    CacheAware,
    /// The same, but a match counts only from half of the prompt on, which a system prompt that all share does not reach.
    CacheAwareHalf,
    /// Its default policy, and sessions stay where their first turn went.
    StickyCacheAware,
    /// Sessions stay where their first turn went, which is the replica of the fewest requests.
    StickyMinLoad,
    /// The same, also while that replica is overloaded by smg's own rule.
    StickyUnprotected,
}

/// Something that turns can be sent through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Variant {
    Envoy(EnvoyPolicy),
    Homing,
    /// With admission by working set.
    HomingAdmission,
    VllmRouter(VllmRouter),
    Smg(Smg),
}

/// All of them, in the order they are listed, by their names on the command line and in the results.
pub(super) const VARIANTS: [(&str, Variant); 15] = [
    ("homing", Variant::Homing),
    ("homing-admission", Variant::HomingAdmission),
    ("envoy-round-robin", Variant::Envoy(EnvoyPolicy::RoundRobin)),
    ("envoy-least-request", Variant::Envoy(EnvoyPolicy::LeastRequest)),
    ("envoy-ring-hash", Variant::Envoy(EnvoyPolicy::RingHash)),
    ("envoy-bounded-ring", Variant::Envoy(EnvoyPolicy::BoundedRingHash)),
    ("envoy-maglev", Variant::Envoy(EnvoyPolicy::Maglev)),
    ("vllm-router-hash", Variant::VllmRouter(VllmRouter::ConsistentHash)),
    ("vllm-router-sticky", Variant::VllmRouter(VllmRouter::StickyLeastLoaded)),
    ("vllm-router-program", Variant::VllmRouter(VllmRouter::ProgramScheduling)),
    ("smg-cache-aware", Variant::Smg(Smg::CacheAware)),
    ("smg-cache-aware-half", Variant::Smg(Smg::CacheAwareHalf)),
    ("smg-sticky", Variant::Smg(Smg::StickyCacheAware)),
    ("smg-sticky-min-load", Variant::Smg(Smg::StickyMinLoad)),
    ("smg-sticky-unprotected", Variant::Smg(Smg::StickyUnprotected)),
];

impl Variant {
    /// Whether it needs the peer routers' packages.
    pub(super) fn is_peer(self) -> bool {
        matches!(self, Self::VllmRouter(_) | Self::Smg(_))
    }
}

/// What variants are started with.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) tools: Tools,
    /// The folder of the peer routers' commands.
    pub(super) peers: PathBuf,
    pub(super) pace: Pace,
    pub(super) calibration: Option<Calibration>,
}

/// A started variant with replicas of its own, whose caches are empty. Everything ends when it is dropped.
#[derive(Debug)]
pub(super) struct Running {
    /// Where the load goes.
    pub(super) url: String,
    pub(super) replicas: Vec<SocketAddr>,
    /// The answers' header that names the replica, of routers that have one.
    pub(super) replica_header: &'static str,
    _parts: Parts,
}

/// What ends with a running variant; routers before their replicas.
#[derive(Debug)]
enum Parts {
    Stack { _stack: Box<Stack> },
    Envoy { _envoy: Envoy, _replicas: Vec<Replica>, _dir: TempDir },
    Router { _router: Process, _replicas: Vec<Replica>, _dir: TempDir },
}

/// A stack's options for replicas of this speed.
pub(super) fn replica_options(pace: Pace, replicas: usize) -> StackOptions {
    let replica_args = vec!["--speed".into(), pace.speed.to_string()];
    StackOptions { replicas, replica_args, concurrency: CONCURRENCY, ..StackOptions::default() }
}

/// Starts a variant and waits until it serves.
pub(super) async fn start(variant: Variant, setting: &Setting) -> Result<Running> {
    let options = replica_options(setting.pace, REPLICAS);
    let replica_header = if matches!(variant, Variant::Smg(_)) { "x-smg-routed-worker-id" } else { "x-homing-replica" };
    let addresses = |replicas: &[Replica]| replicas.iter().map(|(_, address)| *address).collect::<Vec<_>>();
    if matches!(variant, Variant::Homing | Variant::HomingAdmission) {
        let admission =
            if variant == Variant::HomingAdmission { admission_at(setting.pace.speed) } else { json!({ "mode": "off" }) };
        let options = StackOptions { pool: json!({ "admission": admission }), ..options };
        let stack = Stack::start(&setting.tools, options).await?;
        let (url, replicas) = (format!("http://{}", stack.proxy), addresses(&stack.replicas));
        return Ok(Running { url, replicas, replica_header, _parts: Parts::Stack { _stack: Box::new(stack) } });
    }
    let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
    let _replicas = start_replicas(&setting.tools, &options, dir.path()).await?;
    let replicas = addresses(&_replicas);
    if let Variant::Envoy(policy) = variant {
        let config = plain_envoy::config(policy, &replicas)?;
        let _envoy = Envoy::start(&setting.tools.envoy, &config, CONCURRENCY, dir.path()).await?;
        let url = format!("http://{}", _envoy.listener("proxy")?);
        return Ok(Running { url, replicas, replica_header, _parts: Parts::Envoy { _envoy, _replicas, _dir: dir } });
    }
    let (program, own) = command(variant, setting)?;
    // By the environment's Python: the script names the one of the folder it was installed in, which may have been moved.
    let args = std::iter::once(setting.peers.join(program).display().to_string()).chain(own).collect();
    let (_router, url) = start_router(&setting.peers.join("python"), args, &replicas, dir.path()).await?;
    Ok(Running { url, replicas, replica_header, _parts: Parts::Router { _router, _replicas, _dir: dir } })
}

/// Admission with its default times, by the engines' clock.
fn admission_at(speed: f64) -> Value {
    // The longest wait is at least a second.
    let scaled = |seconds: f64, least_ms: f64| json!(format!("{}ms", (1000.0 * seconds / speed).max(least_ms).round()));
    json!({
        "mode": "working_set",
        "min_grace": scaled(2.0, 10.0),
        "max_grace": scaled(20.0, 10.0),
        "max_wait": scaled(120.0, 1000.0),
    })
}

/// The command of a peer router and its own arguments: what its documentation advises for sessions, defaults elsewhere.
fn command(variant: Variant, setting: &Setting) -> Result<(&'static str, Vec<String>)> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    Ok(match variant {
        Variant::VllmRouter(VllmRouter::ConsistentHash) => ("vllm-router", words("--log-level warning --policy consistent_hash")),
        Variant::VllmRouter(VllmRouter::StickyLeastLoaded) => {
            ("vllm-router", words("--log-level warning --policy sticky_least_loaded"))
        }
        Variant::VllmRouter(VllmRouter::ProgramScheduling) => {
            let calibration = setting.calibration.as_ref().context("program scheduling needs a calibration")?;
            let mut args = words("--log-level warning --policy consistent_hash --enable-program-scheduling");
            args.extend(["--program-scheduling-config-json".into(), program_scheduling(calibration, setting.pace).to_string()]);
            ("vllm-router", args)
        }
        Variant::Smg(mode) => {
            let mut args = words("launch --log-level warn --policy cache_aware --prometheus-host 127.0.0.1");
            // It would look for the model's tokenizer on the internet; workers that speak HTTP need none.
            args.push("--disable-tokenizer-autoload".into());
            let interval = (LOAD_MONITOR_SECONDS / setting.pace.speed).ceil();
            args.extend(["--load-monitor-interval".into(), interval.to_string()]);
            let sticky = format!("--sticky-sessions --routing-key-headers {SESSION_HEADER}");
            args.extend(match mode {
                Smg::CacheAware => Vec::new(),
                Smg::CacheAwareHalf => words("--cache-threshold 0.5"),
                Smg::StickyCacheAware => words(&sticky),
                Smg::StickyMinLoad => words(&format!("{sticky} --assignment-mode min_load")),
                Smg::StickyUnprotected => {
                    words(&format!("{sticky} --assignment-mode min_load --disable-worker-overload-protection"))
                }
            });
            ("smg", args)
        }
        Variant::Envoy(_) | Variant::Homing | Variant::HomingAdmission => unreachable!("these are no peer routers"),
    })
}

/// smg's default seconds between its looks at the replicas' load. It takes whole seconds.
const LOAD_MONITOR_SECONDS: f64 = 10.0;

/// The configuration that vllm-router's documentation recommends: sessions opt in by their header, paused ones may resume on any
/// replica, and capacity and costs are those of the engines. Its intervals, with their documented defaults, run by the engines'
/// clock.
fn program_scheduling(calibration: &Calibration, pace: Pace) -> Value {
    let scaled = |seconds: f64| json!(seconds / pace.speed);
    json!({
        "program_scheduling_enable_key": "auto",
        "global_queue": true,
        "token_capacity_per_target": calibration.kv_tokens.floor() as u64,
        "prefill_cost_model": calibration.prefill,
        "decode_throughput_model": calibration.decode,
        "metrics_interval_seconds": scaled(1.0),
        "queue_timeout_seconds": scaled(600.0),
        "force_resume_timeout_seconds": scaled(300.0),
        "paused_retention_ttl_seconds": scaled(1800.0),
        "shared_prefix_freshness_warmup_seconds": scaled(100.0),
        "max_acting_ttl_seconds": scaled(10.0),
    })
}

/// Starts a peer router; its address is a free one, since it cannot choose itself.
async fn start_router(python: &Path, own: Vec<String>, replicas: &[SocketAddr], dir: &Path) -> Result<(Process, String)> {
    let addresses = free_addresses(2)?;
    let (listen, metrics) = (addresses[0], addresses[1]);
    let mut args = own;
    args.extend(["--host".into(), listen.ip().to_string(), "--port".into(), listen.port().to_string()]);
    args.extend(["--prometheus-port".into(), metrics.port().to_string(), "--worker-urls".into()]);
    args.extend(replicas.iter().map(|address| format!("http://{address}")));
    let mut router = Process::start("router", python, &args, dir)?;
    let url = format!("http://{listen}");
    let started = Instant::now();
    while !serves(&url, replicas).await {
        router.check()?;
        ensure!(started.elapsed() < START, "the router did not find its replicas within {START:?}.\n{}", router.tail());
        sleep(Duration::from_millis(50)).await;
    }
    Ok((router, url))
}

/// Whether the router is healthy and lists every replica as healthy too.
async fn serves(url: &str, replicas: &[SocketAddr]) -> bool {
    let get = async |path: &str| reqwest::get(format!("{url}/{path}")).await?.error_for_status();
    let (Ok(_), Ok(workers)) = (get("health").await, get("workers").await) else { return false };
    let listed: Value = workers.json().await.unwrap_or_default();
    let healthy = |worker: &&Value| worker["is_healthy"] == true;
    listed["workers"].as_array().is_some_and(|workers| workers.iter().filter(healthy).count() == replicas.len())
}
