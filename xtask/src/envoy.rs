//! Runs Envoy with one of the shipped configurations, changed only where a test has to: ports, endpoints and file names.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::process::Process;

/// How long Envoy has to start.
const START: Duration = Duration::from_secs(30);

/// An Envoy configuration as a tree.
#[derive(Clone, Debug)]
pub struct EnvoyConfig(pub Value);

impl EnvoyConfig {
    /// Reads a shipped configuration.
    ///
    /// # Errors
    /// If it is no YAML.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Ok(Self(serde_saphyr::from_str(&text).with_context(|| format!("{} is no YAML", path.display()))?))
    }

    /// Lets every listener and the admin interface take a free port of the loopback interface.
    pub fn use_free_ports(&mut self) {
        let address = json!({ "socket_address": { "address": "127.0.0.1", "port_value": 0 } });
        self.0["admin"]["address"] = address.clone();
        for listener in list(&mut self.0["static_resources"]["listeners"]) {
            listener["address"] = address.clone();
        }
    }

    /// Lets a listener take this address.
    pub fn set_listener(&mut self, name: &str, at: SocketAddr) {
        for listener in list(&mut self.0["static_resources"]["listeners"]) {
            if listener["name"] == name {
                listener["address"] = json!({ "socket_address": { "address": at.ip().to_string(), "port_value": at.port() } });
            }
        }
    }

    /// Replaces a cluster's endpoints.
    pub fn set_endpoints(&mut self, cluster: &str, endpoints: &[SocketAddr]) {
        let endpoint = |address: &SocketAddr| {
            let address = json!({ "address": address.ip().to_string(), "port_value": address.port() });
            json!({ "endpoint": { "address": { "socket_address": address } } })
        };
        let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
        for entry in list(&mut self.0["static_resources"]["clusters"]) {
            if entry["name"] == cluster {
                entry["load_assignment"]["endpoints"] = json!([{ "lb_endpoints": endpoints }]);
            }
        }
    }

    /// Uses this file as the filter's module.
    pub fn set_filter(&mut self, path: &Path) {
        for plugin in self.plugins() {
            plugin["vm_config"]["code"]["local"]["filename"] = json!(path);
        }
    }

    /// The configuration of the filter with this role.
    pub fn filter_config(&mut self, role: &str) -> Option<&mut Value> {
        self.plugins().into_iter().map(|plugin| &mut plugin["configuration"]["value"]).find(|config| config["role"] == role)
    }

    /// Moves the listeners into a file, which Envoy reads again whenever another one takes its place.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn move_listeners(&mut self, file: &Path) -> Result<()> {
        self.write_listeners(file)?;
        self.0["static_resources"]["listeners"] = json!([]);
        self.0["dynamic_resources"] = json!({ "lds_config": { "path_config_source": { "path": file } } });
        self.0["node"] = json!({ "id": "envoy", "cluster": "envoy" });
        Ok(())
    }

    /// Puts the listeners into a file as Envoy's listener discovery reads it, by a rename.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_listeners(&self, file: &Path) -> Result<()> {
        let mut listeners = self.0["static_resources"]["listeners"].clone();
        for listener in list(&mut listeners) {
            listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        }
        let new = file.with_extension("new");
        fs::write(&new, serde_json::to_vec(&json!({ "resources": listeners }))?)?;
        fs::rename(&new, file).with_context(|| format!("writing {}", file.display()))
    }

    /// The HTTP connection managers, each with its listener's name.
    pub fn connection_managers(&mut self) -> Vec<(String, &mut Value)> {
        let mut found = Vec::new();
        for listener in list(&mut self.0["static_resources"]["listeners"]) {
            let name = listener["name"].as_str().unwrap_or_default().to_owned();
            for chain in list(&mut listener["filter_chains"]) {
                for filter in list(&mut chain["filters"]) {
                    found.push((name.clone(), &mut filter["typed_config"]));
                }
            }
        }
        found
    }

    /// Sets a value by JSON pointer, a new key too.
    ///
    /// # Errors
    /// If its parent is not there.
    pub fn edit(&mut self, pointer: &str, value: Value) -> Result<()> {
        let (parent, key) = pointer.rsplit_once('/').context("a JSON pointer")?;
        let parent = self.0.pointer_mut(parent).with_context(|| format!("the configuration has no {parent}"))?;
        match key.parse::<usize>() {
            Ok(index) if parent.is_array() => parent[index] = value,
            _ => parent[key] = value,
        }
        Ok(())
    }

    fn plugins(&mut self) -> Vec<&mut Value> {
        let managers = self.connection_managers().into_iter();
        let filters = managers.flat_map(|(_, manager)| list(&mut manager["http_filters"]));
        filters.filter(|filter| filter["name"] == "homing").map(|filter| &mut filter["typed_config"]["config"]).collect()
    }
}

