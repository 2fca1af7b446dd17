//! The route role: one request from its headers to its end.

use core::cell::{Cell, RefCell};
use std::rc::Rc;

use homing_routing::identity::{Conversation, needs_body};
use homing_routing::metric::ErrorKind;
use homing_routing::outcome::Outcome;
use homing_routing::router::{Request, Router, Ticket, Verdict};
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use serde::Serialize;

use crate::envoy::{Envoy, Headers, Map};

/// Carries the chosen addresses to `header_to_metadata`, which removes it.
const TARGETS: &str = "x-homing-targets";
/// Names a replica: in a request the one a client pins, in a response the one that served it.
const REPLICA: &str = "x-homing-replica";
/// The data-parallel rank, as vLLM reads it.
const RANK: &str = "x-data-parallel-rank";
const OUTCOME: &str = "x-homing-outcome";
const SOURCE: &str = "x-homing-source";
const CONVERSATION: &str = "x-homing-conversation";

const CLUSTER_NAME: &str = "xds\0cluster_name";
const UPSTREAM_ADDRESS: &str = "upstream\0address";
const CODE_DETAILS: &str = "response\0code_details";
const ATTEMPTS: &str = "upstream\0request_attempt_count";

/// What the streams of one listener share on one thread.
pub(crate) struct Routes {
    pub(crate) router: RefCell<Router<Envoy>>,
    pub(crate) debug_headers: bool,
    pub(crate) max_body_bytes: usize,
    /// Whether this thread has served a request; Envoy's main thread never does.
    pub(crate) serves: Cell<bool>,
}

/// One request.
pub(crate) struct RouteStream {
    routes: Rc<Routes>,
    state: State,
    /// What named the conversation, for the debug headers.
    source: Option<String>,
}

enum State {
    /// Not ours, or not seen yet.
    Idle,
    /// Waiting for the end of the body, which names the conversation; if it does not, `also` does.
    Waiting { head: Head, also: Option<Conversation>, buffered: usize },
    /// Answered by the filter in the replicas' place.
    Refused { cluster: Vec<u8> },
    /// Decided.
    Routed(Box<Ticket<Envoy>>),
}

/// What the decision needs of the request's headers.
struct Head {
    cluster: Vec<u8>,
    pin: Option<String>,
    /// The client's own rank header: whether it is there, and what it says.
    has_rank: bool,
    rank: Option<u16>,
    ignores_rank: bool,
    is_post: bool,
    generates: bool,
    bytes: u32,
    anthropic: bool,
}

