//! Why a turn has no answer.

use std::fmt;

/// Most characters of an example.
const EXAMPLE_CHARS: usize = 300;

/// The kinds that failed turns are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// No connection.
    Connect,
    /// The connection ended without an answer.
    Reset,
    /// Nothing came for the whole timeout, before the answer or in it.
    Timeout,
    /// An answer that is no success.
    Status(u16),
    /// The engine reported an error inside the stream.
    InStream,
    /// The stream ended or was cut before its end marker.
    StreamCut,
    /// A chunk that is not what the API describes.
    BadChunk,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("connect"),
            Self::Reset => f.write_str("reset"),
            Self::Timeout => f.write_str("timeout"),
            Self::Status(status) => write!(f, "status_{status}"),
            Self::InStream => f.write_str("error_in_stream"),
            Self::StreamCut => f.write_str("stream_cut"),
            Self::BadChunk => f.write_str("bad_chunk"),
        }
    }
}

/// A turn that failed: what it is counted as, and what exactly was seen.
#[derive(Debug, thiserror::Error)]
#[error("{kind}: {example}")]
pub(super) struct TurnError {
    pub(super) kind: ErrorKind,
    pub(super) example: String,
}

impl TurnError {
    /// The example is shortened to what fits on a few lines.
    pub(super) fn new(kind: ErrorKind, example: impl AsRef<str>) -> Self {
        Self { kind, example: example.as_ref().trim().chars().take(EXAMPLE_CHARS).collect() }
    }

    /// No answer came.
    pub(super) fn unanswered(error: &reqwest::Error) -> Self {
        let kind = match error {
            _ if error.is_connect() => ErrorKind::Connect,
            _ if error.is_timeout() => ErrorKind::Timeout,
            _ => ErrorKind::Reset,
        };
        Self::new(kind, chain(error))
    }

    /// The answer broke off.
    pub(super) fn broken_off(error: &reqwest::Error) -> Self {
        Self::new(if error.is_timeout() { ErrorKind::Timeout } else { ErrorKind::StreamCut }, chain(error))
    }
}

/// An error with everything that caused it: the outermost says only that a request failed.
fn chain(error: &reqwest::Error) -> String {
    anyhow::Chain::new(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
