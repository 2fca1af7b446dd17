//! Envoy with policies of its own in place of Homing.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::load::SESSION_HEADER;
use crate::envoy::EnvoyConfig;
use crate::stack::MODEL;
use crate::tools;

/// One of Envoy's load balancing policies, with the settings its documentation gives for sessions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum EnvoyPolicy {
    /// One replica after the other.
    RoundRobin,
    /// The better of two replicas taken at random.
    LeastRequest,
    /// Consistent hashing of the session on a ring.
    RingHash,
    /// The same, but a replica that has more than 1.25 times the mean is passed over.
    BoundedRingHash,
    /// Consistent hashing of the session in a Maglev table.
    Maglev,
}

/// Per cent of the mean load above which a replica is passed over; Envoy's documentation names 120 and up, the paper it follows
/// (Mirrokni, Thorup, Zadimoghaddam: "Consistent Hashing with Bounded Loads") measures 125.
const BALANCE_FACTOR: u32 = 125;

impl EnvoyPolicy {
    fn extension(self) -> Value {
        let (name, message, mut config) = match self {
            Self::RoundRobin => ("round_robin", "RoundRobin", json!({})),
            Self::LeastRequest => ("least_request", "LeastRequest", json!({})),
            Self::RingHash => ("ring_hash", "RingHash", json!({})),
            Self::BoundedRingHash => {
                ("ring_hash", "RingHash", json!({ "consistent_hashing_lb_config": { "hash_balance_factor": BALANCE_FACTOR } }))
            }
            Self::Maglev => ("maglev", "Maglev", json!({})),
        };
        let package = "envoy.extensions.load_balancing_policies";
        config["@type"] = json!(format!("type.googleapis.com/{package}.{name}.v3.{message}"));
        json!({ "typed_extension_config": { "name": format!("envoy.load_balancing_policies.{name}"), "typed_config": config } })
    }

    fn hashes(self) -> bool {
        matches!(self, Self::RingHash | Self::BoundedRingHash | Self::Maglev)
    }
}

/// The shipped configuration without Homing: no filter but the router, no control listener, and this policy alone.
pub(super) fn config(policy: EnvoyPolicy, replicas: &[SocketAddr]) -> Result<EnvoyConfig> {
    let mut config = EnvoyConfig::read(&tools::root().join("envoy/standalone.yaml"))?;
    config.use_free_ports();
    config.set_endpoints(MODEL, replicas);
    let resources = &mut config.0["static_resources"];
    resources["listeners"].as_array_mut().context("the listeners")?.retain(|listener| listener["name"] == "proxy");
    let clusters = resources["clusters"].as_array_mut().context("the clusters")?;
    let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == MODEL).context("the replicas' cluster")?;
    cluster["load_balancing_policy"]["policies"] = json!([policy.extension()]);
    for (_, manager) in config.connection_managers() {
        let filters = manager["http_filters"].as_array_mut().context("the HTTP filters")?;
        filters.retain(|filter| filter["name"] == "envoy.filters.http.router");
        if policy.hashes() {
            let route = manager.pointer_mut("/route_config/virtual_hosts/0/routes/0/route").context("the route")?;
            route["hash_policy"] = json!([{ "header": { "header_name": SESSION_HEADER } }]);
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_homing_is_left() {
        let replicas = ["127.0.0.1:9".parse().expect("an address")];
        for policy in [EnvoyPolicy::RoundRobin, EnvoyPolicy::BoundedRingHash] {
            let mut config = config(policy, &replicas).expect("a configuration");
            let text = config.0["static_resources"].to_string();
            assert!(!text.contains("wasm") && !text.contains("override_host") && !text.contains("header_to_metadata"), "{text}");
            let managers = config.connection_managers();
            assert_eq!(managers.len(), 1);
            assert_eq!(managers[0].1["http_filters"].as_array().map(Vec::len), Some(1));
            assert_eq!(text.contains("hash_balance_factor"), policy == EnvoyPolicy::BoundedRingHash);
            assert_eq!(text.contains(SESSION_HEADER), policy.hashes());
        }
    }
}
