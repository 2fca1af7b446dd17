//! Ids in request headers.

use std::rc::Rc;

use super::{Source, as_id};

/// Headers that name a conversation, the most specific first. Each entry is one client's or one gateway's own convention.
const KNOWN: [&str; 16] = [
    "x-claude-code-session-id", // Claude Code, together with its agent headers
    "thread-id",                // Codex CLI: one thread
    "session-id",               // Codex CLI: shared by its subagents
    "x-opencode-session",       // OpenCode, its own provider
    "agent-session-id",         // Goose
    "x-grok-conv-id",           // Grok Build
    "x-session-affinity",       // OpenCode, Crush, Pi
    "x-session-id",             // OpenCode, Crush, OpenRouter
    "x-litellm-session-id",     // OpenHands, LiteLLM
    "x-litellm-trace-id",       // Cline (per conversation, despite the name)
    "x-smg-routing-key",        // SGLang gateway clients
    "x-dynamo-session-id",      // NVIDIA Dynamo clients
    "x-task-id",                // Cline
    "x-kilocode-taskid",        // Kilo
    "x-affinity",               // Zed
    "session_id",               // Codex CLI before May 2026
];

const CLAUDE_SESSION: usize = 0;
const CLAUDE_AGENT: &[u8] = b"x-claude-code-agent-id";
const CLAUDE_PARENT_AGENT: &[u8] = b"x-claude-code-parent-agent-id";

/// The headers that name conversations, in the order of precedence.
#[derive(Clone, Debug)]
pub struct HeaderNames {
    operator: Vec<Rc<str>>,
}

/// What the headers say.
pub(super) struct Named<'a> {
    pub(super) source: Source,
    pub(super) id: &'a [u8],
    pub(super) agent: Option<&'a [u8]>,
    pub(super) parent_agent: Option<&'a [u8]>,
}

/// One header's value over all its repetitions.
#[derive(Clone, Copy, Default)]
enum Value<'a> {
    #[default]
    Missing,
    One(&'a [u8]),
    /// Repeated with different values: a client and a gateway disagree, so it names nothing.
    Conflicting,
}

impl<'a> Value<'a> {
    fn add(&mut self, value: &'a [u8]) {
        *self = match *self {
            Self::Missing => Self::One(value),
            Self::One(first) if first == value => Self::One(first),
            _ => Self::Conflicting,
        };
    }

    fn id(self) -> Option<&'a [u8]> {
        match self {
            Self::One(value) => as_id(value),
            Self::Missing | Self::Conflicting => None,
        }
    }
}

impl HeaderNames {
    /// The known headers behind the operator's own.
    pub(super) fn new(operator: &[String]) -> Self {
        Self { operator: operator.iter().map(|name| Rc::from(name.to_ascii_lowercase())).collect() }
    }

    /// Reads every header once; names are in lower case, as Envoy keeps them.
    pub(super) fn find<'a>(&self, headers: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Option<Named<'a>> {
        let mut operator: Option<(usize, Value<'a>)> = None;
        let mut known = [Value::Missing; KNOWN.len()];
        let (mut agent, mut parent_agent) = (Value::Missing, Value::Missing);
        for (name, value) in headers {
            if let Some(rank) = self.operator.iter().position(|own| own.as_bytes() == name) {
                match &mut operator {
                    Some((best, seen)) if *best == rank => seen.add(value),
                    Some((best, _)) if *best < rank => {}
                    _ => operator = as_id(value).map(|_| (rank, Value::One(value))).or(operator),
                }
            }
            if let Some(slot) = KNOWN.iter().position(|known| known.as_bytes() == name).and_then(|rank| known.get_mut(rank)) {
                slot.add(value);
            } else if name == CLAUDE_AGENT {
                agent.add(value);
            } else if name == CLAUDE_PARENT_AGENT {
                parent_agent.add(value);
            }
        }
        if let Some((rank, value)) = operator
            && let (Some(id), Some(name)) = (value.id(), self.operator.get(rank))
        {
            return Some(Named { source: Source::Operator(Rc::clone(name)), id, agent: None, parent_agent: None });
        }
        let (rank, id) = known.iter().enumerate().find_map(|(rank, value)| Some((rank, value.id()?)))?;
        let agents = rank == CLAUDE_SESSION;
        Some(Named {
            source: Source::Known(KNOWN.get(rank)?),
            id,
            agent: agent.id().filter(|_| agents),
            parent_agent: parent_agent.id().filter(|_| agents),
        })
    }
}

/// Whether a body may name the conversation: not when it is compressed, since the filter reads it as it is sent.
pub fn needs_body(content_encoding: Option<&[u8]>) -> bool {
    content_encoding
        .is_none_or(|encoding| encoding.trim_ascii().is_empty() || encoding.trim_ascii().eq_ignore_ascii_case(b"identity"))
}
