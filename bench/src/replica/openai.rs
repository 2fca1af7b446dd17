//! `/v1/chat/completions`: answers in OpenAI's form, with vLLM's fields in vLLM's order.

use super::App;
use super::body::{self, Generate};
use super::error::ApiError;
use super::generation::{Generation, Progress, Usage, event_stream};
use super::ids::RequestIds;
use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;

const FINGERPRINT: &str = "vllm-0.26.0-homing00";

/// A field that is always null here.
type Null = ();

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    service_tier: Null,
    system_fingerprint: &'static str,
    usage: UsageJson,
    prompt_logprobs: Null,
    prompt_token_ids: Null,
    prompt_text: Null,
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    metrics: Null,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Null,
    finish_reason: &'static str,
    stop_reason: Null,
    token_ids: Null,
    routed_experts: Null,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Null,
    annotations: Null,
    audio: Null,
    function_call: Null,
    reasoning: Null,
}

#[derive(Serialize)]
struct UsageJson {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<Details>,
}

#[derive(Serialize)]
struct Details {
    cached_tokens: usize,
    created_cache_tokens: usize,
    /// Only in answers that are not streamed.
    #[serde(skip_serializing_if = "Option::is_none")]
    multimodal_tokens: Option<Null>,
}

/// One `chat.completion.chunk`. `Some(())` is a null that is written, None a field left out: vLLM's chunks differ in that.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Null>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_text: Option<Null>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Null,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Null>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Null>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: &'a str,
}

impl UsageJson {
    fn plain(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            total_tokens: usage.prompt + usage.output,
            completion_tokens: usage.output,
            prompt_tokens_details: None,
        }
    }

    fn detailed(usage: Usage, multimodal_tokens: Option<Null>) -> Self {
        let details = Details { cached_tokens: usage.cached, created_cache_tokens: usage.created, multimodal_tokens };
        Self { prompt_tokens_details: Some(details), ..Self::plain(usage) }
    }
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat_completions(
    State(app): State<App>,
    Extension(ids): Extension<RequestIds>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let request = match body::chat(&body, app.limits()) {
        Ok(request) => request,
        Err(error) => return error.openai(),
    };
    drop(body);
    if let Err(error) = body::check_rank(&headers) {
        return if request.stream { refused_stream(&error) } else { error.openai() };
    }
    if request.stream { streamed(&app, ids, request) } else { complete(&app, &ids, request).await }
}

/// vLLM finds a bad rank only when the stream has begun.
fn refused_stream(error: &ApiError) -> Response {
    event_stream(Body::from(format!("data: {}\n\ndata: [DONE]\n\n", error.openai_json())))
}

async fn complete(app: &App, ids: &RequestIds, request: Generate) -> Response {
    let created = super::unix_time() as u64;
    let (text, usage) = match Generation::start(&app.engine, app.block_size, request).complete().await {
        Ok(answer) => answer,
        Err(error) => return error.openai(),
    };
    let message =
        Message { role: "assistant", content: &text, refusal: (), annotations: (), audio: (), function_call: (), reasoning: () };
    let completion = Completion {
        id: &ids.completion,
        object: "chat.completion",
        created,
        model: &app.model,
        choices: [Choice {
            index: 0,
            message,
            logprobs: (),
            finish_reason: "length",
            stop_reason: (),
            token_ids: (),
            routed_experts: (),
        }],
        service_tier: (),
        system_fingerprint: FINGERPRINT,
        usage: UsageJson::detailed(usage, Some(())),
        prompt_logprobs: (),
        prompt_token_ids: (),
        prompt_text: (),
        kv_transfer_params: (),
        ec_transfer_params: (),
        metrics: (),
    };
    super::json_response(StatusCode::OK, super::json(&completion))
}

fn streamed(app: &App, ids: RequestIds, request: Generate) -> Response {
    let chunks = Chunks {
        id: ids.completion,
        created: super::unix_time() as u64,
        model: app.model.clone(),
        include_usage: request.include_usage,
        continuous_usage: request.include_usage && request.continuous_usage,
    };
    Generation::start(&app.engine, app.block_size, request).stream(move |out, progress, usage| match progress {
        Progress::Token { text, first, last } => {
            if first {
                chunks.opening(out, Usage { output: 0, ..usage });
            }
            chunks.token(out, &text, last, usage);
        }
        Progress::End => chunks.end(out, usage),
    })
}

/// The chunks of one stream.
struct Chunks {
    id: String,
    created: u64,
    model: Arc<str>,
    include_usage: bool,
    continuous_usage: bool,
}

impl Chunks {
    /// The role, before the first token.
    fn opening(&self, out: &mut String, usage: Usage) {
        let choices = [ChunkChoice {
            index: 0,
            delta: Delta { role: Some("assistant"), content: "" },
            logprobs: (),
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        }];
        let chunk = self.chunk(&choices, self.usage_so_far(usage));
        data(out, &Chunk { prompt_token_ids: Some(()), prompt_text: Some(()), ..chunk });
    }

    fn token(&self, out: &mut String, text: &str, last: bool, usage: Usage) {
        let choices = [ChunkChoice {
            index: 0,
            delta: Delta { role: None, content: text },
            logprobs: (),
            finish_reason: last.then_some("length"),
            stop_reason: last.then_some(()),
            token_ids: Some(()),
        }];
        // vLLM names its fingerprint once: in the chunk with the usage if there is one.
        let system_fingerprint = (last && !self.include_usage).then_some(FINGERPRINT);
        data(out, &Chunk { system_fingerprint, ..self.chunk(&choices, self.usage_so_far(usage)) });
    }

    fn end(&self, out: &mut String, usage: Usage) {
        if self.include_usage {
            let chunk = self.chunk(&[], Some(UsageJson::detailed(usage, None)));
            data(out, &Chunk { system_fingerprint: Some(FINGERPRINT), ..chunk });
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn usage_so_far(&self, usage: Usage) -> Option<UsageJson> {
        self.continuous_usage.then(|| UsageJson::plain(usage))
    }

    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice<'a>], usage: Option<UsageJson>) -> Chunk<'a> {
        Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            usage,
            system_fingerprint: None,
            prompt_token_ids: None,
            prompt_text: None,
        }
    }
}

fn data(out: &mut String, value: &impl Serialize) {
    let _ = write!(out, "data: {}\n\n", super::json(value));
}
