//! What polling and pushing have in common as HTTP clients.

use std::error::Error;
use std::io;

use bytes::{Buf as _, Bytes};
use http_body_util::BodyExt as _;
use hyper::body::Body;
use hyper::header::HeaderValue;

use crate::config::TokenSource;

/// What both clients call themselves.
pub(crate) const USER_AGENT: &str = "homing-collector";

/// Why a body was not read.
#[derive(Debug)]
pub(crate) enum BodyError<E> {
    /// It is longer than the limit.
    TooLarge,
    /// The connection failed or the time was up.
    Broken(E),
}

/// Reads a body of at most `limit` bytes into `buffer`, whose content and length before do not matter.
pub(crate) async fn read_body<B>(mut body: B, buffer: &mut Vec<u8>, limit: usize) -> Result<(), BodyError<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    buffer.clear();
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Err(BodyError::TooLarge);
    }
    // Room for the usual body at once; what is announced beyond it is believed when it arrives.
    buffer.reserve(announced.min(128 << 10) as usize);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(BodyError::Broken)?.into_data() else { continue };
        if buffer.len() + data.remaining() > limit {
            return Err(BodyError::TooLarge);
        }
        buffer.extend_from_slice(&data);
    }
    Ok(())
}

/// A bearer token as it is sent, and where it comes from.
#[derive(Clone, Debug)]
pub(crate) struct Bearer {
    source: Option<TokenSource>,
    value: Option<HeaderValue>,
}

impl Bearer {
    /// Reads the token, if there is one.
    pub(crate) fn read(source: Option<&TokenSource>) -> Result<Self, String> {
        let mut bearer = Self { source: source.cloned(), value: None };
        bearer.read_again()?;
        Ok(bearer)
    }

    /// Reads the token again after it was refused, since a token file may have been changed.
    pub(crate) fn read_again(&mut self) -> Result<(), String> {
        let Some(source) = &self.source else { return Ok(()) };
        let mut value = HeaderValue::from_str(&format!("Bearer {}", source.read()?)).map_err(|error| error.to_string())?;
        value.set_sensitive(true);
        self.value = Some(value);
        Ok(())
    }

    /// The value of `Authorization`.
    pub(crate) fn header(&self) -> Option<&HeaderValue> {
        self.value.as_ref()
    }
}

/// Whether an answer may mean that the token is not the right one: some say 403 to a token that they do not know.
pub(crate) fn refuses_token(status: u16) -> bool {
    matches!(status, 401 | 403)
}

/// Whether nothing listens where the request went.
pub(crate) fn is_refused(error: &(dyn Error + 'static)) -> bool {
    causes(error)
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused))
}

/// The innermost cause, which says the most.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    causes(error).last().map_or_else(String::new, ToString::to_string)
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}
