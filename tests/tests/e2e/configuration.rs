//! Envoy refuses a wrong configuration and says what is wrong with it; the shipped ones it takes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use homing_tests::certificates::Certificates;
use homing_tests::tools;
use serde_json::{Value, json};
use tokio::process::Command;
use xtask::envoy::EnvoyConfig;
use xtask::tools::root;

/// What `envoy --mode validate` says, and whether it accepts.
pub(crate) async fn validate(
    change: impl FnOnce(&mut EnvoyConfig) -> Result<()>,
    mut config: EnvoyConfig,
) -> Result<(bool, String)> {
    config.set_filter(&tools().filter);
    change(&mut config)?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("envoy.json");
    std::fs::write(&path, config.0.to_string())?;
    let output = Command::new(&tools().envoy).args(["--mode", "validate", "--config-path"]).arg(&path).output().await?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn standalone() -> Result<EnvoyConfig> {
    EnvoyConfig::read(&root().join("envoy/standalone.yaml"))
}

/// Envoy configurations in a folder and those below it, but for the ones that are parts of others.
fn shipped(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(shipped(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "yaml")
            && std::fs::read_to_string(&path)?.contains("\nstatic_resources:")
        {
            found.push(path);
        }
    }
    Ok(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_shipped_configuration_is_valid() -> Result<()> {
    let certificates = Certificates::write()?;
    let mut all = shipped(&root().join("envoy"))?;
    all.extend(shipped(&root().join("docker"))?);
    assert!(all.len() >= 8, "{all:?}");
    for path in all {
        let (valid, said) = validate(|config| certificates.used_by(config), EnvoyConfig::read(&path)?).await?;
        assert!(valid, "{}: {said}", path.display());
    }
    Ok(())
}

#[test]
fn an_existing_configuration_only_grows() -> Result<()> {
    let read = |name: &str| std::fs::read_to_string(root().join("envoy/existing").join(name));
    let (before, after) = (read("before.yaml")?, read("after.yaml")?);
    let mut added = after.lines();
    for line in before.lines() {
        assert!(added.any(|added| added == line), "before.yaml has a line that after.yaml has not, or not in this order: {line}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_filter_configuration_is_refused_with_the_keys_name() -> Result<()> {
    let cases: [(&str, &str, Value, &str); 6] = [
        ("route", "/spil", json!(1), "unknown field `spil`"),
        ("route", "/pools/0/spill_treshold", json!(8), "unknown field `spill_treshold`"),
        ("route", "/pools/0/spill_threshold", json!("many"), "pools[0].spill_threshold"),
        ("route", "/pools/0/affinity", json!("on"), "pools[0].affinity"),
        ("route", "/idle_timeout", json!(600), "idle_timeout"),
        ("control", "/token", json!(5), "token"),
    ];
    for (role, pointer, value, reason) in cases {
        let change = |config: &mut EnvoyConfig| {
            let filter = config.filter_config(role).context("the filter")?;
            let (parent, key) = pointer.rsplit_once('/').context("a pointer")?;
            filter.pointer_mut(parent).context("the parent")?[key] = value;
            Ok(())
        };
        let (valid, said) = validate(change, standalone()?).await?;
        assert!(!valid, "{pointer} was accepted");
        assert!(said.contains(reason), "{pointer}: {said}");
    }
    Ok(())
}

/// Envoy calls what a module exports, whether anything is done there or not: a response of a thousand pieces would be a thousand calls.
#[test]
fn the_filter_is_not_called_for_the_pieces_of_a_response() -> Result<()> {
    let module = std::fs::read(&tools().filter)?;
    let exports = |name: &str| module.windows(name.len()).any(|bytes| bytes == name.as_bytes());
    assert!(exports("proxy_on_request_body") && exports("proxy_on_response_headers"));
    assert!(!exports("proxy_on_response_body") && !exports("proxy_on_response_trailers"));
    Ok(())
}
