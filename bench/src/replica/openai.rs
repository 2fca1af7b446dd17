//! What OpenAI's endpoints have in common.

use super::error::ApiError;
use super::generation::{Usage, whole_stream};
use super::version::Version;
use axum::response::Response;
use serde::Serialize;
use std::fmt::Write;

/// A field that is always null here.
pub(super) type Null = ();

/// `usage` of chat and text completions.
#[derive(Serialize)]
pub(super) struct UsageJson {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<Details>,
}

/// In `Option<Option<..>>`, `Some(None)` is a null that is written and `None` a field left out.
#[derive(Serialize)]
pub(super) struct Details {
    pub(super) cached_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) created_cache_tokens: Option<Option<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) multimodal_tokens: Option<Null>,
}

impl UsageJson {
    pub(super) fn plain(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            total_tokens: usage.prompt + usage.output,
            completion_tokens: usage.output,
            prompt_tokens_details: None,
        }
    }

    pub(super) fn detailed(usage: Usage, details: Details) -> Self {
        Self { prompt_tokens_details: Some(details), ..Self::plain(usage) }
    }
}

/// vLLM finds a bad rank only when the stream has begun.
pub(super) fn refused_stream(error: &ApiError, version: Version) -> Response {
    whole_stream(format!("data: {}\n\ndata: [DONE]\n\n", error.openai_event(version)))
}

/// Appends a server-sent event.
pub(super) fn data(out: &mut String, value: &impl Serialize) {
    let _ = write!(out, "data: {}\n\n", super::json(value));
}
