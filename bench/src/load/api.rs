//! The two APIs, and how a request names its conversation.

use reqwest::RequestBuilder;
use serde::{Deserialize, Serialize};

/// Which API the endpoint is driven with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Api {
    /// `POST /v1/chat/completions`.
    #[default]
    Openai,
    /// `POST /v1/messages`.
    Anthropic,
}

/// What a request carries that names its conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderStyle {
    /// `x-session-id`, and `x-parent-session-id` where a subagent asks, as OpenCode does.
    #[default]
    XSessionId,
    /// Claude Code's `x-claude-code-session-id`, which subagents share, and their own `x-claude-code-agent-id`.
    ClaudeCode,
    /// No header: the session is in the body's `metadata.user_id`, as older versions of Claude Code send it. Anthropic's API only.
    UserId,
    /// Nothing names the conversation.
    None,
}

/// Who is talking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Speaker {
    /// This conversation's own name.
    pub(super) id: String,
    /// If it is a subagent's: the name of the conversation that started it.
    pub(super) parent: Option<String>,
    /// The name of the session at the root, `id` if there is no parent.
    pub(super) root: String,
}

/// One message of a request.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Message<'a> {
    /// `system`, `user` or `assistant`.
    pub(super) role: &'a str,
    pub(super) content: &'a str,
}

impl HeaderStyle {
    /// Names the speaker in the request's headers.
    pub(super) fn apply(self, request: RequestBuilder, speaker: &Speaker) -> RequestBuilder {
        match (self, &speaker.parent) {
            (Self::XSessionId, None) => request.header("x-session-id", &speaker.id),
            (Self::XSessionId, Some(parent)) => request.header("x-session-id", &speaker.id).header("x-parent-session-id", parent),
            (Self::ClaudeCode, None) => request.header("x-claude-code-session-id", &speaker.root),
            (Self::ClaudeCode, Some(_)) => {
                request.header("x-claude-code-session-id", &speaker.root).header("x-claude-code-agent-id", &speaker.id)
            }
            (Self::UserId | Self::None, _) => request,
        }
    }
}

#[derive(Serialize)]
struct ChatBody<'a> {
    model: &'a str,
    messages: &'a [Message<'a>],
    max_tokens: usize,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct MessagesBody<'a> {
    model: &'a str,
    max_tokens: usize,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<&'a str>,
    messages: &'a [Message<'a>],
    // At the end, where Claude Code has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Metadata>,
}

#[derive(Serialize)]
struct Metadata {
    user_id: String,
}

/// What all requests of a run have in common.
#[derive(Clone, Debug)]
pub(super) struct Dialect {
    pub(super) api: Api,
    pub(super) style: HeaderStyle,
    pub(super) model: String,
    /// Whether answers go on to their token limit (vLLM's `ignore_eos`).
    pub(super) ignore_eos: bool,
}

impl Dialect {
    pub(super) fn path(&self) -> &'static str {
        match self.api {
            Api::Openai => "/v1/chat/completions",
            Api::Anthropic => "/v1/messages",
        }
    }

    /// The body of a streamed request. Only the first message may be a system prompt.
    pub(super) fn body(&self, speaker: &Speaker, messages: &[Message<'_>], max_tokens: usize) -> serde_json::Result<Vec<u8>> {
        let model = &self.model;
        // Texts rarely have characters to escape; growing the buffer step by step would copy them several times.
        let mut body = Vec::with_capacity(512 + messages.iter().map(|message| message.content.len() + 64).sum::<usize>());
        match self.api {
            Api::Openai => {
                let stream_options = StreamOptions { include_usage: true };
                let ignore_eos = self.ignore_eos.then_some(true);
                serde_json::to_writer(
                    &mut body,
                    &ChatBody { model, messages, max_tokens, stream: true, stream_options, ignore_eos },
                )?;
            }
            Api::Anthropic => {
                let (system, messages) = match messages {
                    [first, rest @ ..] if first.role == "system" => (Some(first.content), rest),
                    all => (None, all),
                };
                let metadata = (self.style == HeaderStyle::UserId).then(|| Metadata { user_id: user_id(&speaker.root) });
                serde_json::to_writer(&mut body, &MessagesBody { model, max_tokens, stream: true, system, messages, metadata })?;
            }
        }
        Ok(body)
    }
}

/// Claude Code's `metadata.user_id`: a JSON object in a string.
fn user_id(session: &str) -> String {
    serde_json::json!({ "device_id": "0".repeat(64), "account_uuid": "", "session_id": session }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const MESSAGES: [Message<'_>; 2] =
        [Message { role: "system", content: "be brief" }, Message { role: "user", content: "hello\n" }];

    fn speaker() -> Speaker {
        Speaker { id: "child".to_owned(), parent: Some("root".to_owned()), root: "root".to_owned() }
    }

    fn body(api: Api, style: HeaderStyle, ignore_eos: bool) -> Value {
        let dialect = Dialect { api, style, model: "m".to_owned(), ignore_eos };
        serde_json::from_slice(&dialect.body(&speaker(), &MESSAGES, 7).unwrap()).unwrap()
    }

    #[test]
    fn a_chat_body_is_openais() {
        let expected = json!({
            "model": "m", "max_tokens": 7, "stream": true, "stream_options": { "include_usage": true }, "ignore_eos": true,
            "messages": [{ "role": "system", "content": "be brief" }, { "role": "user", "content": "hello\n" }],
        });
        assert_eq!(body(Api::Openai, HeaderStyle::None, true), expected);
        assert_eq!(body(Api::Openai, HeaderStyle::None, false).get("ignore_eos"), None);
    }

    #[test]
    fn a_messages_body_is_anthropics() {
        let expected = json!({
            "model": "m", "max_tokens": 7, "stream": true, "system": "be brief",
            "messages": [{ "role": "user", "content": "hello\n" }],
        });
        assert_eq!(body(Api::Anthropic, HeaderStyle::XSessionId, false), expected);
        let named = body(Api::Anthropic, HeaderStyle::UserId, false);
        let inner: Value = serde_json::from_str(named["metadata"]["user_id"].as_str().unwrap()).unwrap();
        assert_eq!(inner["session_id"], "root");
    }

    #[test]
    fn headers_name_the_conversation_as_the_client_would() {
        let headers = |style: HeaderStyle, speaker: &Speaker| {
            let request = style.apply(reqwest::Client::new().post("http://a/"), speaker).build().unwrap();
            let text = |(name, value): (&reqwest::header::HeaderName, &reqwest::header::HeaderValue)| {
                format!("{name}: {}", value.to_str().unwrap())
            };
            request.headers().iter().map(text).collect::<Vec<_>>()
        };
        let child = speaker();
        let root = Speaker { id: "root".to_owned(), parent: None, root: "root".to_owned() };
        assert_eq!(headers(HeaderStyle::XSessionId, &root), ["x-session-id: root"]);
        assert_eq!(headers(HeaderStyle::XSessionId, &child), ["x-session-id: child", "x-parent-session-id: root"]);
        assert_eq!(headers(HeaderStyle::ClaudeCode, &root), ["x-claude-code-session-id: root"]);
        let claude = ["x-claude-code-session-id: root", "x-claude-code-agent-id: child"];
        assert_eq!(headers(HeaderStyle::ClaudeCode, &child), claude);
        assert!(headers(HeaderStyle::None, &child).is_empty());
    }
}
