//! What is measured: a listener for each subject, all made of the shipped one.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::envoy::EnvoyConfig;
use crate::stack::MODEL;
use crate::tools;

/// The cluster of the subjects that choose no upstream: the shipped endpoints under the fallback policy alone.
const PLAIN_CLUSTER: &str = "plain";

/// The cluster of the stand-ins for Homing: as shipped, but the choice is in a header.
const CHOSEN_CLUSTER: &str = "chosen";

/// Where the external processor is.
const PROCESSOR_CLUSTER: &str = "processor";

/// The header with the stand-ins' choice.
const TARGET_HEADER: &str = "x-homing-targets";

/// What stands in a subject's listener.
#[derive(Clone, Debug)]
pub(super) enum Setup {
    /// Nothing of Homing.
    Plain,
    /// Nothing of Homing, and a wasm filter from this file that needs no configuration.
    OtherFilter(PathBuf),
    /// Homing as it is shipped, with the filter from this file.
    Homing(PathBuf),
    /// A Lua script that chooses an upstream.
    Lua,
    /// An external processor that chooses an upstream, at this address and with this process id.
    ExtProc(SocketAddr, u32),
}

/// A listener that is measured. The first one is what the others are compared with.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) setup: Setup,
}

impl Subject {
    pub(super) fn is_homing(&self) -> bool {
        matches!(self.setup, Setup::Homing(_))
    }

    /// The name of the listener that its snapshots are pushed to, if it is Homing.
    pub(super) fn control(&self) -> String {
        format!("control-{}", self.name)
    }

    /// As `homing-bench proxy` has it.
    pub(super) fn argument(&self, address: SocketAddr) -> String {
        let how = match self.setup {
            Setup::Plain | Setup::OtherFilter(_) => String::new(),
            Setup::Homing(_) => ",keeps-homes".to_owned(),
            Setup::Lua => ",keeps-homes,header-only".to_owned(),
            Setup::ExtProc(_, pid) => format!(",keeps-homes,header-only,helper={pid}"),
        };
        format!("{}={address}{how}", self.name)
    }
}

/// The shipped configuration with a listener for each subject in place of its one.
pub(super) fn envoy_config(subjects: &[Subject], upstreams: &[SocketAddr]) -> Result<EnvoyConfig> {
    let mut config = EnvoyConfig::read(&tools::root().join("envoy/standalone.yaml"))?;
    let resources = &mut config.0["static_resources"];
    let named = |list: &Value, name: &str| {
        let found = list.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == name));
        found.cloned().with_context(|| format!("the shipped configuration has no `{name}`"))
    };
    let (proxy, control) = (named(&resources["listeners"], "proxy")?, named(&resources["listeners"], "control")?);
    let shipped = named(&resources["clusters"], MODEL)?;
    let clusters = resources["clusters"].as_array_mut().context("the clusters")?;
    clusters.extend([plain_cluster(&shipped)?, chosen_cluster(&shipped)?]);
    clusters.extend(subjects.iter().filter_map(|subject| match subject.setup {
        Setup::ExtProc(address, _) => Some(processor_cluster(address)),
        _ => None,
    }));

    let mut listeners = Vec::new();
    for subject in subjects {
        listeners.push(listener(&proxy, &subject.name, subject, upstreams)?);
        if subject.is_homing() {
            listeners.push(listener(&control, &subject.control(), subject, upstreams)?);
        }
    }
    resources["listeners"] = json!(listeners);
    for cluster in [MODEL, PLAIN_CLUSTER, CHOSEN_CLUSTER] {
        config.set_endpoints(cluster, upstreams);
    }
    config.use_free_ports();
    Ok(config)
}

/// Where a cluster's `override_host` policy is set up.
const POLICY: &str = "/load_balancing_policy/policies/0/typed_extension_config/typed_config";

fn plain_cluster(shipped: &Value) -> Result<Value> {
    let fallback = shipped.pointer(&format!("{POLICY}/fallback_policy")).context("the cluster's fallback policy")?;
    let mut cluster = renamed(shipped, PLAIN_CLUSTER);
    cluster["load_balancing_policy"] = fallback.clone();
    Ok(cluster)
}

fn chosen_cluster(shipped: &Value) -> Result<Value> {
    let mut cluster = renamed(shipped, CHOSEN_CLUSTER);
    let policy = cluster.pointer_mut(POLICY).context("the cluster's policy")?;
    policy["override_host_sources"] = json!([{ "header": TARGET_HEADER }]);
    Ok(cluster)
}

fn renamed(cluster: &Value, name: &str) -> Value {
    let mut cluster = cluster.clone();
    cluster["name"] = json!(name);
    cluster["load_assignment"]["cluster_name"] = json!(name);
    cluster
}

fn processor_cluster(address: SocketAddr) -> Value {
    let address = json!({ "address": address.ip().to_string(), "port_value": address.port() });
    json!({
        "name": PROCESSOR_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": { "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": { "http2_protocol_options": {} },
        } },
        "load_assignment": {
            "cluster_name": PROCESSOR_CLUSTER,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": { "socket_address": address } } }] }],
        },
    })
}

