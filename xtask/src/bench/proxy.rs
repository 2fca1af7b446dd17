//! `cargo xtask bench proxy`: what the filter costs, beside a plain Envoy.
//!
//! One Envoy with one worker has a listener for each subject, all made of the shipped one. `homing-bench` sends the same requests
//! through each in turn and measures; here is what it measures them on, and the check that every request was a turn at home.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use homing_routing::replica::ReplicaName;
use homing_routing::sync::{
    OutcomeCounts, Peers, PoolReport, ReplicaReport, ReplicaState, SYNC_PATH, SYNC_VERSION, SyncAnswer, SyncRequest,
};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use crate::envoy::{Envoy, EnvoyConfig};
use crate::process::Process;
use crate::stack::MODEL;
use crate::tools::{self, Tools, say};

/// The cluster of the subjects without Homing: the same endpoints under the fallback policy alone.
const PLAIN_CLUSTER: &str = "plain";

/// Conversations the requests belong to. Each is known twice: by its id in a header, and by its id in a body.
const CONVERSATIONS: u64 = 4096;

/// As often as a collector pushes.
const PUSH_INTERVAL: Duration = Duration::from_millis(250);

/// What to measure.
#[derive(Debug, Args)]
pub struct ProxyOptions {
    /// How often each kind of request goes to each subject.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds each time.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Sizes of the requests' bodies in KB.
    #[arg(long, value_delimiter = ',', default_value = "1,64,256")]
    body_kb: Vec<usize>,
    /// One more subject: Homing with the filter from this file, such as an earlier build. May be given several times.
    #[arg(long = "filter", value_name = "NAME=FILE", value_parser = named_file)]
    filters: Vec<(String, PathBuf)>,
    /// Keep everything running after the measurement until Ctrl-C, and print where it listens: for a profiler.
    #[arg(long)]
    keep: bool,
    /// Print the figures as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("give NAME=FILE")?;
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    if path.is_file() { Ok((name.to_owned(), path)) } else { Err(format!("{} is no file", path.display())) }
}

/// What stands in a subject's listener.
#[derive(Clone, Debug)]
enum Setup {
    /// Nothing of Homing.
    Plain,
    /// Nothing of Homing, and a wasm filter from this file that needs no configuration.
    OtherFilter(PathBuf),
    /// Homing as it is shipped, with the filter from this file.
    Homing(PathBuf),
}

/// A listener that is measured. The first one is what the others are compared with.
#[derive(Clone, Debug)]
struct Subject {
    name: String,
    setup: Setup,
}

impl Subject {
    fn control(&self) -> String {
        format!("control-{}", self.name)
    }
}

