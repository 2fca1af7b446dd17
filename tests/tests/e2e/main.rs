//! End-to-end tests on a real Envoy, with stand-in replicas and the real collector.

mod admission;
mod bodies;
mod compose;
mod configuration;
mod control;
mod dashboards;
mod discovery;
mod endings;
mod failures;
mod fleet;
mod headers;
mod hostile;
mod identity;
mod kubernetes;
mod models;
mod routing;
mod store;
mod tls;
