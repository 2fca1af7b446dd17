//! Request bodies: what all endpoints have in common, the checks that vLLM makes, and the prompt's tokens of chats.

use super::error::{ApiError, Location, Problem, PromptLength, python};
use crate::text::Prompt;
use serde_json::{Map, Value};

/// A generation request that has passed the checks.
#[derive(Debug)]
pub(super) struct Generate {
    pub(super) prompt: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) stream: bool,
    /// `stream_options.include_usage`.
    pub(super) include_usage: bool,
    /// `stream_options.continuous_usage_stats`.
    pub(super) continuous_usage: bool,
    /// `return_token_ids`.
    pub(super) return_token_ids: bool,
}

/// What this replica serves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits<'a> {
    pub(super) model: &'a str,
    pub(super) max_model_len: usize,
}

/// Output tokens if the request does not say.
const DEFAULT_MAX_TOKENS: i64 = 16;

/// A body of `/v1/chat/completions`.
pub(super) fn chat(body: &[u8], limits: Limits<'_>) -> Result<Generate, ApiError> {
    let body = object(body)?;
    check(&body, &["messages"])?;
    let parameter = if integer(&body, "max_completion_tokens").is_some() { "max_completion_tokens" } else { "max_tokens" };
    generate(&body, MaxTokens::named(parameter), Input::Text(prompt(&body)), limits)
}

/// A body of `/v1/messages`. vLLM turns it into a chat request, whose parameter's name appears in its errors.
pub(super) fn messages(body: &[u8], limits: Limits<'_>) -> Result<Generate, ApiError> {
    let body = object(body)?;
    check(&body, &["model", "messages", "max_tokens"])?;
    let max_tokens = MaxTokens { field: "max_tokens", none: "max_completion_tokens", too_many: "max_completion_tokens" };
    generate(&body, max_tokens, Input::Text(prompt(&body)), limits)
}

/// The prompt of a body of `/v1/messages/count_tokens`.
pub(super) fn count_tokens(body: &[u8], limits: Limits<'_>) -> Result<Vec<u32>, ApiError> {
    let body = object(body)?;
    check(&body, &["model", "messages"])?;
    check_model(&body, limits)?;
    Ok(prompt(&body))
}

/// Where a body says how long its answer may be, and what errors call it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MaxTokens {
    pub(super) field: &'static str,
    /// If it is below 1.
    pub(super) none: &'static str,
    /// If it is more than the model's context.
    pub(super) too_many: &'static str,
}

impl MaxTokens {
    pub(super) fn named(field: &'static str) -> Self {
        Self { field, none: field, too_many: field }
    }
}

/// A prompt's tokens, and what they were made of.
#[derive(Debug)]
pub(super) enum Input {
    Text(Vec<u32>),
    Tokens(Vec<u32>),
}

impl Input {
    pub(super) fn into_tokens(self) -> Vec<u32> {
        match self {
            Self::Text(tokens) | Self::Tokens(tokens) => tokens,
        }
    }
}

pub(super) fn generate(
    body: &Map<String, Value>,
    max_tokens: MaxTokens,
    input: Input,
    limits: Limits<'_>,
) -> Result<Generate, ApiError> {
    check_model(body, limits)?;
    let max_model_len = limits.max_model_len;
    let value = integer(body, max_tokens.field).unwrap_or(DEFAULT_MAX_TOKENS);
    let max_tokens = match usize::try_from(value) {
        Ok(0) | Err(_) => return Err(ApiError::NoTokens { parameter: max_tokens.none, value }),
        Ok(tokens) if tokens > max_model_len => {
            return Err(ApiError::TooManyTokens { parameter: max_tokens.too_many, value, max_model_len });
        }
        Ok(tokens) => tokens,
    };
    let length = match &input {
        Input::Text(_) => PromptLength::AtLeast,
        Input::Tokens(tokens) => PromptLength::Exactly(tokens.len()),
    };
    let prompt = input.into_tokens();
    if prompt.len() + max_tokens > max_model_len {
        return Err(ApiError::PromptTooLong { max_tokens, prompt: length, max_model_len });
    }
    let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
    let option = |name| flag(body.get("stream_options").and_then(|options| options.get(name)));
    Ok(Generate {
        prompt,
        max_tokens,
        stream: flag(body.get("stream")),
        include_usage: option("include_usage"),
        continuous_usage: option("continuous_usage_stats"),
        return_token_ids: flag(body.get("return_token_ids")),
    })
}

pub(super) fn check_model(body: &Map<String, Value>, limits: Limits<'_>) -> Result<(), ApiError> {
    match body.get("model").and_then(Value::as_str) {
        Some(asked) if asked != limits.model => {
            Err(ApiError::UnknownModel { asked: asked.to_owned(), served: limits.model.to_owned() })
        }
        _ => Ok(()),
    }
}

fn integer(body: &Map<String, Value>, field: &str) -> Option<i64> {
    body.get(field).and_then(Value::as_i64)
}

pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let problem =
        |kind, location, message, input, context| ApiError::Invalid(vec![Problem { kind, location, message, input, context }]);
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => {
            let message = "Input should be a valid dictionary or object to extract fields from";
            Err(problem("model_attributes_type", Location::Field("body"), message, python(&other), None))
        }
        Err(error) => {
            // serde_json counts lines and columns from 1; Python says how many characters are before the error.
            let lines: usize = body.split_inclusive(|byte| *byte == b'\n').take(error.line() - 1).map(<[u8]>::len).sum();
            let before = if error.is_eof() { error.column() } else { error.column().saturating_sub(1) };
            Err(problem(
                "json_invalid",
                Location::Offset(lines + before),
                "JSON decode error",
                "{}".to_owned(),
                Some("Expecting value"),
            ))
        }
    }
}

