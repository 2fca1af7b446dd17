//! Envoy refuses a wrong configuration and says what is wrong with it; the shipped ones it takes.

use std::path::PathBuf;

use anyhow::{Context, Result};
use homing_tests::tools;
use serde_json::{Value, json};
use tokio::process::Command;
use xtask::envoy::EnvoyConfig;
use xtask::tools::root;

/// What `envoy --mode validate` says, and whether it accepts.
async fn validate(change: impl FnOnce(&mut EnvoyConfig) -> Result<()>, file: PathBuf) -> Result<(bool, String)> {
    let mut config = EnvoyConfig::read(&file)?;
    config.set_filter(&tools().filter);
    change(&mut config)?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("envoy.json");
    std::fs::write(&path, config.0.to_string())?;
    let output = Command::new(&tools().envoy).args(["--mode", "validate", "--config-path"]).arg(&path).output().await?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn standalone() -> PathBuf {
    root().join("envoy/standalone.yaml")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_shipped_configuration_is_valid() -> Result<()> {
    for entry in std::fs::read_dir(root().join("envoy"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let (valid, said) = validate(|_| Ok(()), path.clone()).await?;
            assert!(valid, "{}: {said}", path.display());
        }
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
        let (valid, said) = validate(change, standalone()).await?;
        assert!(!valid, "{pointer} was accepted");
        assert!(said.contains(reason), "{pointer}: {said}");
    }
    Ok(())
}
