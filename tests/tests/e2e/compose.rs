//! `docker-compose.yml` without Docker: each container's command line as a process, with addresses of this machine in place of the compose
//! network's, and each health check against it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use homing_tests::{eventually, tools};
use serde_json::{Value, json};
use tokio::process::Command;
use xtask::envoy::{Envoy, EnvoyConfig};
use xtask::process::Process;
use xtask::tools::root;

fn services() -> Result<BTreeMap<String, Value>> {
    let text = std::fs::read_to_string(root().join("docker-compose.yml"))?;
    // Read as the language's version 1.1, in which `<<` merges.
    let options = serde_saphyr::options! { with_snippet: false };
    let file: Value = serde_saphyr::from_str_with_options(&text, options)?;
    Ok(serde_json::from_value(file["services"].clone())?)
}

/// A service's words under `key`, changed as `changes` says.
fn words(service: &Value, key: &str, changes: &[(&str, String)]) -> Result<Vec<String>> {
    let list = service.pointer(key).and_then(Value::as_array).with_context(|| format!("no {key} in {service}"))?;
    let word = |word: &Value| {
        let word = word.as_str().context("a word")?.to_owned();
        Ok(changes.iter().fold(word, |word, (from, to)| word.replace(from, to)))
    };
    list.iter().map(word).collect()
}

/// Runs a service's health check here until it succeeds.
async fn becomes_healthy(service: &Value, changes: &[(&str, String)]) -> Result<()> {
    let test = words(service, "/healthcheck/test", changes)?;
    let [kind, program, args @ ..] = test.as_slice() else { anyhow::bail!("no command in {test:?}") };
    ensure!(kind == "CMD", "{test:?}");
    let program = if program == "homing-collector" { tools().collector.clone() } else { program.into() };
    eventually(&format!("{test:?} to succeed"), async || Ok(Command::new(&program).args(args).output().await?.status.success()))
        .await
}

async fn is_unhealthy(service: &Value, changes: &[(&str, String)]) -> Result<bool> {
    let test = words(service, "/healthcheck/test", changes)?;
    let program = if test[1] == "homing-collector" { tools().collector.clone() } else { test[1].clone().into() };
    Ok(!Command::new(program).args(&test[2..]).output().await?.status.success())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_stack_runs_by_its_command_lines_and_is_healthy() -> Result<()> {
    let (services, dir) = (services()?, tempfile::Builder::new().prefix("homing-").tempdir()?);
    let mut replicas = Vec::new();
    for number in 1..=4 {
        let service = &services[&format!("stand-in-{number}")];
        let mut args = words(service, "/command", &[("0.0.0.0:8000", "127.0.0.1:0".to_owned())])?;
        args.extend(["--ready-json", "--speed", "20"].map(str::to_owned));
        let (process, ready) = Process::start_ready(&format!("stand-in-{number}"), &tools().bench, &args, dir.path()).await?;
        let address: SocketAddr = ready["address"].as_str().context("an address")?.parse()?;
        becomes_healthy(service, &[("127.0.0.1:8000", address.to_string())]).await?;
        replicas.push((process, address));
    }
    let addresses: Vec<_> = replicas.iter().map(|(_, address)| *address).collect();

    let mut config = EnvoyConfig::read(&root().join("docker/envoy.yaml"))?;
    config.use_free_ports();
    config.set_filter(&tools().filter);
    config.set_endpoints("qwen3-4b", &addresses);
    let envoy = Envoy::start(&tools().envoy, &config, 1, dir.path()).await?;
    let admin = [("/127.0.0.1/9902", format!("/127.0.0.1/{}", envoy.admin.port()))];
    becomes_healthy(&services["envoy"], &admin).await?;

    let mut config: Value = serde_saphyr::from_str(&std::fs::read_to_string(root().join("docker/collector.yaml"))?)?;
    config["listen"] = json!("127.0.0.1:0");
    config["envoys"][0]["url"] = json!(format!("http://{}", envoy.listener("control")?));
    let pool = config["pools"][0].as_object_mut().context("a pool")?;
    pool.remove("dns").context("replicas by name")?;
    pool.insert("replicas".to_owned(), addresses.iter().map(|address| json!({ "address": address.to_string() })).collect());
    let file = dir.path().join("collector.yaml");
    std::fs::write(&file, config.to_string())?;
    let mut args = words(&services["collector"], "/command", &[("/etc/homing/collector.yaml", file.display().to_string())])?;
    args.push("--ready-json".to_owned());
    let (mut collector, ready) = Process::start_ready("collector", &tools().collector, &args, dir.path()).await?;
    let console = ready["address"].as_str().context("an address")?;
    // Its check asks the port of the configuration, so here it is told where that is.
    let mut asked = services["collector"].clone();
    asked["healthcheck"]["test"].as_array_mut().context("a test")?.push(json!(format!("http://{console}/healthz")));
    becomes_healthy(&asked, &[]).await?;

    let proxy = format!("http://{}", envoy.listener("proxy")?);
    let mut args = words(&services["load"], "/command", &[("http://envoy:10000", proxy), ("60s", "2s".to_owned())])?;
    args.extend(["--json", "--speed", "20"].map(str::to_owned));
    let output = Command::new(&tools().bench).args(&args).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(report.contains("\"sessions\""), "{report}");

    collector.kill().await?;
    assert!(is_unhealthy(&asked, &[]).await?, "the check cannot fail");
    Ok(())
}

#[test]
fn what_is_mounted_is_there_and_images_have_versions() -> Result<()> {
    for (name, service) in services()? {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().and_then(|text| text.split(':').next()).context("a volume")?;
            assert!(source.starts_with('$') || Path::new(&root()).join(source).exists(), "{name} mounts {source}");
        }
        let image = service["image"].as_str().context("an image")?;
        let (_, tag) = image.rsplit_once(':').with_context(|| format!("{name}: {image} has no version"))?;
        assert!(tag.chars().any(|c| c.is_ascii_digit()), "{name}: {image}");
        assert!(service.get("healthcheck").is_some() || name == "load", "{name} has no health check");
    }
    Ok(())
}
