//! `/v1/chat/completions`: answers in OpenAI's form, with vLLM's fields in vLLM's order.

use super::App;
use super::body::{self, Generate};
use super::generation::{Generation, Progress, Usage};
use super::ids::RequestIds;
use super::openai::{Details, Null, UsageJson, data, refused_stream};
use crate::text;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    service_tier: Null,
    system_fingerprint: &'a str,
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
    system_fingerprint: Option<&'a str>,
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

fn detailed(usage: Usage, multimodal_tokens: Option<Null>) -> UsageJson {
    let details = Details { cached_tokens: usage.cached, created_cache_tokens: Some(Some(usage.created)), multimodal_tokens };
    UsageJson::detailed(usage, details)
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
        Err(error) => return error.openai(app.version),
    };
    drop(body);
    let rank = match app.ranks.asked_for(&headers) {
        Ok(rank) => rank,
        Err(error) if request.stream => return refused_stream(&error, app.version),
        Err(error) => return error.openai(app.version),
    };
    if request.stream { streamed(&app, &ids, rank, request) } else { complete(&app, &ids, rank, request).await }
}

async fn complete(app: &App, ids: &RequestIds, rank: Option<usize>, request: Generate) -> Response {
    let created = super::unix_time() as u64;
    let (tokens, usage) = match Generation::start(app, rank, request).complete().await {
        Ok(answer) => answer,
        Err(error) => return error.openai(app.version),
    };
    let text = text::text_of(&tokens);
    let message =
        Message { role: "assistant", content: &text, refusal: (), annotations: (), audio: (), function_call: (), reasoning: () };
    let completion = Completion {
        id: &ids.chat_completion(),
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
        system_fingerprint: &app.fingerprint,
        usage: detailed(usage, Some(())),
        prompt_logprobs: (),
        prompt_token_ids: (),
        prompt_text: (),
        kv_transfer_params: (),
        ec_transfer_params: (),
        metrics: (),
    };
    super::json_response(StatusCode::OK, super::json(&completion))
}

fn streamed(app: &App, ids: &RequestIds, rank: Option<usize>, request: Generate) -> Response {
    let chunks = Chunks {
        id: ids.chat_completion(),
        fingerprint: app.fingerprint.clone(),
        created: super::unix_time() as u64,
        model: app.model.clone(),
        include_usage: request.include_usage,
        continuous_usage: request.include_usage && request.continuous_usage,
    };
    Generation::start(app, rank, request).stream(move |out, progress, usage| match progress {
        Progress::Token { text, first, last, .. } => {
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
    fingerprint: Arc<str>,
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
        let system_fingerprint = (last && !self.include_usage).then_some(&*self.fingerprint);
        data(out, &Chunk { system_fingerprint, ..self.chunk(&choices, self.usage_so_far(usage)) });
    }

    fn end(&self, out: &mut String, usage: Usage) {
        if self.include_usage {
            let chunk = self.chunk(&[], Some(detailed(usage, None)));
            data(out, &Chunk { system_fingerprint: Some(&self.fingerprint), ..chunk });
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