fn list(value: &mut Value) -> impl Iterator<Item = &mut Value> {
    value.as_array_mut().map(|list| list.iter_mut()).into_iter().flatten()
}

/// A running Envoy.
#[derive(Debug)]
pub struct Envoy {
    /// The process.
    pub process: Process,
    /// Its admin interface.
    pub admin: SocketAddr,
    listeners: Vec<(String, SocketAddr)>,
}

impl Envoy {
    /// Starts Envoy in `dir` and waits until it listens.
    ///
    /// # Errors
    /// If it refuses its configuration or does not start; the message has its last words.
    pub async fn start(binary: &Path, config: &EnvoyConfig, concurrency: usize, dir: &Path) -> Result<Self> {
        Self::start_with(binary, config, concurrency, dir, &["--disable-hot-restart".to_owned()]).await
    }

    /// Starts Envoy with these arguments besides the usual ones, as [`Self::start`] does.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with(binary: &Path, config: &EnvoyConfig, concurrency: usize, dir: &Path, more: &[String]) -> Result<Self> {
        let (file, admin_file) = (dir.join("envoy.json"), dir.join("envoy-admin-address"));
        fs::write(&file, serde_json::to_vec_pretty(&config.0)?)?;
        let _ = fs::remove_file(&admin_file);
        let usual = [
            "--config-path".to_owned(),
            file.display().to_string(),
            "--concurrency".to_owned(),
            concurrency.to_string(),
            "--admin-address-path".to_owned(),
            admin_file.display().to_string(),
            "--log-level".to_owned(),
            "warning".to_owned(),
            "--component-log-level".to_owned(),
            "wasm:info".to_owned(),
        ];
        let args: Vec<_> = usual.into_iter().chain(more.iter().cloned()).collect();
        let mut process = Process::start("envoy", binary, &args, dir)?;
        let started = Instant::now();
        loop {
            process.check()?;
            if let Some(admin) = fs::read_to_string(&admin_file).ok().and_then(|text| text.trim().parse().ok())
                && let Some(listeners) = listeners(admin).await
            {
                return Ok(Self { process, admin, listeners });
            }
            if started.elapsed() > START {
                bail!("Envoy did not start within {START:?}.\n{}", process.tail());
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Where a listener listens.
    ///
    /// # Errors
    /// If there is no such listener.
    pub fn listener(&self, name: &str) -> Result<SocketAddr> {
        let found = self.listeners.iter().find(|(listener, _)| listener == name);
        found.map(|(_, address)| *address).with_context(|| format!("Envoy has no listener `{name}`"))
    }
}

/// The listeners of an Envoy that is ready; `None` if it is not.
async fn listeners(admin: SocketAddr) -> Option<Vec<(String, SocketAddr)>> {
    let ready = reqwest::get(format!("http://{admin}/ready")).await.ok()?;
    ready.error_for_status().ok()?;
    let listed: Value = reqwest::get(format!("http://{admin}/listeners?format=json")).await.ok()?.json().await.ok()?;
    let listener = |status: &Value| {
        let address = &status["local_address"]["socket_address"];
        let ip = address["address"].as_str()?.parse().ok()?;
        let port = u16::try_from(address["port_value"].as_u64()?).ok()?;
        Some((status["name"].as_str()?.to_owned(), SocketAddr::new(ip, port)))
    };
    listed["listener_statuses"].as_array()?.iter().map(listener).collect()
}
