//! `/v1/responses`: answers in the form of OpenAI's Responses API, as vLLM gives them. vLLM ignores a rank here.

use super::App;
use super::body::{self, Generate, Input, MaxTokens};
use super::error::ApiError;
use super::generation::{Generation, Progress, Usage};
use super::ids::random_hex;
use super::openai::Null;
use super::version::Version;
use crate::text::{self, Prompt};
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response as HttpResponse;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::sync::Arc;

#[derive(Clone, Copy, Serialize)]
struct Response<'a> {
    id: &'a str,
    created_at: u64,
    incomplete_details: Option<Incomplete>,
    instructions: &'a Value,
    metadata: &'a Value,
    model: &'a str,
    object: &'static str,
    output: &'a [Item<'a>],
    parallel_tool_calls: bool,
    temperature: f64,
    tool_choice: &'static str,
    tools: &'a Value,
    top_p: f64,
    background: bool,
    max_output_tokens: usize,
    max_tool_calls: Null,
    previous_response_id: Null,
    prompt: Null,
    reasoning: Null,
    service_tier: &'static str,
    status: &'static str,
    text: Null,
    top_logprobs: Null,
    truncation: &'static str,
    usage: Option<UsageJson>,
    user: Null,
    presence_penalty: f64,
    frequency_penalty: f64,
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    input_messages: Null,
    output_messages: Null,
}

#[derive(Clone, Copy, Serialize)]
struct Incomplete {
    reason: &'static str,
}

#[derive(Clone, Copy, Serialize)]
struct Item<'a> {
    id: &'a str,
    content: &'a [Part<'a>],
    role: &'static str,
    status: &'static str,
    r#type: &'static str,
    phase: Null,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<[Null; 0]>,
}

#[derive(Clone, Copy, Serialize)]
struct Part<'a> {
    annotations: [Null; 0],
    text: &'a str,
    r#type: &'static str,
    logprobs: Option<[Null; 0]>,
}

#[derive(Clone, Copy, Serialize)]
struct UsageJson {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Serialize)]
struct InputDetails {
    cached_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_write_tokens: Option<usize>,
    input_tokens_per_turn: [Null; 0],
    cached_tokens_per_turn: [Null; 0],
}

#[derive(Clone, Copy, Default, Serialize)]
struct OutputDetails {
    reasoning_tokens: usize,
    tool_output_tokens: usize,
    output_tokens_per_turn: [Null; 0],
    tool_output_tokens_per_turn: [Null; 0],
}

/// An event of a stream; each kind has some of the fields.
#[derive(Clone, Copy, Default, Serialize)]
struct Event<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<Item<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[Null; 0]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Response<'a>>,
    sequence_number: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    r#type: &'static str,
}

/// `POST /v1/responses`.
pub(super) async fn responses(State(app): State<App>, body: Bytes) -> HttpResponse {
    let (request, echo) = match request(&body, &app) {
        Ok(request) => request,
        Err(error) => return error.openai(app.version),
    };
    drop(body);
    let stream = request.stream;
    let generation = Generation::start(&app, None, request);
    if stream {
        return streamed(echo, generation);
    }
    match generation.complete().await {
        Ok((tokens, usage)) => {
            let answer = echo.completed(&text::text_of(&tokens), usage, |response| super::json(&response));
            super::json_response(StatusCode::OK, answer)
        }
        Err(error) => error.openai(app.version),
    }
}

fn request(body: &[u8], app: &App) -> Result<(Generate, Echo), ApiError> {
    let body = body::object(body)?;
    body::check(&body, &["input"])?;
    let max_tokens = MaxTokens { none: "max_tokens", ..MaxTokens::named("max_output_tokens") };
    let request = body::generate(&body, max_tokens, Input::Text(prompt(&body)), app.limits())?;
    let echo = Echo::new(app, &body, request.max_tokens);
    Ok((request, echo))
}

