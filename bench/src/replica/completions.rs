//! `/v1/completions` and `/tokenize`: prompts as text or as tokens.

use super::App;
use super::body::{self, Generate, Input, MaxTokens};
use super::error::{ApiError, Location, Problem, python};
use super::generation::{Generation, Progress};
use super::ids::RequestIds;
use super::openai::{Details, Null, UsageJson, data, refused_stream};
use crate::text;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};

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
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    metrics: Null,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Null,
    finish_reason: &'static str,
    stop_reason: Null,
    token_ids: Option<&'a [u32]>,
    prompt_logprobs: Null,
    prompt_token_ids: Option<&'a [u32]>,
    routed_experts: Null,
}

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
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Null,
    finish_reason: Option<&'static str>,
    stop_reason: Null,
    prompt_token_ids: Option<&'a [u32]>,
    token_ids: Option<[u32; 1]>,
}

#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [u32],
    token_strs: Null,
}

/// `POST /v1/completions`.
pub(super) async fn completions(
    State(app): State<App>,
    Extension(ids): Extension<RequestIds>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let request = match request(&body, &app) {
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

fn request(body: &[u8], app: &App) -> Result<Generate, ApiError> {
    let body = body::object(body)?;
    let input = prompt(&body)?;
    body::generate(&body, MaxTokens::named("max_tokens"), input, app.limits())
}

/// The one prompt: text, tokens, or a list of one text.
fn prompt(body: &Map<String, Value>) -> Result<Input, ApiError> {
    let invalid = |kind, message| {
        let input = python(body.get("prompt").unwrap_or(&Value::Null));
        Err(ApiError::Invalid(vec![Problem { kind, location: Location::Field("prompt"), message, input, context: None }]))
    };
    match body.get("prompt") {
        Some(Value::String(text)) => Ok(Input::Text(text::tokens_of(text))),
        Some(Value::Array(items)) => match &items[..] {
            [] => invalid("value_error", "Either prompt or prompt_embeds must be provided and non-empty."),
            [Value::String(text)] => Ok(Input::Text(text::tokens_of(text))),
            tokens => match tokens.iter().map(|token| token.as_u64().and_then(|token| token.try_into().ok())).collect() {
                Some(tokens) => Ok(Input::Tokens(tokens)),
                None => invalid("list_type", "The stand-in takes one prompt a request: a string or a list of token ids"),
            },
        },
        Some(_) => invalid("string_type", "Input should be a valid string"),
        None => invalid("missing", "Field required"),
    }
}

async fn complete(app: &App, ids: &RequestIds, rank: Option<usize>, request: Generate) -> Response {
    let created = super::unix_time() as u64;
    let prompt = request.return_token_ids.then(|| request.prompt.clone());
    let (tokens, usage) = match Generation::start(app, rank, request).complete().await {
        Ok(answer) => answer,
        Err(error) => return error.openai(app.version),
    };
    let details = Details { cached_tokens: usage.cached, created_cache_tokens: Some(None), multimodal_tokens: Some(()) };
    let completion = Completion {
        id: &ids.text_completion(),
        object: "text_completion",
        created,
        model: &app.model,
        choices: [Choice {
            index: 0,
            text: &text::text_of(&tokens),
            logprobs: (),
            finish_reason: "length",
            stop_reason: (),
            token_ids: prompt.is_some().then_some(&tokens),
            prompt_logprobs: (),
            prompt_token_ids: prompt.as_deref(),
            routed_experts: (),
        }],
        service_tier: (),
        system_fingerprint: &app.fingerprint,
        usage: UsageJson::detailed(usage, details),
        kv_transfer_params: (),
        ec_transfer_params: (),
        metrics: (),
    };
    super::json_response(StatusCode::OK, super::json(&completion))
}

fn streamed(app: &App, ids: &RequestIds, rank: Option<usize>, request: Generate) -> Response {
    let (id, model, fingerprint) = (ids.text_completion(), app.model.clone(), app.fingerprint.clone());
    let created = super::unix_time() as u64;
    let (include_usage, continuous_usage) = (request.include_usage, request.include_usage && request.continuous_usage);
    let prompt = request.return_token_ids.then(|| request.prompt.clone());
    let chunk = move |out: &mut String, choices: &[ChunkChoice<'_>], usage, named: bool| {
        let system_fingerprint = named.then_some(&*fingerprint);
        data(out, &Chunk { id: &id, object: "text_completion", created, model: &model, choices, usage, system_fingerprint });
    };
    Generation::start(app, rank, request).stream(move |out, progress, usage| match progress {
        Progress::Token { text, token, first, last } => {
            let choice = ChunkChoice {
                index: 0,
                text: &text,
                logprobs: (),
                finish_reason: last.then_some("length"),
                stop_reason: (),
                prompt_token_ids: prompt.as_deref().filter(|_| first),
                token_ids: prompt.is_some().then_some([token]),
            };
            // The fingerprint is in the chunk with the usage if there is one.
            chunk(out, &[choice], continuous_usage.then(|| UsageJson::plain(usage)), last && !include_usage);
        }
        Progress::End => {
            if include_usage {
                let details = Details { cached_tokens: usage.cached, created_cache_tokens: None, multimodal_tokens: None };
                chunk(out, &[], Some(UsageJson::detailed(usage, details)), true);
            }
            out.push_str("data: [DONE]\n\n");
        }
    })
}

/// `POST /tokenize`, of a prompt or of a chat.
pub(super) async fn tokenize(State(app): State<App>, body: Bytes) -> Response {
    let tokens = body::object(&body).and_then(|body| {
        body::check_model(&body, app.limits())?;
        if body.contains_key("messages") {
            return Ok(body::prompt(&body));
        }
        prompt(&body).map(Input::into_tokens)
    });
    match tokens {
        Ok(tokens) => {
            let answer = Tokens { count: tokens.len(), max_model_len: app.max_model_len, tokens: &tokens, token_strs: () };
            super::json_response(StatusCode::OK, super::json(&answer))
        }
        Err(error) => error.openai(app.version),
    }
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_prompt_is_no_longer_than_its_body_or_refused(body in mutated(seeds("bodies"))) {
            if let Ok(fields) = body::object(&body) {
                match prompt(&fields) {
                    Ok(input) => prop_assert!(input.into_tokens().len() <= body.len()),
                    Err(error) => prop_assert!(matches!(error, ApiError::Invalid(problems) if problems.len() == 1)),
                }
            }
        }
    }
}
