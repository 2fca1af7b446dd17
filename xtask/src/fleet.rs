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
use crate::stack::{MODEL, Replica, StackOptions, address, envoy_config, start_replicas, start_stand_in};
use crate::tools::{self, Tools};
use crate::vllm::free_addresses;
use crate::wait::within;

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
    /// Where collectors reach Redis, if not at its own address.
    pub redis_by: Option<SocketAddr>,
    /// Keys that replace those of the route role's configuration, for the first Envoy, the second and so on.
    pub route: Vec<Value>,
    /// Whether Envoys read their listeners from a file ([`Proxy::write_listeners`]).
    pub listeners_from_file: bool,
    /// The token of the collectors' API; none changes anything if it is empty.
    pub api_token: String,
    /// Arguments of Envoys besides the usual ones.
    pub envoy_args: Vec<String>,
}

impl Default for FleetOptions {
    fn default() -> Self {
        let stack = StackOptions { concurrency: 1, ..StackOptions::default() };
        Self {
            stack,
            envoys: 3,
            collectors: 2,
            redis: false,
            redis_by: None,
            route: Vec::new(),
            listeners_from_file: false,
            api_token: String::new(),
            envoy_args: vec!["--disable-hot-restart".to_owned()],
        }
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
    /// Its configuration, and its logs.
    pub dir: PathBuf,
    config: EnvoyConfig,
    /// Where its listeners are, if Envoy reads them from a file, and what they are.
    listeners: Option<(PathBuf, EnvoyConfig)>,
}

impl Proxy {
    /// Gives Envoy its listeners again, with a change to them.
    ///
    /// # Errors
    /// If it does not read them from a file, or that cannot be written.
    pub fn write_listeners(&self, change: impl FnOnce(&mut EnvoyConfig)) -> Result<()> {
        let (file, config) = self.listeners.as_ref().context("this Envoy reads its listeners from its configuration")?;
        let mut config = config.clone();
        change(&mut config);
        config.write_listeners(file)
    }

    /// The admin interface.
    ///
    /// # Errors
    /// If it does not run.
    pub fn admin(&self) -> Result<SocketAddr> {
        Ok(self.envoy.as_ref().context("this Envoy does not run")?.admin)
    }
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
    options: FleetOptions,
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
            if let Some(changes) = options.route.get(number - 1).and_then(Value::as_object) {
                let route = config.filter_config("route").and_then(Value::as_object_mut).context("the route filter")?;
                route.extend(changes.clone());
            }
            let dir = dir.path().join(format!("envoy-{number}"));
            fs::create_dir(&dir)?;
            let listeners = options.listeners_from_file.then(|| (dir.join("listeners.json"), config.clone()));
            if let Some((file, _)) = &listeners {
                config.move_listeners(file)?;
            }
            proxies.push(Proxy { envoy: None, proxy, control, dir, config, listeners });
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
            if !options.api_token.is_empty() {
                config["api"] = json!({ "token": options.api_token });
            }
            if let Some((_, address)) = &store {
                let address = options.redis_by.unwrap_or(*address);
                config["affinity"] = json!({ "store": format!("redis://{address}") });
            }
            let name = format!("collector-{number}");
            let file = dir.path().join(&name).with_extension("yaml");
            // YAML is a superset of JSON.
            fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
            collectors.push(Collector { process: None, console, file, name });
        }
        let (tools, own_options) = (tools.clone(), options.clone());
        let mut fleet = Self { proxies, collectors, redis: None, replicas, dir, store, tools, options: own_options };
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
        self.proxies[index].envoy = Some(self.another_envoy(index, &self.options.envoy_args).await?);
        Ok(())
    }

    /// Starts an Envoy in the place of one that may still run, with these arguments besides the usual ones.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn another_envoy(&self, index: usize, args: &[String]) -> Result<Envoy> {
        let (proxy, concurrency) = (&self.proxies[index], self.options.stack.concurrency);
        Envoy::start_with(&self.tools.envoy, &proxy.config, concurrency, &proxy.dir, args).await
    }

    /// Starts a stand-in where it was; the one before may still run.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn restart_replica(&mut self, index: usize) -> Result<()> {
        let (process, address) = &mut self.replicas[index];
        process.kill().await?;
        let address = *address;
        self.replicas[index] = start_stand_in(&self.tools, &self.options.stack, index + 1, address, self.dir.path()).await?;
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
        within(READY, &format!("Envoy {index} to be ready"), async || Ok(self.is_ready(index).await)).await
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
