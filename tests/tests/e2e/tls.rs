//! `envoy/tls.yaml`: clients over TLS, and a collector that shows a certificate and a token.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use homing_tests::certificates::Certificates;
use homing_tests::{eventually, tools};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use xtask::envoy::{Envoy, EnvoyConfig};
use xtask::process::Process;
use xtask::stack::MODEL;
use xtask::tools::root;

const TOKEN: &str = "a-long-random-token";

struct Site {
    envoy: Envoy,
    certificates: Certificates,
    replica: (Process, SocketAddr),
    dir: TempDir,
}

impl Site {
    async fn start() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
        let certificates = Certificates::write()?;
        let args = ["replica", "--ready-json", "--listen", "127.0.0.1:0", "--speed", "100", "--model", MODEL];
        let (process, ready) = Process::start_ready("replica", &tools().bench, &args.map(str::to_owned), dir.path()).await?;
        let address: SocketAddr = ready["address"].as_str().context("an address")?.parse()?;
        let mut config = EnvoyConfig::read(&root().join("envoy/tls.yaml"))?;
        config.use_free_ports();
        config.set_filter(&tools().filter);
        config.set_endpoints(MODEL, &[address]);
        config.filter_config("control").context("the control filter")?["token"] = json!(TOKEN);
        certificates.used_by(&mut config)?;
        let envoy = Envoy::start(&tools().envoy, &config, 1, dir.path()).await?;
        Ok(Self { envoy, certificates, replica: (process, address), dir })
    }

    /// Starts a collector and waits until `told` holds of what its API says of Envoy.
    async fn collector(&self, who: &str, token: &str, told: impl Fn(&Value) -> bool) -> Result<()> {
        let file = |name: &str| self.certificates.file(name).display().to_string();
        let tls = json!({
            "ca_file": file("ca.pem"), "server_name": "envoy.internal",
            "cert_file": file(&format!("{who}.pem")), "key_file": file(&format!("{who}.key")),
        });
        let config = json!({
            "listen": "127.0.0.1:0",
            "envoys": [{ "url": format!("https://{}", self.envoy.listener("control")?), "token": token, "tls": tls }],
            "pools": [{ "cluster": MODEL, "max_num_seqs": 32, "replicas": [{ "address": self.replica.1.to_string() }] }],
        });
        let path = self.dir.path().join("collector.yaml");
        std::fs::write(&path, serde_json::to_vec_pretty(&config)?)?;
        let args = ["run".to_owned(), path.display().to_string(), "--ready-json".to_owned()];
        let (_process, ready) = Process::start_ready("collector", &tools().collector, &args, self.dir.path()).await?;
        let api = format!("http://{}/api/v1/pools", ready["address"].as_str().context("an address")?);
        let mut last = Value::Null;
        let waited = eventually("the collector's word on Envoy", async || {
            last = reqwest::get(&api).await?.json::<Value>().await?["envoys"][0].take();
            Ok(told(&last))
        });
        waited.await.with_context(|| format!("it says {last}"))
    }

    /// Asks a listener over TLS, with a certificate if one is named; the first line of the answer.
    async fn ask(&self, listener: &str, path: &str, who: Option<&str>) -> Result<String> {
        let pem = |name: String| -> PathBuf { self.certificates.file(&name) };
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(pem("ca.pem".to_owned()))?)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match who {
            Some(who) => {
                let chain = vec![CertificateDer::from_pem_file(pem(format!("{who}.pem")))?];
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(pem(format!("{who}.key")))?)?
            }
            None => builder.with_no_client_auth(),
        };
        let stream = TcpStream::connect(self.envoy.listener(listener)?).await?;
        let mut stream = TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("envoy.internal")?, stream).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: envoy.internal\r\nconnection: close\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_collector_is_heard_with_its_certificate_and_token() -> Result<()> {
    let site = Site::start().await?;
    site.collector("collector", TOKEN, |envoy| envoy["answered"].as_u64() > Some(0)).await?;
    assert_eq!(site.ask("proxy", "/v1/models", None).await?, "HTTP/1.1 200 OK", "clients need no certificate");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn either_alone_is_not_enough() -> Result<()> {
    let site = Site::start().await?;
    let says = |part: &'static str| move |envoy: &Value| envoy["problem"].as_str().is_some_and(|problem| problem.contains(part));
    site.collector("collector", "another-token", says("HTTP status 401")).await?;
    site.collector("stranger", TOKEN, says("cannot be reached")).await?;
    assert_eq!(site.ask("control", "/", Some("collector")).await?, "HTTP/1.1 401 Unauthorized");
    for who in [None, Some("stranger")] {
        assert!(site.ask("control", "/", who).await.is_err(), "{who:?} was let in");
    }
    Ok(())
}
