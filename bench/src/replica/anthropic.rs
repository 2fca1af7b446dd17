//! `/v1/messages` and `/v1/messages/count_tokens`: answers in Anthropic's form, as vLLM gives them.

use super::App;
use super::body;
use super::generation::{Generation, Progress, Usage, whole_stream};
use super::ids::RequestIds;
use super::version::Version;
use crate::text;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use std::fmt::Write;

#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    content: &'a [Block<'a>],
    model: &'a str,
    stop_reason: Option<&'static str>,
    /// Only where a stream starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_sequence: Option<()>,
    usage: UsageJson,
}

#[derive(Serialize)]
struct Block<'a> {
    r#type: &'static str,
    text: &'a str,
}

#[derive(Serialize)]
struct UsageJson {
    input_tokens: usize,
    output_tokens: usize,
    #[serde(flatten)]
    cache: Option<CacheUsage>,
}

#[derive(Serialize)]
struct CacheUsage {
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum StreamEvent<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { content_block: Block<'a>, index: u32 },
    ContentBlockDelta { delta: Block<'a>, index: u32 },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: StopDelta, usage: UsageJson },
    MessageStop,
}

#[derive(Serialize)]
struct StopDelta {
    stop_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_sequence: Option<()>,
}

#[derive(Serialize)]
struct Count {
    input_tokens: usize,
    context_management: OriginalCount,
}

#[derive(Serialize)]
struct OriginalCount {
    original_input_tokens: usize,
}

impl UsageJson {
    /// At a stream's start, the whole prompt.
    fn at_start(usage: Usage) -> Self {
        Self { input_tokens: usage.prompt, output_tokens: 0, cache: None }
    }

    /// At the end, the prompt less what the cache had and what was put there.
    fn at_end(usage: Usage) -> Self {
        let cache = CacheUsage { cache_creation_input_tokens: usage.created, cache_read_input_tokens: usage.cached };
        Self { input_tokens: usage.prompt - usage.cached - usage.created, output_tokens: usage.output, cache: Some(cache) }
    }
}

impl StreamEvent<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }

    fn write(&self, out: &mut String) {
        let _ = write!(out, "event: {}\ndata: {}\n\n", self.name(), super::json(self));
    }
}

/// `POST /v1/messages`.
pub(super) async fn messages(
    State(app): State<App>,
    Extension(ids): Extension<RequestIds>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let request = match body::messages(&body, app.limits()) {
        Ok(request) => request,
        Err(error) => return error.anthropic(app.version),
    };
    drop(body);
    let rank = match app.ranks.asked_for(&headers) {
        Ok(rank) => rank,
        Err(error) if request.stream => {
            return whole_stream(format!("event: error\ndata: {}\n\n", error.anthropic_event(app.version)));
        }
        Err(error) => return error.anthropic(app.version),
    };
    let stream = request.stream;
    let generation = Generation::start(&app, rank, request);
    if stream {
        return streamed(&app, &ids, generation);
    }
    match generation.complete().await {
        Ok((tokens, usage)) => {
            let (id, text) = (ids.chat_completion(), text::text_of(&tokens));
            let content = [Block { r#type: "text", text: &text }];
            let message = Message {
                stop_reason: Some("max_tokens"),
                stop_sequence: None,
                usage: UsageJson::at_end(usage),
                ..opening(&id, &app.model, &content, usage)
            };
            super::json_response(StatusCode::OK, super::json(&message))
        }
        Err(error) => error.anthropic(app.version),
    }
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(State(app): State<App>, body: Bytes) -> Response {
    match body::count_tokens(&body, app.limits()) {
        Ok(prompt) => {
            let (input_tokens, original_input_tokens) = (prompt.len(), prompt.len());
            let count = Count { input_tokens, context_management: OriginalCount { original_input_tokens } };
            super::json_response(StatusCode::OK, super::json(&count))
        }
        Err(error) => error.anthropic(app.version),
    }
}

fn opening<'a>(id: &'a str, model: &'a str, content: &'a [Block<'a>], usage: Usage) -> Message<'a> {
    Message {
        id,
        r#type: "message",
        role: "assistant",
        content,
        model,
        stop_reason: None,
        stop_sequence: Some(()),
        usage: UsageJson::at_start(usage),
    }
}

fn streamed(app: &App, ids: &RequestIds, generation: Generation) -> Response {
    let (id, model, version) = (ids.chat_completion(), app.model.clone(), app.version);
    generation.stream(move |out, progress, usage| match progress {
        Progress::Token { text, first, .. } => {
            if first {
                StreamEvent::MessageStart { message: opening(&id, &model, &[], usage) }.write(out);
                StreamEvent::ContentBlockStart { content_block: Block { r#type: "text", text: "" }, index: 0 }.write(out);
            }
            StreamEvent::ContentBlockDelta { delta: Block { r#type: "text_delta", text: &text }, index: 0 }.write(out);
        }
        Progress::End => {
            StreamEvent::ContentBlockStop { index: 0 }.write(out);
            let stop_sequence = (version == Version::V0_32).then_some(());
            let delta = StopDelta { stop_reason: "max_tokens", stop_sequence };
            StreamEvent::MessageDelta { delta, usage: UsageJson::at_end(usage) }.write(out);
            StreamEvent::MessageStop.write(out);
        }
    })
}