/// The required fields, and the type of those that have one here.
pub(super) fn check(body: &Map<String, Value>, required: &[&'static str]) -> Result<(), ApiError> {
    let problems: Vec<_> = required
        .iter()
        .filter_map(|&name| {
            let (kind, message, input) = match (name, body.get(name)) {
                (_, None) => ("missing", "Field required", python(&Value::Object(body.clone()))),
                ("messages" | "input", Some(Value::Array(_))) | ("model" | "input", Some(Value::String(_))) => return None,
                ("max_tokens", Some(value)) if value.is_i64() => return None,
                ("messages", Some(value)) => ("list_type", "Input should be a valid list", python(value)),
                ("model" | "input", Some(value)) => ("string_type", "Input should be a valid string", python(value)),
                (_, Some(value)) => ("int_type", "Input should be a valid integer", python(value)),
            };
            Some(Problem { kind, location: Location::Field(name), message, input, context: None })
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(ApiError::Invalid(problems)) }
}

/// The canonical prompt: the tools' definitions, Anthropic's `system` as a system turn, and the messages, so a conversation has the same
/// tokens in both dialects.
pub(super) fn prompt(body: &Map<String, Value>) -> Vec<u32> {
    let mut prompt = Prompt::default();
    if let Some(tools) = body.get("tools").filter(|tools| !tools.is_null()) {
        prompt.turn("tools", &tools.to_string());
    }
    if let Some(system) = body.get("system") {
        prompt.turn("system", &content(system));
    }
    for message in body.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
        let mut text = message.get("content").map(content).unwrap_or_default();
        if let Some(calls) = message.get("tool_calls").filter(|calls| !calls.is_null()) {
            text.push_str(&calls.to_string());
        }
        prompt.turn(role, &text);
    }
    prompt.into_tokens()
}

/// The text of a message's content: a string, or parts whose texts are joined. A part that is no text stands for itself as JSON.
pub(super) fn content(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .map(|part| part.get("text").and_then(Value::as_str).map_or_else(|| part.to_string(), str::to_owned))
            .collect(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replica::version::Version;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    const LIMITS: Limits<'_> = Limits { model: "m", max_model_len: 1000 };

    fn is_json(error: &ApiError) -> Result<(), TestCaseError> {
        for version in [Version::V0_26, Version::V0_32] {
            for event in [error.openai_event(version), error.anthropic_event(version)] {
                let json = serde_json::from_str::<Value>(&event);
                prop_assert!(json.is_ok_and(|json| json["error"]["message"].is_string()), "{}", event);
            }
        }
        Ok(())
    }

    #[test]
    fn a_conversation_has_the_same_tokens_in_both_dialects() {
        let chat = chat(
            br#"{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"hello"}]}]}"#,
            LIMITS,
        );
        let messages = messages(
            br#"{"model":"m","max_tokens":5,"system":[{"type":"text","text":"Be brief."}],"messages":[{"role":"user","content":"hello"}]}"#,
            LIMITS,
        );
        assert_eq!(chat.unwrap().prompt, messages.unwrap().prompt);
    }

    #[test]
    fn tools_and_tool_calls_are_part_of_the_prompt() {
        let length = |body: &str| chat(body.as_bytes(), LIMITS).unwrap().prompt.len();
        let plain = length(r#"{"messages":[{"role":"assistant","content":null}]}"#);
        assert!(length(r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"a"}]}]}"#) > plain);
        assert!(length(r#"{"tools":[{"type":"function"}],"messages":[{"role":"assistant","content":null}]}"#) > plain);
    }

    #[test]
    fn prompt_and_output_must_fit_the_context_together() {
        let body = |tokens| format!(r#"{{"messages":[],"max_tokens":{tokens}}}"#);
        let overhead = chat(body(1).as_bytes(), LIMITS).unwrap().prompt.len();
        assert!(chat(body(1000 - overhead).as_bytes(), LIMITS).is_ok());
        assert!(matches!(chat(body(1001 - overhead).as_bytes(), LIMITS), Err(ApiError::PromptTooLong { .. })));
        assert!(matches!(chat(body(1001).as_bytes(), LIMITS), Err(ApiError::TooManyTokens { .. })));
        assert!(matches!(chat(br#"{"messages":[],"max_tokens":0}"#, LIMITS), Err(ApiError::NoTokens { .. })));
    }

    proptest! {
        #[test]
        fn any_body_is_taken_within_the_context_or_refused_with_json(body in mutated(seeds("bodies"))) {
            let limits = Limits { model: "qwen3-4b", ..LIMITS };
            for taken in [chat(&body, limits), messages(&body, limits)] {
                match taken {
                    Ok(request) => {
                        prop_assert!(request.max_tokens >= 1 && request.prompt.len() + request.max_tokens <= limits.max_model_len);
                    }
                    Err(error) => is_json(&error)?,
                }
            }
            match count_tokens(&body, limits) {
                // Roles and marks between messages are tokens too.
                Ok(prompt) => prop_assert!(prompt.len() <= 8 * body.len()),
                Err(error) => is_json(&error)?,
            }
        }
    }
}
