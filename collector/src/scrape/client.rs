//! The HTTP client of a pool's polls.
//!
//! One GET, over a connection that is kept, no redirect, no proxy: what is polled is named by address, and anything between would
//! only add time and a way to fail.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::{AUTHORIZATION, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::{PoolConfig, TlsConfig};
use crate::endpoint::ScrapeFailure;
use crate::http_client::{self, Bearer, BodyError, read_body};

/// The longest answer that is read, in bytes; vLLM's are 45 to 80 KB.
pub const MAX_METRICS_BYTES: usize = 8 << 20;

/// How a pool's endpoints are asked for their metrics. Clones share their connections.
#[derive(Clone, Debug)]
pub(crate) struct ScrapeClient {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    scheme: &'static str,
    bearer: Bearer,
    timeout: Duration,
}

impl ScrapeClient {
    /// Reads the pool's token and certificates; `timeout` is for a whole poll.
    pub(crate) fn new(pool: &PoolConfig, timeout: Duration) -> anyhow::Result<Self> {
        let context = || format!("pool {}", pool.cluster);
        let bearer = Bearer::read(pool.token.as_ref()).map_err(anyhow::Error::msg).with_context(context)?;
        let tls = tls(pool.tls.as_ref()).with_context(context)?;
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        let https = match pool.tls.as_ref().and_then(|tls| tls.server_name.clone()) {
            Some(name) => {
                let name =
                    ServerName::try_from(name).context("tls.server_name must be a host name or an address, without a port")?;
                https.with_server_name_resolver(hyper_rustls::FixedServerNameResolver::new(name))
            }
            None => https,
        };
        let client = Client::builder(TokioExecutor::new()).build(https.enable_http1().wrap_connector(http));
        Ok(Self { client, scheme: if pool.tls.is_some() { "https" } else { "http" }, bearer, timeout })
    }

    /// Where an endpoint's metrics are.
    pub(crate) fn url(&self, address: SocketAddr) -> Uri {
        format!("{}://{address}/metrics", self.scheme).parse().expect("an address makes a URL")
    }

    /// One poll: the text is in `buffer` afterwards, unless it failed.
    ///
    /// After a 401 the token is read again, since a token file may have been changed.
    pub(crate) async fn get(&mut self, url: Uri, buffer: &mut Vec<u8>) -> Result<(), ScrapeFailure> {
        let result = match tokio::time::timeout(self.timeout, self.exchange(url, buffer)).await {
            Ok(result) => result,
            Err(_) => Err(ScrapeFailure::Timeout),
        };
        if result == Err(ScrapeFailure::Status(401)) {
            self.bearer.read_again().map_err(ScrapeFailure::Token)?;
        }
        result
    }

    async fn exchange(&self, url: Uri, buffer: &mut Vec<u8>) -> Result<(), ScrapeFailure> {
        let mut request = Request::get(url).header(USER_AGENT, http_client::USER_AGENT);
        if let Some(token) = self.bearer.header() {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.body(Empty::new()).map_err(|error| ScrapeFailure::Broken(error.to_string()))?;
        let response = self.client.request(request).await.map_err(|error| match http_client::root_cause(&error) {
            _ if http_client::is_refused(&error) => ScrapeFailure::Refused,
            cause if error.is_connect() => ScrapeFailure::Connect(cause),
            cause => ScrapeFailure::Broken(cause),
        })?;
        if response.status() != StatusCode::OK {
            return Err(ScrapeFailure::Status(response.status().as_u16()));
        }
        read_body(response.into_body(), buffer, MAX_METRICS_BYTES).await.map_err(|error| match error {
            BodyError::TooLarge => ScrapeFailure::TooLarge,
            BodyError::Broken(error) => ScrapeFailure::Broken(http_client::root_cause(&error)),
        })
    }
}

/// Without `tls` no certificate is trusted, and none is asked for.
fn tls(config: Option<&TlsConfig>) -> anyhow::Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    if config.is_some_and(|tls| tls.insecure) {
        let any = Arc::new(AnyCertificate(provider));
        return Ok(builder.dangerous().with_custom_certificate_verifier(any).with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    match config {
        None => {}
        Some(TlsConfig { ca_file: Some(path), .. }) => {
            let what = || format!("tls.ca_file {} cannot be read: a PEM file with certificates is needed", path.display());
            for certificate in CertificateDer::pem_file_iter(path).with_context(what)? {
                roots.add(certificate.with_context(what)?).with_context(what)?;
            }
            anyhow::ensure!(!roots.is_empty(), "tls.ca_file {} holds no certificate", path.display());
        }
        Some(TlsConfig { ca_file: None, .. }) => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            anyhow::ensure!(!roots.is_empty(), "this system has no certificates of authorities; set tls.ca_file");
        }
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Accepts every certificate, as `tls.insecure` asks; signatures are checked all the same.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
