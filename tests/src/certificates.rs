//! Certificates that live as long as a test: an authority, and what it vouches for.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::Value;
use tempfile::TempDir;
use xtask::envoy::EnvoyConfig;

/// The files that `envoy/tls.yaml` and the collector name, and those of a stranger with a certificate of the same authority.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    /// Makes them and writes them into a folder of their own.
    ///
    /// # Errors
    /// If they cannot be made or written.
    pub fn write() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("homing-certificates-").tempdir()?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // A certificate whose subject is its issuer's would be taken for one that vouches for itself.
        authority.distinguished_name.push(DnType::CommonName, "an authority");
        let key = KeyPair::generate()?;
        std::fs::write(folder.path().join("ca.pem"), authority.self_signed(&key)?.pem())?;
        let issuer = Issuer::new(authority, key);
        for (file, name) in [("envoy", "envoy.internal"), ("collector", "collector.internal"), ("stranger", "stranger.internal")] {
            let key = KeyPair::generate()?;
            let mut params = CertificateParams::new(vec![name.to_owned(), "127.0.0.1".to_owned()])?;
            params.distinguished_name.push(DnType::CommonName, name);
            std::fs::write(folder.path().join(format!("{file}.pem")), params.signed_by(&key, &issuer)?.pem())?;
            std::fs::write(folder.path().join(format!("{file}.key")), key.serialize_pem())?;
        }
        Ok(Self(folder))
    }

    /// Where a file is: `ca.pem`, or `pem` and `key` of `envoy`, `collector` and `stranger`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Lets a configuration find the files it names.
    ///
    /// # Errors
    /// None; so that it can stand where a change may fail.
    pub fn used_by(&self, config: &mut EnvoyConfig) -> Result<()> {
        find(&mut config.0, self.0.path());
        Ok(())
    }
}

fn find(value: &mut Value, folder: &Path) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|value| find(value, folder)),
        Value::Array(values) => values.iter_mut().for_each(|value| find(value, folder)),
        Value::String(name) if name.ends_with(".pem") || name.ends_with(".key") => {
            *name = folder.join(&*name).display().to_string();
        }
        _ => {}
    }
}
