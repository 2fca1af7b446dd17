//! What polling and pushing have in common as HTTP clients.

use std::error::Error;
use std::io;
use std::time::Duration;

use bytes::BytesMut;
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Response};

/// Why a body was not read.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// It is longer than the limit.
    TooLarge,
    /// The connection failed or the time was up.
    Broken(reqwest::Error),
}

/// A client that keeps connections, follows no redirect and uses no proxy from the environment: what it talks to is named by
/// address, and a proxy between would only add time and a way to fail. `timeout` is for a whole exchange.
pub(crate) fn builder(timeout: Duration) -> ClientBuilder {
    Client::builder().timeout(timeout).redirect(Policy::none()).no_proxy().tcp_nodelay(true).user_agent("homing-collector")
}

/// Reads a body of at most `limit` bytes.
pub(crate) async fn read_body(mut response: Response, limit: usize) -> Result<BytesMut, BodyError> {
    let announced = response.content_length().unwrap_or(0);
    if announced > limit as u64 {
        return Err(BodyError::TooLarge);
    }
    // Room for the usual body at once; what is announced beyond it is believed when it arrives.
    let mut body = BytesMut::with_capacity(announced.min(128 << 10) as usize);
    while let Some(chunk) = response.chunk().await.map_err(BodyError::Broken)? {
        if body.len() + chunk.len() > limit {
            return Err(BodyError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Whether nothing listens where the request went.
pub(crate) fn is_refused(error: &reqwest::Error) -> bool {
    causes(error)
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused))
}

/// The innermost cause, which says the most.
pub(crate) fn root_cause(error: &reqwest::Error) -> String {
    causes(error).last().map_or_else(String::new, ToString::to_string)
}

fn causes<'a>(error: &'a reqwest::Error) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |&error| error.source())
}
