//! The model role: copies the model that a request body asks for into a header, so that Envoy's routes can go by it.
//!
//! It stands before the route role in the same listener. Envoy chooses the route again for the next filter that asks for it, which in
//! the shipped configurations is `header_mutation`; so to the route role it is as if the client had sent the header itself.

use std::rc::Rc;

use homing_routing::identity::model;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use crate::config::ModelConfig;
use crate::envoy::{Envoy, Map};
use crate::route::is_readable;

/// One request.
pub(crate) struct ModelStream {
    config: Rc<ModelConfig>,
    /// Bytes of the body that Envoy has buffered, while the model is not known.
    waits: Option<usize>,
}

impl ModelStream {
    pub(crate) fn new(config: Rc<ModelConfig>) -> Self {
        Self { config, waits: None }
    }

    /// Reads the model at the end of the body. A request without one takes the route of a request without the header.
    fn name(&mut self) -> Action {
        if let Some(size) = self.waits.take()
            && let Ok(body) = Envoy.body(size)
            && let Some(model) = model(&body)
        {
            // A refusal leaves the request as it is, and nothing is left to tell of it.
            let _ = Envoy.set_header(Map::Request, &self.config.header, &model);
        }
        Action::Continue
    }
}

impl Context for ModelStream {}

impl HttpContext for ModelStream {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let Ok(headers) = Envoy.request_headers() else { return Action::Continue };
        let has = |wanted: &[u8]| headers.iter().any(|(name, _)| name == wanted);
        // The body alone says which model it is.
        if has(self.config.header.as_bytes()) && Envoy.remove_header(Map::Request, &self.config.header).is_err() {
            return Action::Continue;
        }
        let is_post = headers.iter().any(|(name, value)| name == b":method" && value == b"POST");
        // Envoy never goes on with a request that is paused at its end.
        if !is_post || end_of_stream || !is_readable(&headers) {
            return Action::Continue;
        }
        self.waits = Some(0);
        Action::Pause
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let Some(waits) = &mut self.waits else { return Action::Continue };
        *waits = size;
        if size > self.config.max_body_bytes {
            self.waits = None;
            return Action::Continue;
        }
        if end_of_stream { self.name() } else { Action::Pause }
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        self.name()
    }
}
