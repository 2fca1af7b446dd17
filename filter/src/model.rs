//! The model role: copies the model that a request body asks for into a header, so that Envoy's routes can go by it.
//!
//! It stands before the route role in the same listener. Envoy chooses the route again for the next filter that asks for it, which in
//! the shipped configurations is `header_mutation`; so to the route role it is as if the client had sent the header itself.

use std::rc::Rc;

use homing_routing::host::{Host, HostError, MetricId};
use homing_routing::identity::model;
use homing_routing::metric::{ErrorKind, Metric};

use crate::config::ModelConfig;
use crate::envoy::{Envoy, Map};
use crate::module::{Action, Stream};
use crate::route::is_readable;

/// What the streams of one listener share on one thread.
pub(crate) struct Models {
    config: ModelConfig,
    /// Counters of bodies too large to be read, and of calls that Envoy refused.
    too_large: MetricId,
    refused: MetricId,
}

impl Models {
    /// Defines the counters.
    pub(crate) fn new(config: ModelConfig) -> Result<Self, HostError> {
        let counter = |kind| Envoy.define(&Metric::Errors { kind });
        Ok(Self { config, too_large: counter(ErrorKind::BodyTooLarge)?, refused: counter(ErrorKind::Host)? })
    }
}

fn count(counter: MetricId) {
    // Nothing is left to tell of a refused error count.
    let _ = Envoy.add(counter, 1);
}

/// One request.
pub(crate) struct ModelStream {
    models: Rc<Models>,
    /// Bytes of the body that Envoy has buffered, while the model is not known.
    waits: Option<usize>,
}

impl ModelStream {
    pub(crate) fn new(models: Rc<Models>) -> Self {
        Self { models, waits: None }
    }

    /// Reads the model at the end of the body. A request without one takes the route of a request without the header.
    fn name(&mut self) -> Action {
        let Some(size) = self.waits.take() else { return Action::Continue };
        let named = Envoy.body(size).and_then(|body| match model(&body) {
            Some(model) => Envoy.set_header(Map::Request, &self.models.config.header, &model),
            None => Ok(()),
        });
        if named.is_err() {
            count(self.models.refused);
        }
        Action::Continue
    }
}

impl Stream for ModelStream {
    fn on_request_headers(&mut self, end_of_stream: bool) -> Action {
        let Ok(headers) = Envoy.request_headers() else {
            count(self.models.refused);
            return Action::Continue;
        };
        let header = &self.models.config.header;
        // The body alone says which model it is.
        if headers.iter().any(|(name, _)| name == header.as_bytes()) && Envoy.remove_header(Map::Request, header).is_err() {
            count(self.models.refused);
        }
        let is_post = headers.iter().any(|(name, value)| name == b":method" && value == b"POST");
        // Envoy never goes on with a request that is paused at its end.
        if !is_post || end_of_stream || !is_readable(&headers) {
            return Action::Continue;
        }
        self.waits = Some(0);
        Action::Pause
    }

    fn on_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let Some(waits) = &mut self.waits else { return Action::Continue };
        *waits = size;
        if size > self.models.config.max_body_bytes {
            self.waits = None;
            count(self.models.too_large);
            return Action::Continue;
        }
        if end_of_stream { self.name() } else { Action::Pause }
    }

    fn on_request_trailers(&mut self) -> Action {
        self.name()
    }
}
