//! The route role: one request from its headers to its end.

mod answer;
mod head;
mod line;
mod refusal;
mod verdict;

use core::cell::{Cell, RefCell};
use std::rc::Rc;

use homing_routing::host::Host;
use homing_routing::identity::Conversation;
use homing_routing::metric::ErrorKind;
use homing_routing::router::{Router, Ticket, Verdict};

use crate::envoy::Envoy;
use crate::module::{Action, Stream};
use answer::{add_debug_headers, learn};
use head::Head;
pub(crate) use head::is_readable;
use line::InLine;
pub(crate) use line::Line;
use verdict::carry_out;

const CLUSTER_NAME: &str = "xds\0cluster_name";

/// How often a thread signs in and looks whether it is its turn to count held conversations.
pub(crate) const TICK_MS: u32 = 500;

/// What the streams of one listener share on one thread.
pub(crate) struct Routes {
    pub(crate) router: RefCell<Router<Envoy>>,
    pub(crate) debug_headers: bool,
    pub(crate) max_body_bytes: usize,
    /// Whether this thread has served a request; Envoy's main thread never does.
    pub(crate) serves: Cell<bool>,
    pub(crate) line: Line,
    /// When this thread last signed in, in milliseconds since 1970.
    pub(crate) signed_in_ms: Cell<u64>,
}

/// One request.
pub(crate) struct RouteStream {
    routes: Rc<Routes>,
    /// Envoy's number for it.
    context: u32,
    state: State,
    /// What named the conversation, for the debug headers.
    source: Option<String>,
    /// How long it was held before it was sent.
    held_ms: Option<u64>,
}

enum State {
    /// Not ours, or not seen yet.
    Idle,
    /// Waiting for the end of the body.
    Reading { head: Head, named: Named, buffered: usize },
    /// Waiting for a place of its conversation.
    Held(Rc<InLine>),
    /// Answered by the filter in the replicas' place.
    Refused { cluster: Vec<u8> },
    /// Decided.
    Routed(Box<Ticket<Envoy>>),
}

/// What is known of the conversation before the body has been read.
enum Named {
    /// A header names it: only the body's size is asked for, and that it is there.
    ByHeader(Conversation),
    /// The body may name it; if it does not, this does.
    ByBody(Option<Conversation>),
}

impl Routes {
    /// What is due on a tick of this thread.
    pub(crate) fn tick(&self) {
        let Ok(mut router) = self.router.try_borrow_mut() else { return };
        let now_ms = Envoy.now_ms();
        // Ticks come more often while requests are in line.
        let signs_in = !self.line.ticks_fast() || now_ms.abs_diff(self.signed_in_ms.get()) >= u64::from(TICK_MS);
        if signs_in {
            self.signed_in_ms.set(now_ms);
            if router.heal().and_then(|()| router.sweep(self.serves.get())).is_err() {
                router.count_error(ErrorKind::Host, 1);
            }
        }
        self.line.look(&mut router, signs_in);
    }
}

impl RouteStream {
    pub(crate) fn new(routes: Rc<Routes>, context: u32) -> Self {
        Self { routes, context, state: State::Idle, source: None, held_ms: None }
    }

    /// Decides: writes the choice into the request's headers, answers it, or puts it in line.
    ///
    /// Only what `is_whole` can wait in line. Where the tick goes on with a request in the middle of its body, and the route has a retry
    /// policy, Envoy 1.40 sends the part of the body that it has buffered twice.
    fn decide(&mut self, mut head: Head, conversation: Option<Conversation>, is_whole: bool) -> Action {
        let routes = Rc::clone(&self.routes);
        let Ok(mut router) = routes.router.try_borrow_mut() else { return Action::Continue };
        // A client can claim any length.
        head.bytes = head.bytes.min(u32::try_from(routes.max_body_bytes).unwrap_or(u32::MAX));
        if routes.debug_headers {
            self.source = Some(conversation.as_ref().map_or("none", |conversation| conversation.source.as_str()).to_owned());
        }
        let Some(verdict) = router.decide(&head.cluster, &head.request(conversation.as_ref())) else { return Action::Continue };
        match verdict {
            Verdict::Hold(held) => {
                let in_line = Rc::new(InLine::new(head, conversation, held));
                self.state = State::Held(Rc::clone(&in_line));
                if is_whole {
                    routes.line.join(self.context, in_line, &mut router);
                    return Action::Pause;
                }
                let verdict = in_line.overdue(&mut router);
                self.carry_out(&in_line.head, verdict, &mut router)
            }
            decided => self.carry_out(&head, decided, &mut router),
        }
    }

    fn carry_out(&mut self, head: &Head, verdict: Verdict<Envoy>, router: &mut Router<Envoy>) -> Action {
        let Ok((state, action)) = carry_out(router, head, verdict) else { return Action::Pause };
        self.state = state;
        action
    }

    /// Finds out whether the tick has sent this request on since.
    fn catch_up(&mut self) {
        if let State::Held(in_line) = &self.state
            && let Some(released) = in_line.take_released()
        {
            self.held_ms = Some(released.held_ms);
            self.state = released.state;
        }
    }

