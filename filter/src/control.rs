//! The control role, on a listener of its own: `POST /homing/v1/sync` takes snapshots, `GET /homing/v1/ready` says whether this Envoy
//! knows the fleet's conversations.

use core::cell::RefCell;
use std::rc::Rc;

use homing_routing::control::{Control, SyncError};
use homing_routing::metric::ErrorKind;
use homing_routing::sync::{MAX_SYNC_BYTES, READY_PATH, SYNC_PATH};
use serde::Serialize;

use crate::envoy::{Envoy, Map};
use crate::module::{Action, Stream};

/// What the streams of one control listener share on one thread.
pub(crate) struct ControlPlane {
    pub(crate) control: RefCell<Control<Envoy>>,
    pub(crate) token: String,
}

/// One exchange.
pub(crate) struct ControlStream {
    plane: Rc<ControlPlane>,
    /// Whether it has been answered; Envoy may still deliver what the client sends.
    answered: bool,
    /// How much of the body Envoy has buffered.
    buffered: usize,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: &'a str,
}

#[derive(Serialize)]
struct Unready<'a> {
    ready: bool,
    reason: &'a str,
}

impl ControlStream {
    pub(crate) fn new(plane: Rc<ControlPlane>) -> Self {
        Self { plane, answered: false, buffered: 0 }
    }

    fn count(&self, kind: ErrorKind) {
        if let Ok(mut control) = self.plane.control.try_borrow_mut() {
            control.count_error(kind);
        }
    }

    fn answer(&mut self, status: u32, body: &[u8]) -> Action {
        self.answered = true;
        if Envoy.respond(status, "homing_control", &[], body).is_err() {
            self.count(ErrorKind::Host);
        }
        Action::Pause
    }

    fn refuse(&mut self, status: u32, kind: ErrorKind, why: &str) -> Action {
        self.count(kind);
        let body = serde_json::to_vec(&ErrorBody { error: why }).unwrap_or_default();
        self.answer(status, &body)
    }

    /// Whether the request shows the token, compared in a time that does not tell how much of it was right.
    fn is_authorized(&self) -> bool {
        let wanted = self.plane.token.as_bytes();
        if wanted.is_empty() {
            return true;
        }
        let header = Envoy.header(Map::Request, "authorization").ok().flatten().unwrap_or_default();
        let shown = header.strip_prefix(b"Bearer ").unwrap_or_default();
        let difference = wanted.iter().zip(shown.iter().chain(core::iter::repeat(&0))).fold(0, |sum, (a, b)| sum | (a ^ b));
        difference == 0 && shown.len() == wanted.len()
    }

    /// Load balancers and kubelets ask this, without a token: it tells nothing else.
    fn ready(&mut self) -> Action {
        let unready = self.plane.control.try_borrow().map(|control| control.unready());
        match unready {
            Ok(Ok(None)) => self.answer(200, b"{\"ready\":true}"),
            Ok(Ok(Some(why))) => {
                let body = serde_json::to_vec(&Unready { ready: false, reason: why }).unwrap_or_default();
                self.answer(503, &body)
            }
            Ok(Err(error)) => self.refuse(500, ErrorKind::Host, &error.to_string()),
            Err(_) => self.refuse(503, ErrorKind::Host, "an exchange is under way: try again"),
        }
    }

    fn exchange(&mut self) -> Action {
        let body = match Envoy.body(self.buffered) {
            Ok(body) => body,
            Err(error) => return self.refuse(500, ErrorKind::Host, &error.to_string()),
        };
        let plane = Rc::clone(&self.plane);
        let Ok(mut control) = plane.control.try_borrow_mut() else {
            return self.refuse(503, ErrorKind::Host, "another exchange is under way: try again");
        };
        let answer = control.exchange(&body).map(|answer| serde_json::to_vec(&answer).unwrap_or_default());
        drop(control);
        match answer {
            Ok(answer) => self.answer(200, &answer),
            Err(SyncError::Host(error)) => self.refuse(500, ErrorKind::Host, &error.to_string()),
            Err(error) => self.refuse(400, ErrorKind::Refused, &error.to_string()),
        }
    }
}

impl Stream for ControlStream {
    fn on_request_headers(&mut self, end_of_stream: bool) -> Action {
        let path = Envoy.header(Map::Request, ":path").ok().flatten().unwrap_or_default();
        let path = path.split(|byte| *byte == b'?').next();
        let method = Envoy.header(Map::Request, ":method").ok().flatten();
        if path == Some(READY_PATH.as_bytes()) && matches!(method.as_deref(), Some(b"GET" | b"HEAD")) {
            return self.ready();
        }
        if !self.is_authorized() {
            return self.refuse(401, ErrorKind::Unauthorized, "show the control listener's token: `authorization: Bearer <token>`");
        }
        if path != Some(SYNC_PATH.as_bytes()) {
            return self.refuse(404, ErrorKind::Refused, "the control listener has only /homing/v1/sync and /homing/v1/ready");
        }
        if method.as_deref() != Some(b"POST") {
            return self.refuse(405, ErrorKind::Refused, "POST a snapshot to /homing/v1/sync");
        }
        if end_of_stream {
            return self.exchange();
        }
        Action::Pause
    }

    fn on_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if self.answered {
            return Action::Pause;
        }
        self.buffered = size;
        if size > MAX_SYNC_BYTES {
            return self.refuse(400, ErrorKind::Refused, &SyncError::TooLarge.to_string());
        }
        if end_of_stream { self.exchange() } else { Action::Pause }
    }

    fn on_request_trailers(&mut self) -> Action {
        if self.answered { Action::Pause } else { self.exchange() }
    }
}
