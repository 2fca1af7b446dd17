//! `homing-collector drain`: drains a replica by the API of a collector that runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use homing_collector::api::DrainStatus;
use homing_collector::config::TokenSource;
use homing_collector::drain::DrainedBy;
use homing_routing::replica::ReplicaName;
use reqwest::{Method, Url};

#[derive(clap::Args)]
pub(crate) struct DrainArguments {
    /// The replica: ip:port, or ip:port#rank for one rank of it.
    replica: ReplicaName,
    /// Let it take new turns again.
    #[arg(long)]
    undo: bool,
    /// Where the collector listens.
    #[arg(long, default_value = "http://127.0.0.1:9900")]
    url: Url,
    /// A file that holds the collector's api token.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Print the collector's answer as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(arguments: DrainArguments) -> anyhow::Result<()> {
    let status = call(&arguments).await?;
    if arguments.json {
        println!("{}", serde_json::to_string(&status)?);
    } else {
        println!("{}", describe(&status));
    }
    let still_drains = arguments.undo && !status.drained_by.is_empty();
    anyhow::ensure!(!still_drains, "it takes no new turns yet: end what else drains it");
    Ok(())
}

async fn call(arguments: &DrainArguments) -> anyhow::Result<DrainStatus> {
    let mut url = arguments.url.clone();
    let path = ["api", "v1", "replicas", &arguments.replica.to_string(), "drain"].map(str::to_owned);
    url.path_segments_mut().map_err(|()| anyhow::anyhow!("--url must be http://ip:port"))?.pop_if_empty().extend(path);
    let method = if arguments.undo { Method::DELETE } else { Method::POST };
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?;
    let mut request = client.request(method, url);
    if let Some(path) = &arguments.token_file {
        request = request.bearer_auth(TokenSource::File(path.clone()).read().map_err(anyhow::Error::msg)?);
    }
    let what = || format!("no answer from {}; is the collector running, and is --url where it listens?", arguments.url);
    let response = request.send().await.with_context(what)?;
    let status = response.status();
    let body = response.bytes().await.with_context(what)?;
    if !status.is_success() {
        let error = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
        let error = error["error"].as_str().unwrap_or("no collector that can drain answers there; is --url right?");
        match status.as_u16() {
            401 => bail!("{error}: give --token-file the file of its api.token_file"),
            status => bail!("{error} (HTTP status {status})"),
        }
    }
    serde_json::from_slice(&body).context("the answer is not a collector's; is --url where it listens?")
}

fn describe(status: &DrainStatus) -> String {
    let DrainStatus { replica, drained_by, in_flight } = status;
    if drained_by.is_empty() {
        return format!("{replica} takes new turns");
    }
    let by = drained_by.iter().map(|by| match by {
        DrainedBy::Configuration => "the configuration (`drain: true`)",
        DrainedBy::File => "the drain file",
        DrainedBy::Api => "the API",
    });
    format!("{replica} drains, by {}; {in_flight} requests in flight there", by.collect::<Vec<_>>().join(" and "))
}
