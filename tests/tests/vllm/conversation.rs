//! An agent's conversation, whose history grows with every turn, with a real engine's answers.

use anyhow::{Context, Result, ensure};
use homing_tests::{Turn, chat_url};
use reqwest::Client;
use serde_json::{Value, json};
use xtask::stack::{MODEL, Stack};

/// What a turn brought.
#[derive(Debug)]
pub(crate) struct Answer {
    /// How it was routed.
    pub(crate) turn: Turn,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Those of them that the engine had in its prefix cache.
    pub(crate) cached_tokens: u64,
    /// How many chunks a streamed answer came in.
    pub(crate) chunks: usize,
}

/// One conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    id: String,
    messages: Vec<Value>,
    client: Client,
}

impl Conversation {
    /// A conversation that has not begun.
    pub(crate) fn new(id: &str) -> Self {
        // Its text differs from other conversations' from the first token, so that a cache hit is its own.
        let system = format!("{id} is the name of this conversation. ").repeat(40);
        Self { id: id.to_owned(), messages: vec![json!({ "role": "system", "content": system })], client: Client::new() }
    }

    /// The next turn, answered at once.
    pub(crate) async fn turn(&mut self, stack: &Stack) -> Result<Answer> {
        let (turn, body) = self.ask(stack, json!({})).await?;
        let answer: Value = serde_json::from_str(&body)?;
        let text = answer["choices"][0]["message"]["content"].as_str().context("an answer's text")?;
        self.add("assistant", text);
        usage(turn, &answer["usage"], 0)
    }

    /// The next turn, streamed.
    pub(crate) async fn streamed_turn(&mut self, stack: &Stack) -> Result<Answer> {
        let (turn, body) = self.ask(stack, json!({ "stream": true, "stream_options": { "include_usage": true } })).await?;
        let events: Vec<_> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let (last, chunks) = events.split_last().context("an empty stream")?;
        ensure!(*last == "[DONE]", "the stream ended with {last}");
        let chunks: Vec<Value> = chunks.iter().map(|chunk| serde_json::from_str(chunk)).collect::<Result<_, _>>()?;
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        self.add("assistant", &text);
        usage(turn, &chunks.last().context("a chunk")?["usage"], chunks.len())
    }

    async fn ask(&mut self, stack: &Stack, more: Value) -> Result<(Turn, String)> {
        self.add("user", &format!("Turn {} of {}: what comes next?", self.messages.len(), self.id));
        let mut body = json!({ "model": MODEL, "messages": self.messages, "max_tokens": 24, "ignore_eos": true });
        body.as_object_mut().zip(more.as_object().cloned()).context("objects").map(|(body, more)| body.extend(more))?;
        let response = self.client.post(chat_url(stack)).header("x-session-id", &self.id).json(&body).send().await?;
        let turn = Turn::of(&response);
        let body = response.text().await.context("the rest of a turn")?;
        ensure!(turn.status == 200, "{turn:?}: {body}");
        Ok((turn, body))
    }

    fn add(&mut self, role: &str, content: &str) {
        self.messages.push(json!({ "role": role, "content": content }));
    }
}

fn usage(turn: Turn, usage: &Value, chunks: usize) -> Result<Answer> {
    let prompt_tokens = usage["prompt_tokens"].as_u64().with_context(|| format!("no prompt tokens in {usage}"))?;
    // An engine says nothing of a cache that it found nothing in.
    let cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    Ok(Answer { turn, prompt_tokens, cached_tokens, chunks })
}
