//! One session as plain data.

use serde::{Deserialize, Serialize};

use crate::text::{text_of, words};

/// One session: what it sends, and when. Serialised, it is a line of a [trace](super::trace).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionPlan {
    /// Its name, a UUID: what a client sends as its session id.
    pub id: String,
    /// The session that started it, if it is a subagent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Open loop: milliseconds after the start of the run at which it comes. None: closed loop, it comes when another has ended. Of no
    /// meaning for a subagent, which comes when its parent starts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival_ms: Option<u64>,
    /// The system prompt; empty for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub system: Vec<Text>,
    /// What it does, in order.
    pub steps: Vec<Step>,
}

/// A piece of made-up text: [`words`] of this seed. Two pieces of one seed begin alike, so the same seed in the same place is a shared
/// prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(u64, usize)", into = "(u64, usize)")]
pub struct Text {
    /// What it says.
    pub seed: u64,
    /// How long it is: exact where four bytes are a token ([`crate::text`]), about right for a real tokenizer.
    pub tokens: usize,
}

/// One thing a session does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The user's next message: it and its answer become history.
    Turn(Call),
    /// The history is replaced by the system prompt and this message, which stands for the summary and what is asked next.
    Compact(Call),
    /// A call beside the conversation, such as for a title: this message alone, without system prompt, that becomes no history.
    Side(Call),
    /// Subagents side by side; the session goes on when all have ended.
    FanOut(Vec<SessionPlan>),
    /// The end without notice: nothing more comes, although the session was not done.
    Stop,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// Milliseconds from the end of the call before until this one is sent.
    #[serde(default)]
    pub think_ms: u64,
    /// The user's message, in pieces that follow one another.
    pub text: Vec<Text>,
    /// Tokens of the answer, at least 1.
    pub output: usize,
    /// The client hangs up this many milliseconds after it has sent the call, and nothing more comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang_up_ms: Option<u64>,
}

// === impl Text ===

impl Text {
    /// The text of pieces that follow one another.
    pub fn join(pieces: &[Self]) -> String {
        pieces.iter().map(|piece| text_of(&words(piece.seed, piece.tokens))).collect()
    }

    /// Tokens of pieces together.
    pub fn count(pieces: &[Self]) -> usize {
        pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.tokens))
    }
}

impl From<(u64, usize)> for Text {
    fn from((seed, tokens): (u64, usize)) -> Self {
        Self { seed, tokens }
    }
}

impl From<Text> for (u64, usize) {
    fn from(text: Text) -> Self {
        (text.seed, text.tokens)
    }
}

// === impl SessionPlan ===

impl SessionPlan {
    /// Every call, also those of subagents, in the order of the steps.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        let mut rest: Vec<&Step> = self.steps.iter().rev().collect();
        std::iter::from_fn(move || {
            loop {
                match rest.pop()? {
                    Step::Turn(call) | Step::Compact(call) | Step::Side(call) => return Some(call),
                    Step::FanOut(plans) => rest.extend(plans.iter().rev().flat_map(|plan| plan.steps.iter().rev())),
                    Step::Stop => {}
                }
            }
        })
    }

    /// About how many tokens the largest call has, prompt and answer, subagents' too; what a chat template adds is not counted.
    pub fn largest_call(&self) -> usize {
        let system = Text::count(&self.system);
        let (mut history, mut largest) = (system, 0);
        for step in &self.steps {
            let tokens = match step {
                Step::Turn(call) => {
                    history += Text::count(&call.text) + call.output;
                    history
                }
                Step::Compact(call) => {
                    history = system + Text::count(&call.text) + call.output;
                    history
                }
                Step::Side(call) => Text::count(&call.text) + call.output,
                Step::FanOut(plans) => plans.iter().map(Self::largest_call).max().unwrap_or(0),
                Step::Stop => break,
            };
            largest = largest.max(tokens);
        }
        largest
    }
}