/// Measures what the filter costs.
///
/// # Errors
/// If something cannot be built or started, a request fails, or a request was no turn at home.
pub async fn proxy(options: ProxyOptions) -> Result<()> {
    // Caught, so that everything is stopped in order.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        done = run(&options) => done,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

async fn run(options: &ProxyOptions) -> Result<()> {
    let tools = Tools::ensure()?;
    let mut subjects = vec![
        Subject { name: "plain".into(), setup: Setup::Plain },
        Subject { name: "empty".into(), setup: Setup::OtherFilter(tools::build_empty_filter()?) },
        Subject { name: "homing".into(), setup: Setup::Homing(tools.filter.clone()) },
    ];
    for (name, file) in &options.filters {
        ensure!(subjects.iter().all(|subject| subject.name != *name), "the name `{name}` is taken: give --filter another one");
        subjects.push(Subject { name: name.clone(), setup: Setup::Homing(file.clone()) });
    }

    let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
    let args = ["upstreams", "--ready-json"].map(str::to_owned);
    let (_upstreams, ready) = Process::start_ready("upstreams", &tools.bench, &args, dir.path()).await?;
    let upstreams: Vec<SocketAddr> = serde_json::from_value(ready["addresses"].clone()).context("the upstreams' addresses")?;
    let config = envoy_config(&subjects, &upstreams)?;
    let envoy = Envoy::start(&tools.envoy, &config, 1, dir.path()).await?;

    let mut controls = Vec::new();
    for subject in subjects.iter().filter(|subject| matches!(subject.setup, Setup::Homing(_))) {
        controls.push(envoy.listener(&subject.control())?);
    }
    let mut snapshots = Snapshots::new(controls, &upstreams)?;
    snapshots.push().await?;
    say("measuring");
    tokio::select! {
        measured = measure(options, &tools, &subjects, &envoy) => measured?,
        failed = snapshots.keep_pushing() => failed?,
    }
    let answers = snapshots.push().await?;
    ensure_at_home(&answers)?;
    if options.keep {
        say(&format!("Envoy is process {}, its admin interface {}; Ctrl-C stops everything", pid(&envoy)?, envoy.admin));
        for subject in &subjects {
            say(&format!("{} listens on {}", subject.name, envoy.listener(&subject.name)?));
        }
        snapshots.keep_pushing().await?;
    }
    Ok(())
}

fn pid(envoy: &Envoy) -> Result<u32> {
    envoy.process.id().with_context(|| format!("Envoy has ended.\n{}", envoy.process.tail()))
}

async fn measure(options: &ProxyOptions, tools: &Tools, subjects: &[Subject], envoy: &Envoy) -> Result<()> {
    let mut command = Command::new(&tools.bench);
    command.args(["proxy", "--progress", "--pid", &pid(envoy)?.to_string()]);
    command.args(["--rounds", &options.rounds.to_string(), "--seconds", &options.seconds.to_string()]);
    command.args(["--conversations", &CONVERSATIONS.to_string()]);
    command.args(["--body-kb", &options.body_kb.iter().map(usize::to_string).collect::<Vec<_>>().join(",")]);
    for subject in subjects {
        command.args(["--subject", &format!("{}={}", subject.name, envoy.listener(&subject.name)?)]);
    }
    if options.json {
        command.arg("--json");
    }
    let status = command.stdin(Stdio::null()).kill_on_drop(true).status().await.context("starting the measurement")?;
    ensure!(status.success(), "the measurement failed ({status}). Envoy said last:\n{}", envoy.process.tail());
    Ok(())
}

/// Fails unless each filter placed each conversation once, and every other request was a turn served at its home: anything else
/// would be another measurement than this one.
fn ensure_at_home(answers: &[SyncAnswer]) -> Result<()> {
    // Counters are Envoy's own, so each filter answers with those of all.
    let replicas: Vec<_> = answers.first().iter().flat_map(|answer| &answer.pools).flat_map(|pool| &pool.replicas).collect();
    let sum = |of: fn(&OutcomeCounts) -> u64| replicas.iter().map(|replica| of(&replica.requests)).sum::<u64>();
    let (sticky, placed) = (sum(|counts| counts.sticky), sum(|counts| counts.placed));
    let others = sum(|counts| counts.spilled + counts.pinned + counts.unkeyed + counts.rehomed + counts.passed);
    say(&format!("Homing placed {placed} conversations, served {sticky} turns at home, and {others} requests otherwise"));
    let expected = 2 * CONVERSATIONS * u64::try_from(answers.len())?;
    ensure!(
        sticky > 0 && others == 0 && placed <= expected,
        "this is no measurement of turns at home: {expected} conversations were to be placed, and everything else to be served at home"
    );
    Ok(())
}

/// The shipped configuration with a listener for each subject in place of its one.
fn envoy_config(subjects: &[Subject], upstreams: &[SocketAddr]) -> Result<EnvoyConfig> {
    let mut config = EnvoyConfig::read(&tools::root().join("envoy/standalone.yaml"))?;
    let resources = &mut config.0["static_resources"];
    let named = |list: &Value, name: &str| {
        let found = list.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == name));
        found.cloned().with_context(|| format!("the shipped configuration has no `{name}`"))
    };
    let (proxy, control) = (named(&resources["listeners"], "proxy")?, named(&resources["listeners"], "control")?);

    let mut plain = named(&resources["clusters"], MODEL)?;
    let policy = "/load_balancing_policy/policies/0/typed_extension_config/typed_config/fallback_policy";
    plain["load_balancing_policy"] = plain.pointer(policy).cloned().context("the cluster's fallback policy")?;
    plain["name"] = json!(PLAIN_CLUSTER);
    plain["load_assignment"]["cluster_name"] = json!(PLAIN_CLUSTER);
    resources["clusters"].as_array_mut().context("the clusters")?.push(plain);

    let mut listeners = Vec::new();
    for subject in subjects {
        listeners.push(listener(&proxy, &subject.name, subject, &subject.name)?);
        if matches!(subject.setup, Setup::Homing(_)) {
            listeners.push(listener(&control, &subject.control(), subject, &subject.name)?);
        }
    }
    resources["listeners"] = json!(listeners);
    config.set_endpoints(MODEL, upstreams);
    config.set_endpoints(PLAIN_CLUSTER, upstreams);
    config.use_free_ports();
    Ok(config)
}

