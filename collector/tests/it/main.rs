//! The collector as a whole, against stand-ins for vLLM and Envoy.

mod command;
mod config;
mod fakes;
mod http;
mod scraping;
mod syncing;
