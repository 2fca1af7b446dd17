//! Several Envoys and collectors, with Redis if it is asked for, on free ports of this machine. Each can be killed and started again where
//! it was.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::envoy::{Envoy, EnvoyConfig};
use crate::process::Process;
use crate::stack::{MODEL, Replica, StackOptions, address, envoy_config, start_replicas};
use crate::tools::{self, Tools};
use crate::vllm::free_addresses;

/// How long an Envoy may take until it is ready.
const READY: Duration = Duration::from_secs(20);

/// Where an Envoy's two listeners stand in the configuration.
const LISTENERS: &str = "/static_resources/listeners";

/// What to run.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// The replicas and every Envoy.
    pub stack: StackOptions,
    /// How many Envoys.
    pub envoys: usize,
    /// How many collectors.
    pub collectors: usize,
    /// Whether the collectors share a Redis.
    pub redis: bool,
}

impl Default for FleetOptions {
    fn default() -> Self {
        let stack = StackOptions { concurrency: 1, ..StackOptions::default() };
        Self { stack, envoys: 3, collectors: 2, redis: false }
    }
}

/// One Envoy and where it is, whether or not it runs.
#[derive(Debug)]
pub struct Proxy {
    /// Envoy, while it runs.
    pub envoy: Option<Envoy>,
    /// Where clients go.
    pub proxy: SocketAddr,
    /// Where collectors go.
    pub control: SocketAddr,
    config: EnvoyConfig,
    dir: PathBuf,
}

/// One collector and where it is.
#[derive(Debug)]
pub struct Collector {
    /// The collector, while it runs.
    pub process: Option<Process>,
    /// Where its API is.
    pub console: SocketAddr,
    file: PathBuf,
    name: String,
}

/// A running fleet. Everything ends when it is dropped.
#[derive(Debug)]
pub struct FleetStack {
    /// The Envoys.
    pub proxies: Vec<Proxy>,
    /// The collectors.
    pub collectors: Vec<Collector>,
    /// Redis, while it runs.
    pub redis: Option<Process>,
    /// The replicas and where they listen.
    pub replicas: Vec<Replica>,
    /// Configurations and logs.
    pub dir: TempDir,
    store: Option<(PathBuf, SocketAddr)>,
    tools: Tools,
    concurrency: usize,
}

impl FleetStack {
    /// Starts everything, and waits until every Envoy is ready.
    ///
    /// # Errors
    /// If something does not start; the message has its last words.
    pub async fn start(tools: &Tools, options: &FleetOptions) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("homing-fleet-").tempdir()?;
        let replicas = start_replicas(tools, &options.stack, dir.path()).await?;
        let endpoints: Vec<_> = replicas.iter().map(|(_, address)| *address).collect();
        let mut ports = free_addresses(2 * options.envoys + options.collectors + 1)?.into_iter();
        let mut port = || ports.next().context("a free port");
        let store = if options.redis { Some((tools::redis()?, port()?)) } else { None };

        let mut proxies = Vec::new();
        for number in 1..=options.envoys {
            let (proxy, control) = (port()?, port()?);
            let mut config = envoy_config(tools, &options.stack, &endpoints)?;
            for (index, address) in [proxy, control].into_iter().enumerate() {
                let address = json!({ "address": address.ip().to_string(), "port_value": address.port() });
                config.edit(&format!("{LISTENERS}/{index}/address"), json!({ "socket_address": address }))?;
            }
            let dir = dir.path().join(format!("envoy-{number}"));
            fs::create_dir(&dir)?;
            proxies.push(Proxy { envoy: None, proxy, control, config, dir });
        }

        let envoys: Vec<_> = proxies.iter().map(|proxy| json!({ "url": format!("http://{}", proxy.control) })).collect();
        let endpoints: Vec<_> = endpoints.iter().map(|address| json!({ "address": address.to_string() })).collect();
        let mut collectors = Vec::new();
        for number in 1..=options.collectors {
            let console = port()?;
            let mut config = json!({
                "listen": console.to_string(),
                "envoys": envoys,
                "pools": [{ "cluster": MODEL, "max_num_seqs": 32, "replicas": endpoints }],
            });
            if let Some((_, address)) = &store {
                config["affinity"] = json!({ "store": format!("redis://{address}") });
            }
            let name = format!("collector-{number}");
            let file = dir.path().join(&name).with_extension("yaml");
            // YAML is a superset of JSON.
            fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
            collectors.push(Collector { process: None, console, file, name });
        }
        let (tools, concurrency) = (tools.clone(), options.stack.concurrency);
        let mut fleet = Self { proxies, collectors, redis: None, replicas, dir, store, tools, concurrency };
        fleet.start_redis().await?;
        for index in 0..options.envoys {
            fleet.start_envoy(index).await?;
        }
        for index in 0..options.collectors {
            fleet.start_collector(index).await?;
        }
        for index in 0..options.envoys {
            fleet.until_ready(index).await?;
        }
        Ok(fleet)
    }

    /// Starts Redis, if the fleet has one, with nothing in it.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_redis(&mut self) -> Result<()> {
        let Some((binary, address)) = &self.store else { return Ok(()) };
        let (ip, port) = (address.ip().to_string(), address.port().to_string());
        let args = ["--bind", &ip, "--port", &port, "--save", "", "--appendonly", "no"].map(str::to_owned);
        let mut process = Process::start("redis", binary, &args, self.dir.path())?;
        let started = Instant::now();
        while tokio::net::TcpStream::connect(address).await.is_err() {
            process.check()?;
            ensure!(started.elapsed() < READY, "Redis did not start.\n{}", process.tail());
            sleep(Duration::from_millis(20)).await;
        }
        self.redis = Some(process);
        Ok(())
    }

    /// Where Redis is, if the fleet has one.
    pub fn store(&self) -> Option<SocketAddr> {
        self.store.as_ref().map(|(_, address)| *address)
    }

    /// Starts an Envoy where it was.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_envoy(&mut self, index: usize) -> Result<()> {
        let proxy = &mut self.proxies[index];
        proxy.envoy = Some(Envoy::start(&self.tools.envoy, &proxy.config, self.concurrency, &proxy.dir).await?);
        Ok(())
    }

    /// Starts a collector where it was.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_collector(&mut self, index: usize) -> Result<()> {
        let collector = &mut self.collectors[index];
        let args = ["run".to_owned(), collector.file.display().to_string(), "--ready-json".to_owned()];
        let (process, ready) = Process::start_ready(&collector.name, &self.tools.collector, &args, self.dir.path()).await?;
        ensure!(address(&ready)? == collector.console, "it listens elsewhere");
        collector.process = Some(process);
        Ok(())
    }

    /// Whether an Envoy says that it is ready.
    pub async fn is_ready(&self, index: usize) -> bool {
        let url = format!("http://{}{}", self.proxies[index].control, homing_routing::sync::READY_PATH);
        reqwest::get(url).await.is_ok_and(|answer| answer.status().is_success())
    }

    /// Waits until it does.
    ///
    /// # Errors
    /// If it never does.
    pub async fn until_ready(&self, index: usize) -> Result<()> {
        let started = Instant::now();
        while !self.is_ready(index).await {
            ensure!(started.elapsed() < READY, "Envoy {index} is not ready after {READY:?}");
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// What a collector's API says.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn status(&self, collector: usize) -> Result<Value> {
        let url = format!("http://{}/api/v1/pools", self.collectors[collector].console);
        Ok(reqwest::get(url).await?.json().await?)
    }
}
