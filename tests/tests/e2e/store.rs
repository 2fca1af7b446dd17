//! A store of conversations' homes that asks for TLS and a password.

use std::fs;
use std::net::SocketAddr;

use anyhow::{Context, Result};
use homing_tests::certificates::Certificates;
use homing_tests::{eventually, tools};
use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::process::Process;
use xtask::vllm::free_addresses;

/// A Redis that speaks TLS alone, and a collector that is to use it.
struct Pair {
    url: String,
    folder: TempDir,
    _redis: Process,
    _collector: Process,
}

impl Pair {
    /// With `password` in the collector's file; Redis wants `right`.
    async fn start(certificates: &Certificates, ca: &str, password: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("homing-store-").tempdir()?;
        let [address, replica] = *free_addresses(2)? else { anyhow::bail!("two ports") };
        let file = |name: &str| certificates.file(name).display().to_string();
        let (port, pem, key, own_ca) = (address.port().to_string(), file("envoy.pem"), file("envoy.key"), file("ca.pem"));
        let listen = ["--bind", "127.0.0.1", "--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"];
        let tls = ["--tls-cert-file", &pem, "--tls-key-file", &key, "--tls-ca-cert-file", &own_ca];
        let rest = ["--requirepass", "right", "--save", "", "--appendonly", "no"];
        let args: Vec<_> = listen.into_iter().chain(tls).chain(rest).map(str::to_owned).collect();
        let redis = Process::start("redis", &xtask::tools::redis()?, &args, folder.path())?;

        fs::write(folder.path().join("password"), password)?;
        let config = json!({
            "listen": "127.0.0.1:0",
            "pools": [{ "cluster": "pool", "replicas": [{ "address": replica.to_string() }] }],
            "affinity": {
                "store": format!("rediss://{address}"),
                "password_file": folder.path().join("password"),
                "ca_file": certificates.file(ca),
            },
        });
        let file = folder.path().join("collector.yaml");
        fs::write(&file, config.to_string())?;
        let args = ["run".to_owned(), file.display().to_string(), "--ready-json".to_owned()];
        let (collector, ready) = Process::start_ready("collector", &tools().collector, &args, folder.path()).await?;
        let listens: SocketAddr = ready["address"].as_str().context("an address")?.parse()?;
        Ok(Self { url: format!("http://{listens}/api/v1/pools"), folder, _redis: redis, _collector: collector })
    }

    async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Result<()> {
        eventually(what, async || {
            let status: Value = reqwest::get(&self.url).await?.json().await?;
            Ok(holds(&status["affinity"]["store"]))
        })
        .await
    }
}

fn says(store: &Value, text: &str) -> bool {
    store["problem"].as_str().is_some_and(|problem| problem.contains(text))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_reached_over_tls_with_the_password_of_a_file_which_is_read_again() -> Result<()> {
    let certificates = Certificates::write()?;
    let pair = Pair::start(&certificates, "ca.pem", "wrong").await?;
    pair.until("the wrong password", |store| store["up"] == false && says(store, "assword")).await?;
    fs::write(pair.folder.path().join("password"), "right\n")?;
    pair.until("the right one", |store| store["up"] == true && store["problem"].is_null()).await?;
    pair.until("no password to be shown", |store| !store.to_string().contains("right")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_whose_certificate_another_authority_signed_is_not_used() -> Result<()> {
    let (certificates, others) = (Certificates::write()?, Certificates::write()?);
    fs::copy(others.file("ca.pem"), certificates.file("other.pem"))?;
    let pair = Pair::start(&certificates, "other.pem", "right").await?;
    pair.until("the stranger", |store| store["up"] == false && says(store, "certificate")).await
}
