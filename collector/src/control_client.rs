//! The HTTP client of one Envoy's control listener: plain, over TLS, or over a Unix socket.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use homing_routing::sync::SYNC_PATH;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode, Uri, body::Incoming};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioExecutor;
use tokio::time::Instant;

use crate::config::{ControlUrl, EnvoyConfig, EnvoyPlace};
use crate::http_client::{self, BodyError, read_body};
use crate::sync::SyncFailure;
use crate::tls;

/// How long a connection is kept. An Envoy that hands its sockets to a new process (hot restart) keeps the connections it has, for minutes
/// with its default drain time; the new process, which gets the clients' new connections, hears of the collector only by a new one.
const KEPT: Duration = Duration::from_secs(1);

/// One Envoy's control listener. A connection is kept for a second, no redirect is followed, and no proxy of the environment is used.
#[derive(Debug)]
pub(crate) struct ControlClient {
    way: Way,
    uri: Uri,
    /// When connections were last told to close.
    renewed: Mutex<Instant>,
}

#[derive(Debug)]
enum Way {
    Network(Client<HttpsConnector<HttpConnector>, Full<Bytes>>),
    #[cfg(unix)]
    Socket(Client<unix::SocketConnector, Full<Bytes>>),
}

/// Connects to control listeners of one entry of the configuration, by the network.
pub(crate) type ControlConnector = HttpsConnector<HttpConnector>;

/// Reads the certificates of an entry, if there are some.
pub(crate) fn connector(config: &EnvoyConfig) -> anyhow::Result<ControlConnector> {
    let is_https = config.tls.is_some() || matches!(config.place, EnvoyPlace::Url(ControlUrl::Tls(_)));
    tls::connector(is_https.then(|| config.tls.clone().unwrap_or_default()).as_ref())
}

impl ControlClient {
    /// A client of its own, so that its connections end with it.
    pub(crate) fn new(url: &ControlUrl, connector: &ControlConnector) -> anyhow::Result<Self> {
        let builder = Client::builder(TokioExecutor::new());
        let (way, base) = match url {
            ControlUrl::Tcp(_) | ControlUrl::Tls(_) => (Way::Network(builder.build(connector.clone())), url.to_string()),
            #[cfg(unix)]
            ControlUrl::Unix(path) => (Way::Socket(builder.build(unix::SocketConnector::new(path))), "http://localhost".to_owned()),
            #[cfg(not(unix))]
            ControlUrl::Unix(path) => anyhow::bail!("unix:{} needs a Unix system; use http://ip:port", path.display()),
        };
        Ok(Self { way, uri: format!("{base}{SYNC_PATH}").parse()?, renewed: Mutex::new(Instant::now()) })
    }

    /// Posts JSON and reads the answer, of at most `limit` bytes.
    pub(crate) async fn post(
        &self,
        body: Vec<u8>,
        token: Option<&HeaderValue>,
        limit: usize,
    ) -> Result<(StatusCode, Vec<u8>), SyncFailure> {
        let mut request = Request::post(&self.uri)
            .header(USER_AGENT, http_client::USER_AGENT)
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        if self.is_old() {
            request = request.header(CONNECTION, HeaderValue::from_static("close"));
        }
        let request = request.body(Full::from(body)).map_err(|error| SyncFailure::Answer(error.to_string()))?;
        let response = self.send(request).await.map_err(|error| SyncFailure::Unreachable(http_client::root_cause(&error)))?;
        let status = response.status();
        let mut answer = Vec::new();
        read_body(response.into_body(), &mut answer, limit).await.map_err(|error| match error {
            BodyError::TooLarge => SyncFailure::Answer(format!("more than {limit} bytes")),
            BodyError::Broken(error) => SyncFailure::Unreachable(http_client::root_cause(&error)),
        })?;
        Ok((status, answer))
    }

    /// Whether the connection has been kept for long enough; then the request that asks is its last.
    fn is_old(&self) -> bool {
        let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = renewed.elapsed() >= KEPT;
        if is_old {
            *renewed = Instant::now();
        }
        is_old
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Error> {
        match &self.way {
            Way::Network(client) => client.request(request).await,
            #[cfg(unix)]
            Way::Socket(client) => client.request(request).await,
        }
    }
}

#[cfg(unix)]
mod unix {
    //! Connects to a Unix socket, wherever the URL points.

    use std::future::Future;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::Uri;
    use hyper_util::rt::TokioIo;
    use tokio::net::UnixStream;
    use tower::Service;

    #[derive(Clone, Debug)]
    pub(super) struct SocketConnector(PathBuf);

    impl SocketConnector {
        pub(super) fn new(path: &Path) -> Self {
            Self(path.to_path_buf())
        }
    }

    impl Service<Uri> for SocketConnector {
        type Response = TokioIo<UnixStream>;
        type Error = io::Error;
        type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Uri) -> Self::Future {
            let path = self.0.clone();
            Box::pin(async { Ok(TokioIo::new(UnixStream::connect(path).await?)) })
        }
    }
}
