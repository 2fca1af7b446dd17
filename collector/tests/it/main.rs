//! The collector as a whole, against stand-ins for vLLM and Envoy.

mod command;
mod config;
mod discovering;
mod documented;
mod draining;
mod fakes;
mod finding_envoys;
mod http;
mod scraping;
mod syncing;
mod tls;
mod versions;
