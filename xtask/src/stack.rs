//! Envoy with the filter, the collector and replicas, on free ports of this machine.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::envoy::{Envoy, EnvoyConfig};
use crate::process::Process;
use crate::tools::{self, Tools};
use crate::vllm::{self, Vllm};

/// The pool that the shipped configuration and the stand-in replicas serve.
pub const MODEL: &str = "qwen3-4b";

/// How long the first exchange between the collector and Envoy may take.
const FIRST_SNAPSHOT: Duration = Duration::from_secs(10);

/// What serves the pool.
#[derive(Clone, Debug)]
pub enum ReplicaKind {
    /// Stand-ins, which compute nothing.
    StandIn,
    /// Real engines.
    Vllm(Vllm),
}

/// What to run.
#[derive(Clone, Debug)]
pub struct StackOptions {
    /// What the replicas are.
    pub kind: ReplicaKind,
    /// How many replicas.
    pub replicas: usize,
    /// More arguments for each replica.
    pub replica_args: Vec<String>,
    /// Envoy's worker threads.
    pub concurrency: usize,
    /// The route role's configuration; the shipped one if there is none.
    pub filter_config: Option<Value>,
    /// Keys that replace those of the pool in the route role's configuration.
    pub pool: Value,
    /// Whether the collector runs.
    pub collector: bool,
    /// The control listener's token.
    pub token: String,
    /// The filter's module; the one that is shipped if there is none.
    pub filter: Option<PathBuf>,
    /// Changes to Envoy's configuration, by JSON pointer, after everything else.
    pub edits: Vec<(String, Value)>,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self {
            kind: ReplicaKind::StandIn,
            replicas: 4,
            replica_args: Vec::new(),
            concurrency: 2,
            filter_config: None,
            pool: json!({}),
            collector: true,
            token: String::new(),
            filter: None,
            edits: Vec::new(),
        }
    }
}

/// A replica's process and where it listens.
pub type Replica = (Process, SocketAddr);

/// A running stack. Everything ends when it is dropped.
#[derive(Debug)]
pub struct Stack {
    /// Envoy.
    pub envoy: Envoy,
    /// The collector and where its console is.
    pub collector: Option<(Process, SocketAddr)>,
    /// The replicas and where they listen.
    pub replicas: Vec<Replica>,
    /// Where clients go.
    pub proxy: SocketAddr,
    /// Where the collector goes.
    pub control: SocketAddr,
    /// Configurations and logs.
    pub dir: TempDir,
    tools: Tools,
    options: StackOptions,
}

