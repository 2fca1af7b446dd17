//! Replicas that are polled over TLS or ask for a token, and Envoys that are found and told over TLS.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::serve::Listener;
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::fakes::{Behaviour, FakeEnvoy, FakeReplica, IDLE, Metrics, config_with, envoys, run, says};

/// A listener that speaks TLS; connections that do not are dropped.
struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.tcp).await;
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

/// A replica with a certificate for `name`, which is in the file as well.
async fn replica(name: &str, folder: &tempfile::TempDir) -> (FakeReplica, PathBuf) {
    let (listener, file) = listen(name, folder).await;
    (FakeReplica::start_on(listener, Metrics::Text(IDLE.to_owned())).await, file)
}

/// A listener with a certificate for `name`, which is in the file as well.
async fn listen(name: &str, folder: &tempfile::TempDir) -> (TlsListener, PathBuf) {
    let certified = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("TLS versions")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("a certificate and its key");
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, certified.cert.pem()).expect("a file");
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    (TlsListener { tcp, acceptor: TlsAcceptor::from(Arc::new(config)) }, file)
}

fn keys(address: SocketAddr, tls: &str) -> String {
    format!("  tls: {{ {tls} }}\n  replicas: [{{ address: '{address}' }}]\n")
}

/// The configuration with time enough for a handshake on a busy machine.
fn config(address: SocketAddr, tls: &str) -> String {
    config_with(&keys(address, tls), "").replace("300ms", "5s")
}

#[tokio::test]
async fn a_certificate_of_the_given_authority_for_the_address_is_trusted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (replica, file) = replica("127.0.0.1", &folder).await;
    let collector = run(&config(replica.address(), &format!("ca_file: '{}'", file.display()))).await;
    collector.until_replica(0, "ready").await;
}

#[tokio::test]
async fn a_certificate_for_a_name_is_trusted_under_that_name_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let (replica, file) = replica("vllm.internal", &folder).await;
    let trusted = format!("ca_file: '{}'", file.display());
    let collector = run(&config(replica.address(), &format!("{trusted}, server_name: vllm.internal"))).await;
    collector.until_replica(0, "ready").await;
    let collector = run(&config(replica.address(), &trusted)).await;
    let refused = |status: &Value| says(&status["pools"][0]["replicas"][0]["problem"], "certificate");
    let status = collector.until("a refusal", refused).await;
    assert_eq!(status["pools"][0]["replicas"][0]["state"], "down");
}

#[tokio::test]
async fn an_unknown_certificate_is_refused_unless_any_is_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (replica, _) = replica("vllm.internal", &folder).await;
    let (_, other) = self::replica("127.0.0.1", &folder).await;
    let collector = run(&config(replica.address(), &format!("ca_file: '{}'", other.display()))).await;
    let refused = |status: &Value| says(&status["pools"][0]["replicas"][0]["problem"], "certificate");
    collector.until("a refusal", refused).await;
    let collector = run(&config(replica.address(), "insecure: true")).await;
    collector.until_replica(0, "ready").await;
}

#[tokio::test]
async fn a_replica_that_speaks_no_tls_is_down_under_tls() {
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let collector = run(&config(replica.address(), "insecure: true")).await;
    let status = collector.until("a failure", |status| status["pools"][0]["replicas"][0]["problem"].is_string()).await;
    assert_eq!(status["pools"][0]["replicas"][0]["state"], "down");
}

#[tokio::test]
async fn a_ca_file_that_is_none_ends_the_start_with_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, "no certificate\n").expect("a file");
    let text = config("127.0.0.1:1".parse().expect("an address"), &format!("ca_file: '{}'", file.display()));
    let parsed = homing_collector::config::Config::parse(&text, "test.yaml").expect("a configuration");
    let error = homing_collector::Collector::start(&parsed).await.expect_err("no certificate");
    let text = format!("{error:#}");
    assert!(text.contains("pool pool") && text.contains("ca.pem"), "{text}");
}

#[tokio::test]
async fn envoys_that_a_name_leads_to_are_reached_over_https_where_their_entry_has_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    let replica = FakeReplica::start(Metrics::Text(IDLE.to_owned())).await;
    let (listener, file) = listen("envoy.internal", &folder).await;
    let envoy = FakeEnvoy::start_on(listener, Behaviour::Obey).await;
    let dns = format!("dns: {{ name: localhost, port: {}, family: v4_only }}", envoy.server.address.port());
    let tls = format!("tls: {{ ca_file: '{}', server_name: envoy.internal }}", file.display());
    let collector = run(&crate::fakes::config(&[replica.address()], &envoys(&[&format!("{dns}, {tls}")]))).await;
    let seen = collector.until_envoy(0, "taken", |envoy| envoy["answered"].as_u64() >= Some(1)).await;
    assert_eq!(seen["url"], format!("https://{}", envoy.server.address));
}

#[tokio::test]
async fn a_token_is_sent_to_replicas_and_a_changed_token_file_is_read_again() {
    for refusal in [401, 403] {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("token");
        std::fs::write(&file, "old\n").expect("a file");
        let replica = FakeReplica::start(Metrics::Want("old", refusal)).await;
        let keys = format!("  token_file: '{}'\n  replicas: [{{ address: '{}' }}]\n", file.display(), replica.address());
        let collector = run(&config_with(&keys, "")).await;
        collector.until_replica(0, "ready").await;

        replica.set(Metrics::Want("new", refusal));
        collector.until("a refusal", |status| says(&status["pools"][0]["replicas"][0]["problem"], "pools[].token")).await;
        std::fs::write(&file, "new\n").expect("a file");
        collector.until_replica(0, "ready").await;
    }
}
