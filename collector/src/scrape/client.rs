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
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::config::PoolConfig;
use crate::endpoint::ScrapeFailure;
use crate::http_client::{self, Bearer, BodyError, read_body};
use crate::tls;

/// The longest answer that is read, in bytes; vLLM's are 45 to 80 KB.
pub const MAX_METRICS_BYTES: usize = 8 << 20;

/// How long a connection is kept that nobody uses, such as one to a replica that is gone; longer than `scrape.interval` may be.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

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
        Self::with_idle_timeout(pool, timeout, IDLE_TIMEOUT)
    }

    fn with_idle_timeout(pool: &PoolConfig, timeout: Duration, idle_timeout: Duration) -> anyhow::Result<Self> {
        let context = || format!("pool {}", pool.cluster);
        let bearer = Bearer::read(pool.token.as_ref()).map_err(anyhow::Error::msg).with_context(context)?;
        let connector = tls::connector(pool.tls.as_ref()).with_context(context)?;
        // Without a timer the client only looks for idle connections to a place when it goes there again.
        let mut client = Client::builder(TokioExecutor::new());
        let client = client.pool_timer(TokioTimer::new()).pool_idle_timeout(idle_timeout).build(connector);
        Ok(Self { client, scheme: if pool.tls.is_some() { "https" } else { "http" }, bearer, timeout })
    }

    /// Where an endpoint's metrics are.
    pub(crate) fn url(&self, address: SocketAddr) -> Uri {
        format!("{}://{address}/metrics", self.scheme).parse().expect("an address makes a URL")
    }

    /// One poll: the text is in `buffer` afterwards, unless it failed.
    ///
    /// After a 401 or 403 the token is read again, since a token file may have been changed.
    pub(crate) async fn get(&mut self, url: Uri, buffer: &mut Vec<u8>) -> Result<(), ScrapeFailure> {
        let result = match tokio::time::timeout(self.timeout, self.exchange(url, buffer)).await {
            Ok(result) => result,
            Err(_) => Err(ScrapeFailure::Timeout),
        };
        if let Err(ScrapeFailure::Status(status)) = result
            && http_client::refuses_token(status)
        {
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::Config;

    #[tokio::test]
    async fn a_connection_that_nobody_uses_any_more_is_closed() {
        let config = Config::parse("pools: [{cluster: a, files: [a.json]}]", "test").expect("a configuration");
        let (timeout, idle) = (Duration::from_secs(5), Duration::from_millis(50));
        let mut client = ScrapeClient::with_idle_timeout(&config.pools[0], timeout, idle).expect("a client");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = client.url(listener.local_addr().expect("an address"));
        let replica = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut asked = [0; 4096];
            assert_ne!(stream.read(&mut asked).await.expect("a request"), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.expect("an answer");
            stream.read(&mut asked).await.expect("the end")
        });
        client.get(url, &mut Vec::new()).await.expect("an answer");
        let rest = tokio::time::timeout(Duration::from_secs(20), replica).await.expect("closed in time").expect("a replica");
        assert_eq!(rest, 0, "nothing more comes");
    }
}
