//! Errors as vLLM's two dialects word them. The texts are those of vLLM 0.26's answers.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;

/// Why a request was refused.
#[derive(Debug)]
pub(super) enum ApiError {
    /// The body is not what the schema says; at least one problem.
    Invalid(Vec<Problem>),
    /// A model that is not served here.
    UnknownModel(String),
    /// No tokens were asked for.
    NoTokens { parameter: &'static str, value: i64 },
    /// More output than the model's context has.
    TooManyTokens { parameter: &'static str, value: i64, max_model_len: usize },
    /// Prompt and output together are more than the model's context has.
    PromptTooLong { max_tokens: usize, max_model_len: usize },
    /// A rank that this endpoint does not have.
    Rank(i64),
    /// The engine is gone.
    Engine,
}

/// One thing wrong with a body, as pydantic reports it.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) kind: &'static str,
    /// Where in the body; printed as Python would.
    pub(super) location: Location,
    pub(super) message: &'static str,
    /// What was found there, in Python's notation.
    pub(super) input: String,
    /// A cause, for a body that is not JSON.
    pub(super) context: Option<&'static str>,
}

#[derive(Debug)]
pub(super) enum Location {
    Field(&'static str),
    Offset(usize),
}

#[derive(Serialize)]
struct OpenAiError<'a> {
    error: OpenAiDetail<'a>,
}

#[derive(Serialize)]
struct OpenAiDetail<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: u16,
}

#[derive(Serialize)]
struct AnthropicError<'a> {
    r#type: &'static str,
    error: AnthropicDetail<'a>,
}

#[derive(Serialize)]
struct AnthropicDetail<'a> {
    r#type: &'a str,
    message: &'a str,
}

impl ApiError {
    fn status(&self) -> StatusCode {
        match self {
            Self::UnknownModel(_) => StatusCode::NOT_FOUND,
            Self::Engine => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "Bad Request",
            Self::UnknownModel(_) => "NotFoundError",
            Self::Engine => "InternalServerError",
            _ => "BadRequestError",
        }
    }

    fn parameter(&self) -> Option<String> {
        match self {
            Self::Invalid(problems) => problems.first().map(|problem| match problem.location {
                Location::Field(name) => format!("body.{name}"),
                Location::Offset(offset) => format!("body.{offset}"),
            }),
            Self::UnknownModel(_) => Some("model".to_owned()),
            Self::NoTokens { parameter, .. } | Self::TooManyTokens { parameter, .. } => Some((*parameter).to_owned()),
            Self::PromptTooLong { .. } => Some("input_tokens".to_owned()),
            Self::Rank(_) | Self::Engine => None,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Invalid(problems) => validation_message(problems),
            Self::UnknownModel(model) => format!("The model `{model}` does not exist."),
            Self::NoTokens { parameter, value } => {
                format!("{parameter} must be at least 1, got {value}. (parameter={parameter}, value={value})")
            }
            Self::TooManyTokens { parameter, value, max_model_len } => format!(
                "{parameter}={value} cannot be greater than max_model_len=max_total_tokens={max_model_len}. Please request fewer output \
                 tokens. (parameter={parameter}, value={value})"
            ),
            Self::PromptTooLong { max_tokens, max_model_len } => {
                // vLLM stops reading the prompt once it is too long, so it knows only the least that it has.
                let (least, total) = (max_model_len + 1 - max_tokens, max_model_len + 1);
                format!(
                    "This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output tokens and \
                     your prompt contains at least {least} input tokens, for a total of at least {total} tokens. Please reduce the length \
                     of the input prompt or the number of requested output tokens. (parameter=input_tokens, value={least})"
                )
            }
            Self::Rank(rank) => format!("data_parallel_rank {rank} is out of range [0, 1)."),
            Self::Engine => "EngineCore encountered an issue. See stack trace (above) for the root cause.".to_owned(),
        }
    }

    /// The body in OpenAI's form.
    pub(super) fn openai_json(&self) -> String {
        let (message, parameter) = (self.message(), self.parameter());
        let detail =
            OpenAiDetail { message: &message, r#type: self.kind(), param: parameter.as_deref(), code: self.status().as_u16() };
        super::json(&OpenAiError { error: detail })
    }

    /// The answer on OpenAI's endpoints.
    pub(super) fn openai(&self) -> Response {
        super::json_response(self.status(), self.openai_json())
    }

    /// The answer on Anthropic's endpoints: schema errors have OpenAI's form there too, and vLLM 0.26 takes what the chat endpoint would
    /// refuse with a 400 for an error of its own.
    pub(super) fn anthropic(&self) -> Response {
        let (status, kind) = match self {
            Self::Invalid(_) => return self.openai(),
            Self::UnknownModel(_) => (self.status(), self.kind()),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        let message = self.message();
        let body = AnthropicError { r#type: "error", error: AnthropicDetail { r#type: kind, message: &message } };
        super::json_response(status, super::json(&body))
    }
}

fn validation_message(problems: &[Problem]) -> String {
    let mut message = format!("{} validation error{}:", problems.len(), if problems.len() == 1 { "" } else { "s" });
    for Problem { kind, location, message: text, input, context } in problems {
        let location = match location {
            Location::Field(name) => format!("'{name}'"),
            Location::Offset(offset) => offset.to_string(),
        };
        let _ = write!(message, "\n  {{'type': '{kind}', 'loc': ('body', {location}), 'msg': '{text}', 'input': {input}");
        if let Some(context) = context {
            let _ = write!(message, ", 'ctx': {{'error': '{context}'}}");
        }
        message.push('}');
    }
    message
}

/// A value in Python's notation, as pydantic prints what it was given.
pub(super) fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n")),
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields: Vec<_> = fields.iter().map(|(key, value)| format!("'{key}': {}", python(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

/// FastAPI's answer to a path or method that does not exist.
pub(super) fn detail(status: StatusCode, detail: &'static str) -> Response {
    #[derive(Serialize)]
    struct Detail {
        detail: &'static str,
    }
    (status, Json(Detail { detail })).into_response()
}
