//! Error bodies in the shape the client's API has.

use serde::Serialize;

/// Why a request is answered in the replicas' place.
#[derive(Clone, Copy)]
pub(super) enum Refusal {
    /// It asks for what it cannot have.
    Invalid,
    /// There is no room for it now.
    Busy,
}

#[derive(Serialize)]
struct OpenAiBody<'a> {
    error: Detail<'a>,
}

#[derive(Serialize)]
struct AnthropicBody<'a> {
    r#type: &'static str,
    error: Detail<'a>,
}

#[derive(Serialize)]
struct Detail<'a> {
    r#type: &'static str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// The body of an answer that refuses a request. The names are those the two APIs use themselves: Anthropic's error types, and OpenAI's
/// `code`, by which its clients tell a limit they may wait for from one they may not.
pub(super) fn body(refusal: Refusal, message: &str, anthropic: bool) -> Vec<u8> {
    let (r#type, code) = match refusal {
        Refusal::Invalid => ("invalid_request_error", None),
        Refusal::Busy => ("rate_limit_error", Some("rate_limit_exceeded").filter(|_| !anthropic)),
    };
    let error = Detail { r#type, message, code };
    if anthropic {
        serde_json::to_vec(&AnthropicBody { r#type: "error", error }).unwrap_or_default()
    } else {
        serde_json::to_vec(&OpenAiBody { error }).unwrap_or_default()
    }
}
