//! The patches in `envoy/kubernetes/`, applied to configurations as gateways make them: Envoy takes the result.

use anyhow::{Context, Result};
use homing_tests::tools;
use json_patch::{Patch, PatchOperation};
use serde_json::{Value, json};
use xtask::envoy::EnvoyConfig;
use xtask::manifests::resources;

use crate::configuration::validate;

const ISTIO_CLUSTER: &str = "outbound|8000||vllm.models.svc.cluster.local";
const GATEWAY_CLUSTER: &str = "httproute/models/vllm/rule/0";

fn manager(routes: &Value, filters: &Value) -> Value {
    json!({
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http", "route_config": routes, "http_filters": filters,
        },
    })
}

fn router() -> Value {
    json!({
        "name": "envoy.filters.http.router",
        "typed_config": { "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router" },
    })
}

fn routes(cluster: &str) -> Value {
    let route = json!({ "name": "vllm", "match": { "prefix": "/" }, "route": { "cluster": cluster } });
    json!({ "name": "http", "virtual_hosts": [{ "name": "all", "domains": ["*"], "routes": [route] }] })
}

fn cluster(name: &str) -> Value {
    let address = json!({ "socket_address": { "address": "127.0.0.1", "port_value": 8000 } });
    let endpoints = json!([{ "lb_endpoints": [{ "endpoint": { "address": address } }] }]);
    json!({ "name": name, "type": "STATIC", "load_assignment": { "cluster_name": name, "endpoints": endpoints } })
}

fn bootstrap(listener: &Value, cluster: &Value) -> Value {
    json!({ "admin": {}, "static_resources": { "listeners": [listener], "clusters": [cluster] } })
}

/// As a protobuf message is merged: lists grow, fields are replaced.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

/// Validates it and says in which order the filters stand that clients' requests pass.
async fn accepted(mut config: Value) -> Result<Vec<String>> {
    let filters = "/static_resources/listeners/0/default_filter_chain/filters/0/typed_config/http_filters";
    let chain = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
    let names = config.pointer(chain).or_else(|| config.pointer(filters)).and_then(Value::as_array).context("filters")?;
    let names = names.iter().map(|filter| filter["name"].as_str().unwrap_or_default().to_owned()).collect();
    // A default filter chain is not where the tests' tool looks for modules.
    replace(&mut config, "/etc/homing/homing_filter.wasm", &tools().filter.display().to_string());
    let (valid, said) = validate(|_| Ok(()), EnvoyConfig(config)).await?;
    assert!(valid, "{said}");
    Ok(names)
}

fn replace(value: &mut Value, old: &str, new: &str) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|value| replace(value, old, new)),
        Value::Array(values) => values.iter_mut().for_each(|value| replace(value, old, new)),
        Value::String(text) if text == old => new.clone_into(text),
        _ => {}
    }
}

/// Applies an EnvoyFilter to a gateway's configuration, as far as Homing's uses it.
fn apply(config: &mut Value, patch: &Value) -> Result<()> {
    let (value, operation) = (&patch["patch"]["value"], patch["patch"]["operation"].as_str().context("an operation")?);
    let manager = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    match (patch["applyTo"].as_str().context("applyTo")?, operation) {
        ("HTTP_FILTER", "INSERT_BEFORE") => {
            let before = &patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"];
            let filters =
                config.pointer_mut(&format!("{manager}/http_filters")).and_then(Value::as_array_mut).context("filters")?;
            let at = filters.iter().position(|filter| filter["name"] == *before).context("the filter to stand before")?;
            filters.insert(at, value.clone());
        }
        ("HTTP_ROUTE", "MERGE") => {
            let route = config.pointer_mut(&format!("{manager}/route_config/virtual_hosts/0/routes/0")).context("a route")?;
            assert_eq!(route["name"], patch["match"]["routeConfiguration"]["vhost"]["route"]["name"]);
            merge(route, value);
        }
        ("CLUSTER", "MERGE") => {
            let wanted = &patch["match"]["cluster"];
            let name = format!("outbound|{}||{}", wanted["portNumber"], wanted["service"].as_str().context("a service")?);
            let cluster = config.pointer_mut("/static_resources/clusters/0").context("a cluster")?;
            assert_eq!(cluster["name"], json!(name));
            merge(cluster, value);
        }
        ("LISTENER", "ADD") => merge(&mut config["static_resources"]["listeners"], &json!([value])),
        ("BOOTSTRAP", "MERGE") => merge(config, value),
        other => anyhow::bail!("{other:?} is not a patch this test can apply"),
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn istios_patches_make_a_configuration_that_envoy_takes() -> Result<()> {
    let listener = json!({
        "name": "0.0.0.0_8080",
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } },
        "filter_chains": [{ "filters": [manager(&routes(ISTIO_CLUSTER), &json!([router()]))] }],
    });
    let mut config = bootstrap(&listener, &cluster(ISTIO_CLUSTER));
    for resource in resources("istio.yaml")? {
        for patch in resource["spec"]["configPatches"].as_array().context("patches")? {
            apply(&mut config, patch)?;
        }
    }
    let wanted = ["homing.header_mutation", "homing", "homing.header_to_metadata", "envoy.filters.http.router"];
    assert_eq!(accepted(config).await?, wanted);
    Ok(())
}

