//! A request on its way through an engine, for all endpoints.

use super::App;
use super::body::Generate;
use super::driver::Ticket;
use super::error::ApiError;
use super::ranks::Placement;
use crate::engine::{Event, FinishReason, Request};
use crate::text;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use std::future::ready;
use std::io;

/// A request that was submitted, and what has come back of it.
pub(super) struct Generation {
    ticket: Ticket,
    _placement: Placement,
    output: Vec<u32>,
    block_size: usize,
    usage: Usage,
}

/// Tokens of a request, in the terms of all endpoints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) output: usize,
    /// Prompt tokens found in the prefix cache.
    pub(super) cached: usize,
    /// Prompt tokens newly put there: the rest of the prompt's full blocks.
    pub(super) created: usize,
}

/// What a client is told of an event.
pub(super) enum Progress {
    /// A token's text; the flags say whether it is the answer's first and last.
    Token { text: String, token: u32, first: bool, last: bool },
    /// The end, after the last token.
    End,
}

impl Generation {
    /// Submits a request to the rank, or to the one that the balancer chooses. Its answer is always as long as asked for.
    pub(super) fn start(app: &App, rank: Option<usize>, request: Generate) -> Self {
        let placement = app.ranks.place(rank);
        let output = text::answer(&request.prompt, request.max_tokens);
        let usage = Usage { prompt: request.prompt.len(), output: 0, cached: 0, created: 0 };
        let ticket = placement.engine().submit(|id| Request {
            id,
            prompt: request.prompt,
            output: output.clone(),
            reason: FinishReason::Length,
        });
        Self { ticket, _placement: placement, output, block_size: app.config.block_size, usage }
    }

    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// What comes next; None if the engine gave up.
    async fn next(&mut self) -> Option<Progress> {
        let event = self.ticket.next().await?;
        match event {
            Event::FirstToken { cached_tokens, .. } => {
                self.usage.cached = cached_tokens;
                self.usage.created = self.usage.prompt / self.block_size * self.block_size - cached_tokens;
            }
            Event::Token { .. } => {}
            Event::Finished { .. } => return Some(Progress::End),
        }
        let at = self.usage.output;
        self.usage.output += 1;
        let token = *self.output.get(at)?;
        Some(Progress::Token { text: text::text_of(&[token]), token, first: at == 0, last: at + 1 == self.output.len() })
    }

    /// Waits for the end: the whole answer's tokens and its usage.
    pub(super) async fn complete(mut self) -> Result<(Vec<u32>, Usage), ApiError> {
        while let Some(progress) = self.next().await {
            if matches!(progress, Progress::End) {
                return Ok((self.output, self.usage));
            }
        }
        Err(ApiError::Engine)
    }

    /// A stream of server-sent events: `frames` appends those for each progress to the text. If the engine gives up, the connection is cut.
    pub(super) fn stream(self, frames: impl FnMut(&mut String, Progress, Usage) + Send + 'static) -> Response {
        let frames = stream::unfold((Some(self), frames), |(generation, mut frames)| async {
            let mut generation = generation?;
            let Some(progress) = generation.next().await else {
                return Some((Err(io::Error::other("the engine ended the request")), (None, frames)));
            };
            let ended = matches!(progress, Progress::End);
            let mut text = String::new();
            frames(&mut text, progress, generation.usage());
            Some((Ok(Bytes::from(text)), ((!ended).then_some(generation), frames)))
        });
        event_stream(Body::from_stream(frames))
    }
}

/// A stream of one piece, of which nobody knows the length before.
pub(super) fn whole_stream(events: String) -> Response {
    event_stream(Body::from_stream(stream::once(ready(Ok::<_, io::Error>(events)))))
}

/// An answer of server-sent events.
fn event_stream(body: Body) -> Response {
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}