/// The prompt that the chat endpoint would make of the same conversation: `instructions` are its system message.
fn prompt(body: &Map<String, Value>) -> Vec<u32> {
    let mut prompt = Prompt::default();
    if let Some(tools) = body.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty()) {
        prompt.turn("tools", &Value::from(tools.clone()).to_string());
    }
    if let Some(instructions) = body.get("instructions").filter(|instructions| !instructions.is_null()) {
        prompt.turn("system", &body::content(instructions));
    }
    match body.get("input") {
        Some(Value::Array(items)) => {
            for item in items {
                match (item.get("role").and_then(Value::as_str), item.get("content")) {
                    (Some(role), Some(content)) => prompt.turn(role, &body::content(content)),
                    // A tool's call or its result.
                    _ => prompt.turn(if item.get("output").is_some() { "tool" } else { "assistant" }, &item.to_string()),
                }
            }
        }
        Some(text) => prompt.turn("user", &body::content(text)),
        None => {}
    }
    prompt.into_tokens()
}

/// What an answer repeats of its request, and its names.
struct Echo {
    id: String,
    /// The message's name in the answer.
    message_id: String,
    /// And in the events before: vLLM 0.26 gives it another.
    item_id: String,
    created_at: u64,
    model: Arc<str>,
    version: Version,
    instructions: Value,
    metadata: Value,
    tools: Value,
    temperature: f64,
    top_p: f64,
    max_output_tokens: usize,
}

impl Echo {
    fn new(app: &App, body: &Map<String, Value>, max_output_tokens: usize) -> Self {
        let field = |name| body.get(name).cloned().unwrap_or(Value::Null);
        let number = |name| body.get(name).and_then(Value::as_f64).unwrap_or(1.0);
        let message_id = format!("msg_{}", random_hex());
        Self {
            id: format!("resp_{}", random_hex()),
            item_id: match app.version {
                Version::V0_26 => random_hex(),
                Version::V0_32 => message_id.clone(),
            },
            message_id,
            created_at: super::unix_time() as u64,
            model: app.model.clone(),
            version: app.version,
            instructions: field("instructions"),
            metadata: field("metadata"),
            tools: body.get("tools").filter(|tools| tools.is_array()).cloned().unwrap_or_else(|| Value::Array(Vec::new())),
            temperature: number("temperature"),
            top_p: number("top_p"),
            max_output_tokens,
        }
    }

    fn started(&self) -> Response<'_> {
        Response {
            id: &self.id,
            created_at: self.created_at,
            incomplete_details: None,
            instructions: &self.instructions,
            metadata: &self.metadata,
            model: &self.model,
            object: "response",
            output: &[],
            parallel_tool_calls: true,
            temperature: self.temperature,
            tool_choice: if self.tools.as_array().is_none_or(Vec::is_empty) { "none" } else { "auto" },
            tools: &self.tools,
            top_p: self.top_p,
            background: false,
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: (),
            previous_response_id: (),
            prompt: (),
            reasoning: (),
            service_tier: "auto",
            status: "in_progress",
            text: (),
            top_logprobs: (),
            truncation: "disabled",
            usage: None,
            user: (),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            kv_transfer_params: (),
            ec_transfer_params: (),
            input_messages: (),
            output_messages: (),
        }
    }

    /// The whole answer, which has always as many tokens as were asked for and so is `incomplete`.
    fn completed<T>(&self, text: &str, usage: Usage, then: impl FnOnce(Response<'_>) -> T) -> T {
        let part = [Part::of(text)];
        let output = [Item { id: &self.message_id, content: &part, ..Item::STARTED }.ended()];
        then(Response {
            incomplete_details: Some(Incomplete { reason: "max_output_tokens" }),
            output: &output,
            status: "incomplete",
            usage: Some(self.usage(usage)),
            ..self.started()
        })
    }

    fn usage(&self, usage: Usage) -> UsageJson {
        UsageJson {
            input_tokens: usage.prompt,
            input_tokens_details: InputDetails {
                cached_tokens: usage.cached,
                // Always 0 in the answers of vLLM 0.32.
                cache_write_tokens: (self.version == Version::V0_32).then_some(0),
                input_tokens_per_turn: [],
                cached_tokens_per_turn: [],
            },
            output_tokens: usage.output,
            output_tokens_details: OutputDetails::default(),
            total_tokens: usage.prompt + usage.output,
        }
    }
}