impl Stack {
    /// Starts replicas, Envoy and the collector, in this order.
    ///
    /// # Errors
    /// If one of them does not start; the message has its last words.
    pub async fn start(tools: &Tools, options: StackOptions) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
        let replicas = start_replicas(tools, &options, dir.path()).await?;
        let envoy = start_envoy(tools, &options, &replicas, dir.path()).await?;
        let (proxy, control) = (envoy.listener("proxy")?, envoy.listener("control")?);
        let mut stack = Self { envoy, collector: None, replicas, proxy, control, dir, tools: tools.clone(), options };
        if stack.options.collector {
            stack.start_collector().await?;
        }
        Ok(stack)
    }

    /// Starts Envoy and the collector again with other keys for the pool; the replicas and their caches stay.
    ///
    /// # Errors
    /// If one of them does not start.
    pub async fn restart_envoy(&mut self, pool: Value) -> Result<()> {
        self.collector = None;
        self.options.pool = pool;
        self.envoy = start_envoy(&self.tools, &self.options, &self.replicas, self.dir.path()).await?;
        (self.proxy, self.control) = (self.envoy.listener("proxy")?, self.envoy.listener("control")?);
        if self.options.collector {
            self.start_collector().await?;
        }
        Ok(())
    }

    /// Starts Envoy again where it was, as it was; the one before must have ended.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn revive_envoy(&mut self) -> Result<()> {
        let endpoints: Vec<_> = self.replicas.iter().map(|(_, address)| *address).collect();
        let mut config = envoy_config(&self.tools, &self.options, &endpoints)?;
        config.set_listener("proxy", self.proxy);
        config.set_listener("control", self.control);
        self.envoy = Envoy::start(&self.tools.envoy, &config, self.options.concurrency, self.dir.path()).await?;
        Ok(())
    }

    /// Starts the collector and waits until Envoy has a snapshot of it.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_collector(&mut self) -> Result<()> {
        self.revive_collector().await?;
        let (_, console) = self.collector.as_ref().context("the collector")?;
        self.wait_for_snapshot(*console).await
    }

    /// Starts the collector, where it was if it has run before, and waits for no Envoy.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn revive_collector(&mut self) -> Result<()> {
        let listen = self.collector.as_ref().map_or((Ipv4Addr::LOCALHOST, 0).into(), |(_, address)| *address);
        let replicas: Vec<_> = self.replicas.iter().map(|(_, address)| json!({ "address": address.to_string() })).collect();
        let mut envoy = json!({ "url": format!("http://{}", self.control) });
        if !self.options.token.is_empty() {
            envoy["token"] = json!(self.options.token);
        }
        let config = json!({
            "listen": listen.to_string(),
            "envoys": [envoy],
            "pools": [{ "cluster": MODEL, "max_num_seqs": 32, "replicas": replicas }],
        });
        let file = self.dir.path().join("collector.yaml");
        // YAML is a superset of JSON.
        fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
        let args = ["run".to_owned(), file.display().to_string(), "--ready-json".to_owned()];
        let (process, ready) = Process::start_ready("collector", &self.tools.collector, &args, self.dir.path()).await?;
        self.collector = Some((process, address(&ready)?));
        Ok(())
    }

    /// Waits until Envoy has its first snapshot; until then the filter knows no replica and passes.
    async fn wait_for_snapshot(&self, console: SocketAddr) -> Result<()> {
        let started = Instant::now();
        loop {
            let status: Value = reqwest::get(format!("http://{console}/api/v1/pools")).await?.json().await?;
            let envoy = &status["envoys"][0];
            if envoy["answered"].as_u64() > Some(0) {
                return Ok(());
            }
            ensure!(started.elapsed() < FIRST_SNAPSHOT, "Envoy took no snapshot within {FIRST_SNAPSHOT:?}: {}", envoy["problem"]);
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Starts a replica again where it was.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn restart_replica(&mut self, index: usize) -> Result<()> {
        let (process, address) = &mut self.replicas[index];
        process.kill().await?;
        let address = *address;
        self.replicas[index] = match &self.options.kind {
            ReplicaKind::StandIn => start_stand_in(&self.tools, &self.options, index + 1, address, self.dir.path()).await?,
            ReplicaKind::Vllm(vllm) => {
                let mut server = vllm.launch(index + 1, address, &self.options.replica_args, self.dir.path())?;
                vllm::wait_until_healthy(std::slice::from_mut(&mut server)).await?;
                server
            }
        };
        Ok(())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // All at once; one after the other they would take as many times as long.
        self.replicas.iter_mut().for_each(|(process, _)| process.ask_to_end());
    }
}

async fn start_envoy(tools: &Tools, options: &StackOptions, replicas: &[Replica], dir: &Path) -> Result<Envoy> {
    let endpoints: Vec<_> = replicas.iter().map(|(_, address)| *address).collect();
    let config = envoy_config(tools, options, &endpoints)?;
    Envoy::start(&tools.envoy, &config, options.concurrency, dir).await
}

/// Starts a stack's replicas alone.
///
/// # Errors
/// If one of them does not start; the message has its last words.
pub async fn start_replicas(tools: &Tools, options: &StackOptions, dir: &Path) -> Result<Vec<Replica>> {
    let mut replicas = Vec::new();
    match &options.kind {
        ReplicaKind::StandIn => {
            for number in 1..=options.replicas {
                replicas.push(start_stand_in(tools, options, number, (Ipv4Addr::LOCALHOST, 0).into(), dir).await?);
            }
        }
        ReplicaKind::Vllm(vllm) => {
            for (number, address) in (1..).zip(vllm::free_addresses(options.replicas)?) {
                replicas.push(vllm.launch(number, address, &options.replica_args, dir)?);
            }
            vllm::wait_until_healthy(&mut replicas).await?;
        }
    }
    Ok(replicas)
}

/// Starts one stand-in.
pub(crate) async fn start_stand_in(
    tools: &Tools,
    options: &StackOptions,
    number: usize,
    listen: SocketAddr,
    dir: &Path,
) -> Result<Replica> {
    let own = ["replica", "--ready-json", "--listen", &listen.to_string(), "--model", MODEL].map(str::to_owned);
    let args: Vec<_> = own.into_iter().chain(options.replica_args.iter().cloned()).collect();
    let (process, ready) = Process::start_ready(&format!("replica-{number}"), &tools.bench, &args, dir).await?;
    Ok((process, address(&ready)?))
}

pub(crate) fn address(ready: &Value) -> Result<SocketAddr> {
    ready["address"].as_str().and_then(|text| text.parse().ok()).with_context(|| format!("no address in {ready}"))
}

/// The shipped configuration, with this stack's ports, endpoints, module and filter configuration.
pub(crate) fn envoy_config(tools: &Tools, options: &StackOptions, endpoints: &[SocketAddr]) -> Result<EnvoyConfig> {
    let mut config = EnvoyConfig::read(&tools::root().join("envoy/standalone.yaml"))?;
    config.use_free_ports();
    config.set_endpoints(MODEL, endpoints);
    config.set_filter(options.filter.as_ref().unwrap_or(&tools.filter));
    let control = config.filter_config("control").context("the control filter")?;
    control["token"] = json!(options.token);
    let route = config.filter_config("route").context("the route filter")?;
    if let Some(own) = &options.filter_config {
        *route = own.clone();
    }
    if route.get("debug_headers").is_none() {
        route["debug_headers"] = json!(true);
    }
    if let (Some(pool), Some(changes)) = (route["pools"][0].as_object_mut(), options.pool.as_object()) {
        pool.extend(changes.clone());
    }
    for (pointer, value) in &options.edits {
        config.edit(pointer, value.clone())?;
    }
    Ok(config)
}
