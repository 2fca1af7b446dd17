//! `cargo xtask manifests`: what can be checked of Kubernetes manifests, the compose file and the Dockerfiles without a cluster and
//! without Docker.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::tools::{self, root, run, say};

/// The resources of one file in `envoy/kubernetes/`.
///
/// # Errors
/// If it is no YAML.
pub fn resources(file: &str) -> Result<Vec<Value>> {
    let path = root().join("envoy/kubernetes").join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_saphyr::from_multiple(&text).with_context(|| format!("{} is no YAML", path.display()))
}

/// Checks everything.
///
/// # Errors
/// The first check that fails, or whatever cannot be installed.
pub fn check() -> Result<()> {
    kubernetes()?;
    compose()?;
    say("the Dockerfile");
    run(Command::new(tools::hadolint()?).arg("docker/Dockerfile"))
}

/// The compose file against its schema, and as Docker reads it, for every profile.
fn compose() -> Result<()> {
    say("the compose file");
    let schema: Value = serde_json::from_str(&fs::read_to_string(root().join("xtask/manifests/compose-spec.json"))?)?;
    let file: Value = serde_saphyr::from_str(&fs::read_to_string(root().join("docker-compose.yml"))?)?;
    if let Err(error) = jsonschema::validate(&schema, &file) {
        bail!("docker-compose.yml does not fit the schema: {error} at {}", error.instance_path());
    }
    for profile in ["stand-in", "gpu", "gpu4", "load"] {
        run(tools::compose()?.args(["--profile", profile, "config", "--quiet"]))?;
    }
    Ok(())
}

/// Every resource against its schema.
fn kubernetes() -> Result<()> {
    let mut all = Vec::new();
    for entry in fs::read_dir(root().join("envoy/kubernetes"))? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        all.extend(resources(&file)?.into_iter().map(|resource| json!({ "file": file, "resource": resource })));
    }
    say(&format!("{} Kubernetes resources against their schemas", all.len()));
    let home = schemas()?;
    let mut check = Command::new(tools::node()?).arg("check.mjs").current_dir(&home).stdin(Stdio::piped()).spawn()?;
    check.stdin.take().context("its input")?.write_all(&serde_json::to_vec(&all)?)?;
    ensure!(check.wait()?.success(), "the manifests do not fit their schemas: see above");
    Ok(())
}

/// The schemas, as npm packages of pinned versions and hashes. Returns the folder they are in.
fn schemas() -> Result<PathBuf> {
    let (home, own) = (tools::tools_dir().join("manifests"), root().join("xtask/manifests"));
    fs::create_dir_all(&home)?;
    let same = |name: &str| fs::read(home.join(name)).ok() == fs::read(own.join(name)).ok();
    let is_installed = home.join("node_modules/.package-lock.json").is_file() && same("package-lock.json");
    for name in ["package.json", "package-lock.json", "check.mjs"] {
        fs::copy(own.join(name), home.join(name)).with_context(|| format!("copying {name}"))?;
    }
    if !is_installed {
        say("installing the schemas of Kubernetes resources");
        run(tools::npm()?.args(["ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]).arg(&home))
            .context("the schemas could not be installed")?;
    }
    Ok(home)
}