/// Applies an EnvoyPatchPolicy, and what an EnvoyProxy adds to the bootstrap.
fn patched(file: &str, filters: &Value) -> Result<Value> {
    let mut listener = json!({
        "name": "models/gateway/http",
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } },
        "default_filter_chain": { "filters": [manager(&json!({}), filters)] },
    });
    let (mut routes, mut cluster) = (routes(GATEWAY_CLUSTER), cluster(GATEWAY_CLUSTER));
    let mut more = Vec::new();
    for resource in resources(file)? {
        for entry in resource["spec"]["jsonPatches"].as_array().into_iter().flatten() {
            let operation: PatchOperation = serde_json::from_value(entry["operation"].clone())?;
            let (target, name) = match entry["type"].as_str().and_then(|name| name.rsplit('.').next()) {
                Some("Listener") => (&mut listener, "models/gateway/http"),
                Some("RouteConfiguration") => (&mut routes, "models/gateway/http"),
                Some("Cluster") => (&mut cluster, GATEWAY_CLUSTER),
                other => anyhow::bail!("no {other:?} is here to be patched"),
            };
            assert_eq!(entry["name"], json!(name));
            json_patch::patch(target, &[operation])?;
        }
        more.extend(resource["spec"]["bootstrap"]["jsonPatches"].as_array().into_iter().flatten().cloned());
    }
    listener["default_filter_chain"]["filters"][0]["typed_config"]["route_config"] = routes;
    let mut config = bootstrap(&listener, &cluster);
    json_patch::patch(&mut config, &serde_json::from_value::<Patch>(json!(more))?.0)?;
    Ok(config)
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_gateways_patches_make_a_configuration_that_envoy_takes() -> Result<()> {
    let config = patched("envoy-gateway.yaml", &json!([router()]))?;
    let wanted = ["homing.header_mutation", "homing", "homing.header_to_metadata", "envoy.filters.http.router"];
    assert_eq!(accepted(config).await?, wanted);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_gateways_extension_and_patches_go_together() -> Result<()> {
    let policy = resources("envoy-gateway-header-only.yaml")?
        .into_iter()
        .find(|resource| resource["kind"] == "EnvoyExtensionPolicy")
        .context("the policy")?;
    let wasm = &policy["spec"]["wasm"][0];
    // What Envoy Gateway makes of it: the module as a file, the configuration as JSON in a string.
    let filter = json!({
        "name": "envoy.filters.http.wasm/homing",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            "config": {
                "name": wasm["name"], "root_id": wasm["rootID"], "fail_open": wasm["failOpen"],
                "vm_config": {
                    "vm_id": "envoyextensionpolicy/models/homing/wasm/0",
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": { "local": { "filename": "/etc/homing/homing_filter.wasm" } },
                },
                "configuration": {
                    "@type": "type.googleapis.com/google.protobuf.StringValue",
                    "value": wasm["config"].to_string(),
                },
            },
        },
    });
    let config = patched("envoy-gateway-header-only.yaml", &json!([filter, router()]))?;
    let wanted =
        ["homing.header_mutation", "envoy.filters.http.wasm/homing", "homing.header_to_metadata", "envoy.filters.http.router"];
    assert_eq!(accepted(config).await?, wanted);
    Ok(())
}