impl Item<'_> {
    const STARTED: Self =
        Self { id: "", content: &[], role: "assistant", status: "in_progress", r#type: "message", phase: (), summary: None };

    fn ended(self) -> Self {
        Self { status: "completed", ..self }
    }
}

impl<'a> Part<'a> {
    fn of(text: &'a str) -> Self {
        Self { annotations: [], text, r#type: "output_text", logprobs: None }
    }
}

/// A stream's events so far.
struct Events {
    echo: Echo,
    written: u32,
    text: String,
}

fn streamed(echo: Echo, generation: Generation) -> HttpResponse {
    let mut events = Events { echo, written: 0, text: String::new() };
    generation.stream(move |out, progress, usage| match progress {
        Progress::Token { text, first, .. } => {
            if first {
                events.open(out);
            }
            events.text.push_str(&text);
            events.delta(out, &text);
        }
        Progress::End => events.close(out, usage),
    })
}

impl Events {
    fn open(&mut self, out: &mut String) {
        for kind in ["response.created", "response.in_progress"] {
            write(&mut self.written, out, kind, Event { response: Some(self.echo.started()), ..Event::default() });
        }
        let item = Item { id: &self.echo.item_id, ..Item::STARTED };
        let added = Event { item: Some(item), output_index: Some(0), ..Event::default() };
        write(&mut self.written, out, "response.output_item.added", added);
        let part = Part { logprobs: Some([]), ..Part::of("") };
        let added = Event { part: Some(part), ..in_content(&self.echo) };
        write(&mut self.written, out, "response.content_part.added", added);
    }

    fn delta(&mut self, out: &mut String, text: &str) {
        let delta = Event { delta: Some(text), logprobs: Some([]), ..in_content(&self.echo) };
        write(&mut self.written, out, "response.output_text.delta", delta);
    }

    fn close(&mut self, out: &mut String, usage: Usage) {
        let Self { echo, written, text } = self;
        let done = Event { text: Some(text), logprobs: Some([]), ..in_content(echo) };
        write(written, out, "response.output_text.done", done);
        let part = [Part::of(text)];
        write(written, out, "response.content_part.done", Event { part: Some(part[0]), ..in_content(echo) });
        let summary = (echo.version == Version::V0_26).then_some([]);
        let item = Item { id: &echo.item_id, content: &part, summary, ..Item::STARTED }.ended();
        write(written, out, "response.output_item.done", Event { item: Some(item), output_index: Some(0), ..Event::default() });
        echo.completed(text, usage, |response| {
            write(written, out, "response.completed", Event { response: Some(response), ..Event::default() });
        });
    }
}

fn in_content(echo: &Echo) -> Event<'_> {
    Event { content_index: Some(0), item_id: Some(&echo.item_id), output_index: Some(0), ..Event::default() }
}

fn write(written: &mut u32, out: &mut String, kind: &'static str, event: Event<'_>) {
    let event = Event { sequence_number: *written, r#type: kind, ..event };
    *written += 1;
    let _ = write!(out, "event: {kind}\ndata: {}\n\n", super::json(&event));
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_input_is_a_prompt_no_longer_than_its_body(body in mutated(seeds("bodies"))) {
            if let Ok(fields) = body::object(&body) {
                // Roles and marks between messages are tokens too.
                prop_assert!(prompt(&fields).len() <= 8 * body.len());
            }
        }
    }
}
