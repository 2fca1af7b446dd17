//! What the end-to-end tests share: a stack, a client, and Envoy's statistics.

#![forbid(unsafe_code)]

pub mod agents;
pub mod browser;
pub mod certificates;
pub mod fleet;
pub mod scripted;

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result};
use reqwest::Client;
use serde_json::Value;
pub use xtask::client::{Turn, chat_body};
use xtask::stack::{Stack, StackOptions};
use xtask::statistics::Statistics;
use xtask::tools::Tools;
pub use xtask::wait::eventually;

/// Where the proxy's listener stands in the configuration.
pub const LISTENER: &str = "/static_resources/listeners/0";

/// Where its HTTP connection manager stands.
pub const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";

/// Where its route stands.
pub const ROUTE: &str =
    "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0";

/// How long a turn may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The binaries, built once.
///
/// # Panics
/// If they cannot be built.
pub fn tools() -> &'static Tools {
    static TOOLS: OnceLock<Tools> = OnceLock::new();
    TOOLS.get_or_init(|| Tools::ensure().expect("the tools"))
}

/// Starts a stack whose stand-in replicas are a hundred times faster than real ones.
///
/// # Errors
/// If it does not start.
pub async fn fast_stack(options: StackOptions) -> Result<Stack> {
    stack_at_speed(options, 100.0).await
}

/// Starts a stack whose stand-in replicas run at this speed.
///
/// # Errors
/// If it does not start.
pub async fn stack_at_speed(mut options: StackOptions, speed: f64) -> Result<Stack> {
    options.replica_args.extend(["--speed".to_owned(), speed.to_string()]);
    Stack::start(tools(), options).await
}

/// One turn of a conversation over a connection of its own, read to its end.
///
/// # Errors
/// If there is no answer.
pub async fn turn(stack: &Stack, conversation: &str, max_tokens: u32) -> Result<Turn> {
    let client = Client::builder().pool_max_idle_per_host(0).timeout(PATIENCE).build()?;
    let request = client.post(chat_url(stack)).header("x-session-id", conversation);
    let response = request.json(&chat_body(conversation, max_tokens)).send().await.context("a turn")?;
    let turn = Turn::of(&response);
    response.bytes().await.context("the rest of a turn")?;
    Ok(turn)
}

/// Where chat completions go.
pub fn chat_url(stack: &Stack) -> String {
    format!("http://{}/v1/chat/completions", stack.proxy)
}

/// Envoy's statistics of Homing by name, then by labels (as they are written) and value.
///
/// # Errors
/// If Envoy does not answer.
pub async fn metrics(stack: &Stack) -> Result<BTreeMap<String, Vec<(String, u64)>>> {
    Ok(Statistics::read(stack.envoy.admin).await?.0)
}

/// The sum of one statistic over the labels that contain every one of `labels`.
///
/// # Errors
/// If Envoy does not answer.
pub async fn sum(stack: &Stack, name: &str, labels: &[&str]) -> Result<u64> {
    Ok(Statistics::read(stack.envoy.admin).await?.sum(name, labels))
}

/// Waits until no request is in flight or held, as every test must end.
///
/// # Errors
/// If a count stays.
pub async fn all_given_back(stack: &Stack) -> Result<()> {
    let is_zero = async |name| Ok(Statistics::read(stack.envoy.admin).await?.all_zero(name));
    eventually("the line to be empty", async || is_zero("homing_held_requests").await).await?;
    eventually("every in-flight to be given back", async || is_zero("homing_in_flight").await).await
}

/// The requests a stand-in replica has received, oldest first.
///
/// # Errors
/// If it does not answer.
pub async fn received(replica: SocketAddr) -> Result<Vec<Value>> {
    Ok(reqwest::get(format!("http://{replica}/debug/requests")).await?.json().await?)
}

/// Runs futures at the same time.
pub async fn together<T: Send + 'static>(tasks: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>) -> Vec<T> {
    let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        match task.await {
            Ok(result) => results.push(result),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    results
}