/// A shipped listener, changed to what the subject stands for.
fn listener(shipped: &Value, name: &str, subject: &Subject, vm_id: &str) -> Result<Value> {
    let mut listener = shipped.clone();
    listener["name"] = json!(name);
    let manager = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").context("the connection manager")?;
    manager["stat_prefix"] = json!(name);
    let filters = manager["http_filters"].as_array_mut().context("the HTTP filters")?;
    let wasm = filters.iter_mut().find(|filter| filter["name"] == "homing").context("the homing filter")?;
    let own_wasm = |wasm: &mut Value, file: &Path| {
        let vm = &mut wasm["typed_config"]["config"]["vm_config"];
        vm["vm_id"] = json!(vm_id);
        vm["code"]["local"]["filename"] = json!(file);
    };
    match &subject.setup {
        Setup::Homing(file) => {
            own_wasm(wasm, file);
            return Ok(listener);
        }
        Setup::OtherFilter(file) => {
            own_wasm(wasm, file);
            wasm["name"] = json!(name);
            wasm["typed_config"]["config"]["name"] = json!(name);
            if let Some(config) = wasm["typed_config"]["config"].as_object_mut() {
                config.remove("configuration");
            }
            // The other filters are Homing's too, all but the last, which is the router.
            let wasm = wasm.clone();
            filters.drain(..filters.len().saturating_sub(1));
            filters.insert(0, wasm);
        }
        Setup::Plain => drop(filters.drain(..filters.len().saturating_sub(1))),
    }
    let cluster = manager.pointer_mut("/route_config/virtual_hosts/0/routes/0/route/cluster").context("the route's cluster")?;
    *cluster = json!(PLAIN_CLUSTER);
    Ok(listener)
}

/// What a collector would push: replicas that are ready and have nothing to do.
struct Snapshots {
    client: reqwest::Client,
    controls: Vec<SocketAddr>,
    request: SyncRequest,
}

impl Snapshots {
    fn new(controls: Vec<SocketAddr>, upstreams: &[SocketAddr]) -> Result<Self> {
        let replica = |address: &SocketAddr| ReplicaReport {
            replica: ReplicaName { address: *address, rank: None },
            state: ReplicaState::Ready,
            running: 0,
            waiting: 0,
            kv_usage: 0.0,
            cache_tokens: 0,
            max_num_seqs: 32,
            prefix_hit_rate: None,
            age_ms: Some(0),
            peers: Peers::default(),
        };
        let generation = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
        let pools = vec![PoolReport {
            cluster: MODEL.to_owned(),
            bytes_per_token: None,
            shared_tokens: None,
            replicas: upstreams.iter().map(replica).collect(),
        }];
        let request = SyncRequest { version: SYNC_VERSION, generation, sequence: 0, pools, ..SyncRequest::default() };
        Ok(Self { client: reqwest::Client::new(), controls, request })
    }

    /// Pushes the next snapshot to every filter.
    async fn push(&mut self) -> Result<Vec<SyncAnswer>> {
        self.request.sequence += 1;
        let mut answers = Vec::new();
        for control in &self.controls {
            let answer = self.client.post(format!("http://{control}{SYNC_PATH}")).json(&self.request).send().await?;
            answers.push(answer.error_for_status().context("the filter refused a snapshot")?.json().await?);
        }
        Ok(answers)
    }

    /// Pushes until that fails.
    async fn keep_pushing(&mut self) -> Result<()> {
        loop {
            sleep(PUSH_INTERVAL).await;
            self.push().await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_differ_only_in_what_they_stand_for() {
        let subject = |name: &str, setup| Subject { name: name.into(), setup };
        let subjects = [
            subject("plain", Setup::Plain),
            subject("empty", Setup::OtherFilter("/empty.wasm".into())),
            subject("homing", Setup::Homing("/homing.wasm".into())),
        ];
        let mut config = envoy_config(&subjects, &["127.0.0.1:9".parse().expect("an address")]).expect("a configuration");
        let managers = config.connection_managers();
        let chains: Vec<(&str, Vec<&str>)> = managers
            .iter()
            .map(|(name, manager)| {
                let filters = manager["http_filters"].as_array().expect("filters");
                (name.as_str(), filters.iter().filter_map(|filter| filter["name"].as_str()).collect())
            })
            .collect();
        let (router, mutation) = ("envoy.filters.http.router", "envoy.filters.http.header_mutation");
        let expected = [
            ("plain", vec![router]),
            ("empty", vec!["empty", router]),
            ("homing", vec![mutation, "homing", "envoy.filters.http.header_to_metadata", router]),
            ("control-homing", vec!["homing", router]),
        ];
        assert_eq!(chains, expected);

        // Without filters, names and clusters, the subjects' listeners are the same.
        let rest = |manager: &Value| {
            let mut manager = manager.clone();
            manager["http_filters"] = Value::Null;
            manager["stat_prefix"] = Value::Null;
            manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = Value::Null;
            manager
        };
        assert!(managers[..3].iter().all(|(_, manager)| rest(manager) == rest(managers[0].1)));
        let cluster = |at: usize| managers[at].1["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"].clone();
        assert_eq!([cluster(0), cluster(1), cluster(2)], [PLAIN_CLUSTER, PLAIN_CLUSTER, MODEL]);
    }
}
