//! What the decision needs of a request's headers.

use homing_routing::identity::{Conversation, needs_body};
use homing_routing::router::Request;

use crate::envoy::Headers;

/// What the decision needs of a request's headers.
pub(super) struct Head {
    pub(super) cluster: Vec<u8>,
    pub(super) pin: Option<String>,
    /// The client's own rank header: whether it is there, and what it says.
    pub(super) has_rank: bool,
    pub(super) rank: Option<u16>,
    pub(super) ignores_rank: bool,
    pub(super) is_post: bool,
    pub(super) generates: bool,
    /// The body's size as the client says, 0 if it does not; once the body has been read, its size.
    pub(super) bytes: u32,
    pub(super) anthropic: bool,
}

impl Head {
    pub(super) fn new(cluster: Vec<u8>, headers: &Headers) -> Self {
        let mut head = Self {
            cluster,
            pin: None,
            has_rank: false,
            rank: None,
            ignores_rank: false,
            is_post: false,
            generates: false,
            bytes: 0,
            anthropic: false,
        };
        let (mut method, mut path) = (&b""[..], &b""[..]);
        for (name, value) in headers.iter() {
            match name {
                b":method" => method = value,
                b":path" => path = value,
                b"content-length" => head.bytes = core::str::from_utf8(value).ok().and_then(|n| n.parse().ok()).unwrap_or(0),
                b"x-homing-replica" => head.pin = Some(String::from_utf8_lossy(value).into_owned()),
                b"x-data-parallel-rank" => {
                    head.has_rank = true;
                    head.rank = core::str::from_utf8(value).ok().and_then(|rank| rank.trim().parse().ok());
                }
                _ => {}
            }
        }
        let path = path.split(|byte| *byte == b'?').next().unwrap_or_default();
        head.is_post = method == b"POST";
        head.generates = head.is_post && !SILENT.iter().any(|silent| path.ends_with(silent));
        // vLLM reads the rank for every other call, and none here.
        head.ignores_rank = path.ends_with(b"/responses");
        head.anthropic = path.ends_with(b"/messages");
        head
    }

    /// The request as the decision takes it.
    pub(super) fn request<'a>(&'a self, conversation: Option<&'a Conversation>) -> Request<'a> {
        Request {
            conversation,
            generates: self.generates,
            pin: self.pin.as_deref(),
            rank: self.rank,
            ignores_rank: self.ignores_rank,
            bytes: self.bytes,
        }
    }
}

/// POST calls that generate nothing, so that no cache is worth keeping a home for.
const SILENT: [&[u8]; 11] = [
    b"/count_tokens",
    b"/input_tokens",
    b"/tokenize",
    b"/detokenize",
    b"/models",
    b"/reset_prefix_cache",
    b"/embeddings",
    b"/pooling",
    b"/classify",
    b"/rerank",
    b"/score",
];

/// Whether the body can be read for a conversation: it is not compressed, and not of a kind that is never JSON. Those may be
/// streams that do not end.
pub(crate) fn is_readable(headers: &Headers) -> bool {
    let header = |wanted: &[u8]| headers.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
    let never_json = |kind: &[u8]| NEVER_JSON.iter().any(|prefix| kind.starts_with(prefix));
    needs_body(header(b"content-encoding")) && !header(b"content-type").is_some_and(never_json)
}

const NEVER_JSON: [&[u8]; 6] = [b"multipart/", b"application/grpc", b"application/octet-stream", b"audio/", b"image/", b"video/"];
