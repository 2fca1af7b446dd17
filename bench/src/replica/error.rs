//! Errors as vLLM's two dialects word them. The texts are those of vLLM's answers.

use super::version::Version;
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
    UnknownModel { asked: String, served: String },
    /// No tokens were asked for.
    NoTokens { parameter: &'static str, value: i64 },
    /// More output than the model's context has.
    TooManyTokens { parameter: &'static str, value: i64, max_model_len: usize },
    /// Prompt and output together are more than the model's context has.
    PromptTooLong { max_tokens: usize, prompt: PromptLength, max_model_len: usize },
    /// A rank that this endpoint does not have; it has those from 0 below `ranks`.
    Rank { rank: i64, ranks: usize },
    /// The engine is gone.
    Engine,
}

/// What vLLM knows of the length of a prompt that is too long.
#[derive(Clone, Copy, Debug)]
pub(super) enum PromptLength {
    /// It came as text, and vLLM stopped reading once it was too long.
    AtLeast,
    /// It came as tokens.
    Exactly(usize),
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
            Self::UnknownModel { .. } => StatusCode::NOT_FOUND,
            Self::Engine => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "Bad Request",
            Self::UnknownModel { .. } => "NotFoundError",
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
            Self::UnknownModel { .. } => Some("model".to_owned()),
            Self::NoTokens { parameter, .. } | Self::TooManyTokens { parameter, .. } => Some((*parameter).to_owned()),
            Self::PromptTooLong { .. } => Some("input_tokens".to_owned()),
            Self::Rank { .. } | Self::Engine => None,
        }
    }

    fn message(&self, version: Version) -> String {
        match self {
            Self::Invalid(problems) => validation_message(problems),
            Self::UnknownModel { asked, served } => match version {
                Version::V0_26 => format!("The model `{asked}` does not exist."),
                Version::V0_32 => format!("The model `{asked}` does not exist. Valid aliases: {served}."),
            },
            Self::NoTokens { parameter, value } => {
                format!("{parameter} must be at least 1, got {value}. (parameter={parameter}, value={value})")
            }
            Self::TooManyTokens { parameter, value, max_model_len } => {
                let limit = match version {
                    Version::V0_26 => "max_model_len=max_total_tokens",
                    Version::V0_32 => "max_model_len",
                };
                format!(
                    "{parameter}={value} cannot be greater than {limit}={max_model_len}. Please request fewer output tokens. \
                     (parameter={parameter}, value={value})"
                )
            }
            Self::PromptTooLong { max_tokens, prompt, max_model_len } => {
                let (at_least, length) = match prompt {
                    PromptLength::AtLeast => ("at least ", max_model_len + 1 - max_tokens),
                    PromptLength::Exactly(length) => ("", *length),
                };
                format!(
                    "This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output tokens and \
                     your prompt contains {at_least}{length} input tokens, for a total of {at_least}{} tokens. Please reduce the length \
                     of the input prompt or the number of requested output tokens. (parameter=input_tokens, value={length})",
                    length + max_tokens
                )
            }
            Self::Rank { rank, ranks } => format!("data_parallel_rank {rank} is out of range [0, {ranks})."),
            Self::Engine => "EngineCore encountered an issue. See stack trace (above) for the root cause.".to_owned(),
        }
    }

    /// The answer on OpenAI's endpoints.
    pub(super) fn openai(&self, version: Version) -> Response {
        let (message, parameter) = (self.message(version), self.parameter());
        let code = self.status().as_u16();
        let detail = OpenAiDetail { message: &message, r#type: self.kind(), param: parameter.as_deref(), code };
        super::json_response(self.status(), super::json(&OpenAiError { error: detail }))
    }

    /// The data of an event that ends a stream of OpenAI's endpoints; with Python's spaces, which the answers have not.
    pub(super) fn openai_event(&self, version: Version) -> String {
        let (message, parameter) = (super::json(&self.message(version)), super::json(&self.parameter()));
        let (kind, code) = (self.kind(), self.status().as_u16());
        format!(r#"{{"error": {{"message": {message}, "type": "{kind}", "param": {parameter}, "code": {code}}}}}"#)
    }

    /// The answer on Anthropic's endpoints: schema errors have OpenAI's form there too, and vLLM 0.26 takes what the chat endpoint would
    /// refuse with a 400 for an error of its own.
    pub(super) fn anthropic(&self, version: Version) -> Response {
        let (status, kind) = match (self, version) {
            (Self::Invalid(_), _) => return self.openai(version),
            (Self::UnknownModel { .. }, _) | (_, Version::V0_32) => (self.status(), self.kind()),
            (_, Version::V0_26) => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        super::json_response(status, anthropic_json(kind, &self.message(version)))
    }

    /// The data of an `error` event, which ends a stream of Anthropic's endpoints. vLLM 0.26 takes the chat endpoint's error for a chunk
    /// of the answer and complains about that.
    pub(super) fn anthropic_event(&self, version: Version) -> String {
        match version {
            Version::V0_26 => anthropic_json("internal_error", "2 validation errors for ChatCompletionStreamResponse"),
            Version::V0_32 => anthropic_json(self.kind(), &self.message(version)),
        }
    }
}

fn anthropic_json(kind: &str, message: &str) -> String {
    super::json(&AnthropicError { r#type: "error", error: AnthropicDetail { r#type: kind, message } })
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