impl Head {
    fn new(cluster: Vec<u8>, headers: &Headers) -> Self {
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

impl RouteStream {
    pub(crate) fn new(routes: Rc<Routes>) -> Self {
        Self { routes, state: State::Idle, source: None }
    }

    /// Decides and writes the choice into the request's headers.
    fn decide(&mut self, head: &Head, conversation: Option<&Conversation>) -> Action {
        let Ok(mut router) = self.routes.router.try_borrow_mut() else { return Action::Continue };
        let request = Request {
            conversation,
            generates: head.generates,
            pin: head.pin.as_deref(),
            rank: head.rank,
            ignores_rank: head.ignores_rank,
            bytes: head.bytes,
        };
        match router.decide(&head.cluster, &request) {
            None => Action::Continue,
            Some(Verdict::Refuse(why)) => {
                self.state = State::Refused { cluster: head.cluster.clone() };
                if Envoy.respond(400, "homing_pin", &refusal(&why, head.anthropic)).is_ok() {
                    return Action::Pause;
                }
                router.count_error(ErrorKind::Host, 1);
                Action::Continue
            }
            Some(Verdict::Go(ticket)) => {
                if send(head, &ticket).is_err() {
                    router.count_error(ErrorKind::Host, 1);
                }
                if self.routes.debug_headers {
                    self.source = Some(conversation.map_or("none", |conversation| conversation.source.as_str()).to_owned());
                }
                self.state = State::Routed(Box::new(ticket));
                Action::Continue
            }
        }
    }

    /// Decides at the end of the body, or where it has become too large to be read.
    fn decide_with_body(&mut self) -> Action {
        let (mut head, also, buffered) = match core::mem::replace(&mut self.state, State::Idle) {
            State::Waiting { head, also, buffered } => (head, also, buffered),
            // Trailers come to a request that is on its way, too.
            other => {
                self.state = other;
                return Action::Continue;
            }
        };
        head.bytes = u32::try_from(buffered).unwrap_or(u32::MAX);
        let too_large = buffered > self.routes.max_body_bytes;
        let named = if too_large { Err(ErrorKind::BodyTooLarge) } else { self.name_by_body(&head.cluster, buffered, also.clone()) };
        let conversation = named.unwrap_or_else(|kind| {
            if let Ok(mut router) = self.routes.router.try_borrow_mut() {
                router.count_error(kind, 1);
            }
            also
        });
        self.decide(&head, conversation.as_ref())
    }

    fn name_by_body(&self, cluster: &[u8], size: usize, also: Option<Conversation>) -> Result<Option<Conversation>, ErrorKind> {
        let body = Envoy.body(size).map_err(|_| ErrorKind::Host)?;
        let router = self.routes.router.try_borrow().map_err(|_| ErrorKind::Host)?;
        Ok(router.pool(cluster).and_then(|pool| pool.namer.from_body(&body, also)))
    }
}

impl Context for RouteStream {}

impl HttpContext for RouteStream {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        self.routes.serves.set(true);
        let Ok(Some(cluster)) = Envoy.property(CLUSTER_NAME) else { return Action::Continue };
        let Ok(headers) = Envoy.request_headers() else { return Action::Continue };
        #[cfg(feature = "trap")]
        if headers.iter().any(|(name, _)| name == b"x-homing-test-trap") {
            core::arch::wasm32::unreachable();
        }
        let (conversation, also, wants_body) = {
            let Ok(router) = self.routes.router.try_borrow() else { return Action::Continue };
            let Some(pool) = router.pool(&cluster) else { return Action::Continue };
            let affinity = pool.policy.affinity;
            let conversation = if affinity { pool.namer.from_headers(headers.iter()) } else { None };
            let also = if affinity && conversation.is_none() { pool.namer.also_from_headers(headers.iter()) } else { None };
            (conversation, also, affinity && pool.namer.reads_bodies())
        };
        let mut head = Head::new(cluster, &headers);
        // Only a POST carries a conversation in its body; an upgrade, which has no end, must not wait for one.
        if conversation.is_none() && wants_body && head.is_post && !end_of_stream && head.pin.is_none() && is_readable(&headers) {
            let length = head.bytes as usize;
            self.state = State::Waiting { head, also, buffered: length };
            return if length > self.routes.max_body_bytes { self.decide_with_body() } else { Action::Pause };
        }
        // A client can claim any length.
        head.bytes = head.bytes.min(u32::try_from(self.routes.max_body_bytes).unwrap_or(u32::MAX));
        self.decide(&head, conversation.or(also).as_ref())
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let State::Waiting { buffered, .. } = &mut self.state else { return Action::Continue };
        *buffered = size;
        if end_of_stream || size > self.routes.max_body_bytes { self.decide_with_body() } else { Action::Pause }
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        self.decide_with_body()
    }

    fn on_http_response_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        if let State::Routed(ticket) = &mut self.state {
            learn(&self.routes, ticket);
            if self.routes.debug_headers {
                add_debug_headers(ticket, self.source.as_deref());
            }
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        let Ok(mut router) = self.routes.router.try_borrow_mut() else { return };
        match core::mem::replace(&mut self.state, State::Idle) {
            State::Idle => {}
            State::Waiting { head: Head { cluster, .. }, .. } | State::Refused { cluster } => router.ended_undecided(&cluster),
            State::Routed(ticket) => router.ended(*ticket),
        }
    }
}

/// Learns from Envoy where the request is served.
fn learn(routes: &Routes, ticket: &mut Ticket<Envoy>) {
    let Ok(mut router) = routes.router.try_borrow_mut() else { return };
    let status = Envoy.header(Map::Response, ":status").ok().flatten().unwrap_or_default();
    let (is_error, failed) = (matches!(status.first(), Some(b'4' | b'5')), status.first() == Some(&b'5'));
    let from_replica = || !is_error || Envoy.property(CODE_DETAILS).ok().flatten().as_deref() == Some(b"via_upstream");
    let address = Envoy.property(UPSTREAM_ADDRESS).ok().flatten().and_then(|bytes| String::from_utf8(bytes).ok());
    let Some(address) = address.filter(|_| from_replica()) else {
        if failed {
            router.not_served(ticket);
        }
        return;
    };
    router.served(ticket, &address, failed);
    let moved = ticket.served().is_some_and(|served| served.moved);
    if moved && Envoy.property(ATTEMPTS).ok().flatten().as_deref() == Some(&1_u64.to_le_bytes()[..]) {
        router.count_error(ErrorKind::Mismatch, 1);
    }
}

/// Tells the client where its request was served, and why.
fn add_debug_headers(ticket: &Ticket<Envoy>, source: Option<&str>) {
    let Some(served) = ticket.served() else { return };
    let set = |name, value: &str| {
        // A response whose headers cannot be changed is still right.
        let _ = Envoy.set_header(Map::Response, name, value);
    };
    set(OUTCOME, served.outcome.as_str());
    if let Some(replica) = &served.replica {
        set(REPLICA, &replica.name.to_string());
    }
    if let Some(source) = source {
        set(SOURCE, source);
    }
    if let Some(conversation) = ticket.conversation() {
        let digest = conversation.to_string();
        set(CONVERSATION, digest.get(..16).unwrap_or_default());
    }
}

/// Whether the body can be read for a conversation: it is not compressed, and not of a kind that is never JSON. Those may be
/// streams that do not end.
fn is_readable(headers: &Headers) -> bool {
    let header = |wanted: &[u8]| headers.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
    let never_json = |kind: &[u8]| NEVER_JSON.iter().any(|prefix| kind.starts_with(prefix));
    needs_body(header(b"content-encoding")) && !header(b"content-type").is_some_and(never_json)
}

const NEVER_JSON: [&[u8]; 6] = [b"multipart/", b"application/grpc", b"application/octet-stream", b"audio/", b"image/", b"video/"];

/// Writes the choice into the request's headers and takes the client's own routing headers out.
fn send(head: &Head, ticket: &Ticket<Envoy>) -> Result<(), homing_routing::host::HostError> {
    if head.pin.is_some() {
        Envoy.remove_header(Map::Request, REPLICA)?;
    }
    match ticket.chosen().and_then(|chosen| chosen.name.rank) {
        Some(rank) => Envoy.set_header(Map::Request, RANK, &rank.to_string())?,
        // Where Envoy chooses, the engine may still read it.
        None if head.has_rank && ticket.planned() != Outcome::Passed => Envoy.remove_header(Map::Request, RANK)?,
        None => {}
    }
    let mut addresses = String::with_capacity(64);
    for address in ticket.addresses() {
        if !addresses.is_empty() {
            addresses.push(',');
        }
        addresses.push_str(address);
    }
    if addresses.is_empty() { Ok(()) } else { Envoy.set_header(Map::Request, TARGETS, &addresses) }
}

#[derive(Serialize)]
struct OpenAiRefusal<'a> {
    error: RefusalDetail<'a>,
}

#[derive(Serialize)]
struct AnthropicRefusal<'a> {
    r#type: &'static str,
    error: RefusalDetail<'a>,
}

#[derive(Serialize)]
struct RefusalDetail<'a> {
    r#type: &'static str,
    message: &'a str,
}

/// An error body in the shape the client's API has.
fn refusal(why: &str, anthropic: bool) -> Vec<u8> {
    let error = RefusalDetail { r#type: "invalid_request_error", message: why };
    if anthropic {
        serde_json::to_vec(&AnthropicRefusal { r#type: "error", error }).unwrap_or_default()
    } else {
        serde_json::to_vec(&OpenAiRefusal { error }).unwrap_or_default()
    }
}