/// A shipped listener, changed to what the subject stands for.
fn listener(shipped: &Value, name: &str, subject: &Subject, upstreams: &[SocketAddr]) -> Result<Value> {
    let mut listener = shipped.clone();
    listener["name"] = json!(name);
    // Each worker gets as many of the few connections: left to the kernel, subjects would differ by luck.
    listener["connection_balance_config"] = json!({ "exact_balance": {} });
    let manager = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").context("the connection manager")?;
    manager["stat_prefix"] = json!(name);
    let filters = manager["http_filters"].as_array_mut().context("the HTTP filters")?;
    let wasm = filters.iter_mut().find(|filter| filter["name"] == "homing").context("the homing filter")?;
    let (own, cluster) = match &subject.setup {
        Setup::Homing(file) => {
            set_module(wasm, file, &subject.name);
            return Ok(listener);
        }
        Setup::Plain => (None, PLAIN_CLUSTER),
        Setup::OtherFilter(file) => {
            set_module(wasm, file, &subject.name);
            wasm["name"] = json!(name);
            wasm["typed_config"]["config"]["name"] = json!(name);
            if let Some(config) = wasm["typed_config"]["config"].as_object_mut() {
                config.remove("configuration");
            }
            (Some(wasm.clone()), PLAIN_CLUSTER)
        }
        Setup::Lua => (Some(lua_filter(upstreams)), CHOSEN_CLUSTER),
        Setup::ExtProc(..) => (Some(ext_proc_filter()), CHOSEN_CLUSTER),
    };
    // The shipped filters are Homing's, all but the last, which is the router.
    let router = filters.pop().context("the router")?;
    *filters = own.into_iter().chain([router]).collect();
    let route = manager.pointer_mut("/route_config/virtual_hosts/0/routes/0/route/cluster").context("the route's cluster")?;
    *route = json!(cluster);
    Ok(listener)
}

fn set_module(wasm: &mut Value, file: &Path, vm_id: &str) {
    let vm = &mut wasm["typed_config"]["config"]["vm_config"];
    vm["vm_id"] = json!(vm_id);
    vm["code"]["local"]["filename"] = json!(file);
}

fn lua_filter(upstreams: &[SocketAddr]) -> Value {
    let addresses: Vec<_> = upstreams.iter().map(|address| format!("\"{address}\"")).collect();
    let script = format!("local upstreams = {{ {} }}\n{}", addresses.join(", "), include_str!("pick.lua"));
    json!({
        "name": "envoy.filters.http.lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": { "inline_string": script },
        },
    })
}

/// Sends the request's headers, and nothing else. An error of the processor fails the request.
fn ext_proc_filter() -> Value {
    json!({
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": { "envoy_grpc": { "cluster_name": PROCESSOR_CLUSTER } },
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SKIP",
                "request_body_mode": "NONE",
                "response_body_mode": "NONE",
                "request_trailer_mode": "SKIP",
                "response_trailer_mode": "SKIP",
            },
            // Envoy's own 200 ms can pass on a machine that is this busy.
            "message_timeout": "5s",
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[test]
    fn subjects_differ_only_in_what_they_stand_for() {
        let subject = |name: &str, setup| Subject { name: name.into(), setup };
        let subjects = [
            subject("plain", Setup::Plain),
            subject("empty", Setup::OtherFilter("/empty.wasm".into())),
            subject("lua", Setup::Lua),
            subject("ext_proc", Setup::ExtProc(address(8), 1)),
            subject("homing", Setup::Homing("/homing.wasm".into())),
        ];
        let mut config = envoy_config(&subjects, &[address(9)]).expect("a configuration");
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
            ("lua", vec!["envoy.filters.http.lua", router]),
            ("ext_proc", vec!["envoy.filters.http.ext_proc", router]),
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
        assert!(managers[..5].iter().all(|(_, manager)| rest(manager) == rest(managers[0].1)));
        let cluster = |at: usize| managers[at].1["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"].clone();
        let clusters: [Value; 5] = std::array::from_fn(cluster);
        assert_eq!(clusters, [PLAIN_CLUSTER, PLAIN_CLUSTER, CHOSEN_CLUSTER, CHOSEN_CLUSTER, MODEL]);
    }

    #[test]
    fn the_stand_ins_clusters_are_the_shipped_one_but_for_where_the_choice_is() {
        let config = envoy_config(&[Subject { name: "lua".into(), setup: Setup::Lua }], &[address(9)]).expect("a configuration");
        let clusters = config.0["static_resources"]["clusters"].as_array().expect("clusters");
        let cluster = |name: &str| renamed(clusters.iter().find(|cluster| cluster["name"] == name).expect("a cluster"), "");
        let (shipped, mut chosen) = (cluster(MODEL), cluster(CHOSEN_CLUSTER));
        let sources = format!("{POLICY}/override_host_sources");
        assert_eq!(chosen.pointer(&sources), Some(&json!([{ "header": TARGET_HEADER }])));
        *chosen.pointer_mut(&sources).expect("sources") = shipped.pointer(&sources).expect("sources").clone();
        assert_eq!(chosen, shipped);
        assert!(
            lua_filter(&[address(9)])["typed_config"]["default_source_code"]["inline_string"].as_str().is_some_and(|script| script
                .starts_with("local upstreams = { \"127.0.0.1:9\" }\n")
                && script.contains(TARGET_HEADER))
        );
    }
}
