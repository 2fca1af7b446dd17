//! TLS to replicas and to Envoys.

use std::sync::Arc;

use anyhow::Context as _;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::client::WantsClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ConfigBuilder, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::TlsConfig;

/// Connects over TLS where the URL says https, and without it where it says http.
pub(crate) fn connector(config: Option<&TlsConfig>) -> anyhow::Result<HttpsConnector<HttpConnector>> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    let https = HttpsConnectorBuilder::new().with_tls_config(tls(config)?).https_or_http();
    let https = match config.and_then(|tls| tls.server_name.clone()) {
        Some(name) => {
            let name = ServerName::try_from(name).context("tls.server_name must be a host name or an address, without a port")?;
            https.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
        None => https,
    };
    Ok(https.enable_http1().wrap_connector(http))
}

/// Without `tls` no certificate is trusted, and none is asked for.
fn tls(config: Option<&TlsConfig>) -> anyhow::Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    if config.is_some_and(|tls| tls.insecure) {
        let any = Arc::new(AnyCertificate(provider));
        return shows(builder.dangerous().with_custom_certificate_verifier(any), config);
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
    shows(builder.with_root_certificates(roots), config)
}

/// Whether a certificate of the collector's own is shown, and which.
fn shows(builder: ConfigBuilder<ClientConfig, WantsClientCert>, config: Option<&TlsConfig>) -> anyhow::Result<ClientConfig> {
    let Some((chain, key)) = config.and_then(|tls| tls.cert_file.as_ref().zip(tls.key_file.as_ref())) else {
        return Ok(builder.with_no_client_auth());
    };
    let what = || format!("tls.cert_file {} with tls.key_file {} cannot be used", chain.display(), key.display());
    let certificates = CertificateDer::pem_file_iter(chain).with_context(what)?.collect::<Result<_, _>>().with_context(what)?;
    let key = PrivateKeyDer::from_pem_file(key).with_context(what)?;
    builder.with_client_auth_cert(certificates, key).with_context(what)
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
