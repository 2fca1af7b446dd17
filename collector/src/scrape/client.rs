//! The HTTP client of a pool's polls.
//!
//! One GET, over a connection that is kept, no redirect, no proxy: what is polled is named by address, and anything between would
//! only add time and a way to fail.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::{AUTHORIZATION, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::config::PoolConfig;
use crate::endpoint::ScrapeFailure;
use crate::http_client::{self, Bearer, BodyError, read_body};
use crate::tls;

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
        let connector = tls::connector(pool.tls.as_ref()).with_context(context)?;
        let client = Client::builder(TokioExecutor::new()).build(connector);
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