    /// Decides at the end of the body, or where it has become too large to be read.
    fn decide_with_body(&mut self) -> Action {
        let (mut head, named, buffered) = match core::mem::replace(&mut self.state, State::Idle) {
            State::Reading { head, named, buffered } => (head, named, buffered),
            // Trailers come to a request that is in line or on its way, too.
            other => {
                self.state = other;
                return if matches!(self.state, State::Held(_)) { Action::Pause } else { Action::Continue };
            }
        };
        head.bytes = u32::try_from(buffered).unwrap_or(u32::MAX);
        let too_large = buffered > self.routes.max_body_bytes;
        let conversation = match named {
            Named::ByHeader(conversation) => Some(conversation),
            Named::ByBody(also) => {
                let named =
                    if too_large { Err(ErrorKind::BodyTooLarge) } else { self.name_by_body(&head.cluster, buffered, also.clone()) };
                named.unwrap_or_else(|kind| {
                    if let Ok(mut router) = self.routes.router.try_borrow_mut() {
                        router.count_error(kind, 1);
                    }
                    also
                })
            }
        };
        self.decide(head, conversation, !too_large)
    }

    fn name_by_body(&self, cluster: &[u8], size: usize, also: Option<Conversation>) -> Result<Option<Conversation>, ErrorKind> {
        let body = Envoy.body(size).map_err(|_| ErrorKind::Host)?;
        let router = self.routes.router.try_borrow().map_err(|_| ErrorKind::Host)?;
        Ok(router.pool(cluster).and_then(|pool| pool.namer.from_body(&body, also)))
    }
}

impl Stream for RouteStream {
    fn on_request_headers(&mut self, end_of_stream: bool) -> Action {
        self.routes.serves.set(true);
        let Ok(Some(cluster)) = Envoy.property(CLUSTER_NAME) else { return Action::Continue };
        let Ok(headers) = Envoy.request_headers() else { return Action::Continue };
        #[cfg(feature = "trap")]
        if headers.iter().any(|(name, _)| name == b"x-homing-test-trap") {
            core::arch::wasm32::unreachable();
        }
        let (named, also, wants_body, admits) = {
            let Ok(router) = self.routes.router.try_borrow() else { return Action::Continue };
            let Some(pool) = router.pool(&cluster) else { return Action::Continue };
            let affinity = pool.policy.affinity;
            let named = if affinity { pool.namer.from_headers(headers.iter()) } else { None };
            let also = if affinity && named.is_none() { pool.namer.also_from_headers(headers.iter()) } else { None };
            (named, also, affinity && pool.namer.reads_bodies(), pool.policy.admission.is_some())
        };
        let mut head = Head::new(cluster, &headers);
        if end_of_stream {
            // Envoy never goes on with a request that is paused at its end, so it must not be held: nothing is, of no size.
            head.bytes = 0;
        }
        let wants_name = named.is_none() && wants_body && head.is_post;
        // Only what is whole can wait in line, and whether there is a place for it depends on its size.
        let wants_all = admits && head.generates;
        // Only a POST carries a conversation in its body; an upgrade, which has no end, must not wait for one.
        if (wants_name || wants_all) && !end_of_stream && head.pin.is_none() && is_readable(&headers) {
            let length = head.bytes as usize;
            let named = named.map_or(Named::ByBody(also), Named::ByHeader);
            self.state = State::Reading { head, named, buffered: length };
            return if length > self.routes.max_body_bytes { self.decide_with_body() } else { Action::Pause };
        }
        self.decide(head, named.or(also), false)
    }

    fn on_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.catch_up();
        match &mut self.state {
            State::Reading { buffered, .. } => {
                *buffered = size;
                if end_of_stream || size > self.routes.max_body_bytes { self.decide_with_body() } else { Action::Pause }
            }
            State::Held(_) => Action::Pause,
            State::Idle | State::Refused { .. } | State::Routed(_) => Action::Continue,
        }
    }

    fn on_request_trailers(&mut self) -> Action {
        self.catch_up();
        self.decide_with_body()
    }

    fn on_response_headers(&mut self) {
        self.catch_up();
        if let State::Routed(ticket) = &mut self.state {
            learn(&self.routes, ticket);
        }
        if let State::Routed(ticket) = &self.state
            && self.routes.debug_headers
        {
            add_debug_headers(self, ticket);
        }
    }

    fn on_end(&mut self) {
        self.catch_up();
        let Ok(mut router) = self.routes.router.try_borrow_mut() else { return };
        match core::mem::replace(&mut self.state, State::Idle) {
            State::Idle => {}
            State::Held(in_line) => {
                self.routes.line.leave(self.context);
                router.ended_undecided(&in_line.head.cluster);
            }
            State::Reading { head: Head { cluster, .. }, .. } | State::Refused { cluster } => router.ended_undecided(&cluster),
            State::Routed(ticket) => router.ended(*ticket),
        }
    }
}
