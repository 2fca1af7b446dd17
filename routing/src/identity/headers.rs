//! Ids in request headers.

use std::rc::Rc;

use super::{Source, as_id};

/// A header that names a conversation: one client's or one gateway's own convention.
struct Convention {
    id: &'static str,
    /// Names, on a subagent's requests, the conversation it began in.
    parent: Option<&'static str>,
}

const fn alone(id: &'static str) -> Convention {
    Convention { id, parent: None }
}

const fn child(id: &'static str, parent: &'static str) -> Convention {
    Convention { id, parent: Some(parent) }
}

const CODEX_PARENT: &str = "x-codex-parent-thread-id";
const OPENCODE_PARENT: &str = "x-parent-session-id";
const DYNAMO_PARENT: &str = "x-dynamo-parent-session-id";

/// The most specific first.
const KNOWN: [Convention; 18] = [
    alone("x-claude-code-session-id"),              // Claude Code, together with its agent headers
    child("thread-id", "x-codex-parent-thread-id"), // Codex CLI: one thread
    alone("session-id"),                            // Codex CLI: shared by its subagents
    child("x-opencode-session", OPENCODE_PARENT),   // OpenCode, its own provider
    alone("agent-session-id"),                      // Goose
    alone("x-grok-conv-id"),                        // Grok Build
    child("x-session-affinity", OPENCODE_PARENT),   // OpenCode, Crush, Pi
    child("x-session-id", OPENCODE_PARENT),         // OpenCode, Crush, OpenRouter
    alone("x-litellm-session-id"),                  // OpenHands, LiteLLM
    alone("x-litellm-trace-id"),                    // Cline (per conversation, despite the name)
    alone("x-smg-routing-key"),                     // SGLang gateway clients
    child("x-dynamo-session-id", DYNAMO_PARENT),    // NVIDIA Dynamo clients
    alone("x-task-id"),                             // Cline
    alone("x-kilocode-taskid"),                     // Kilo
    alone("x-roo-task-id"),                         // Roo
    alone("x-zoo-session-id"),                      // Zoo
    alone("x-affinity"),                            // Zed
    alone("session_id"),                            // Codex CLI before May 2026
];

const CLAUDE_SESSION: usize = 0;
const CLAUDE_AGENT: &str = "x-claude-code-agent-id";
const CLAUDE_PARENT_AGENT: &str = "x-claude-code-parent-agent-id";

/// Headers that say more about a conversation which another header names.
const RELATED: [&str; 5] = [CLAUDE_AGENT, CLAUDE_PARENT_AGENT, CODEX_PARENT, OPENCODE_PARENT, DYNAMO_PARENT];

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
    /// The id and the agent of the conversation this one began in, by the same source.
    pub(super) parent: Option<(&'a [u8], Option<&'a [u8]>)>,
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
        // Without names of the operator's this allocates nothing.
        let mut operator = vec![Value::Missing; self.operator.len()];
        let mut known = [Value::Missing; KNOWN.len()];
        let mut related = [Value::Missing; RELATED.len()];
        for (name, value) in headers {
            let own = self.operator.iter().zip(&mut operator).find(|(own, _)| own.as_bytes() == name);
            if let Some((_, slot)) = own {
                slot.add(value);
            }
            let known = KNOWN.iter().position(|known| known.id.as_bytes() == name).and_then(|rank| known.get_mut(rank));
            let slot = known.or_else(|| {
                let index = RELATED.iter().position(|related| related.as_bytes() == name)?;
                related.get_mut(index)
            });
            if let Some(slot) = slot {
                slot.add(value);
            }
        }
        let own = self.operator.iter().zip(&operator).find_map(|(name, value)| Some((name, value.id()?)));
        if let Some((name, id)) = own {
            return Some(Named { source: Source::Operator(Rc::clone(name)), id, agent: None, parent: None });
        }
        let (rank, id) = known.iter().enumerate().find_map(|(rank, value)| Some((rank, value.id()?)))?;
        let convention = KNOWN.get(rank)?;
        let about = |name| RELATED.iter().zip(related).find(|(known, _)| **known == name)?.1.id();
        let agent = if rank == CLAUDE_SESSION { about(CLAUDE_AGENT) } else { None };
        let parent = match agent {
            Some(_) => Some((id, about(CLAUDE_PARENT_AGENT))),
            None => convention.parent.and_then(about).map(|id| (id, None)),
        };
        Some(Named { source: Source::Known(convention.id), id, agent, parent })
    }
}

/// The first of the `wanted` headers that holds an id, and the id.
pub(super) fn first<'a>(
    headers: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    wanted: impl Iterator<Item = &'static str>,
) -> Option<(&'static str, &'a [u8])> {
    let mut found: Vec<_> = wanted.map(|name| (name, Value::Missing)).collect();
    if found.is_empty() {
        return None;
    }
    for (name, value) in headers {
        found.iter_mut().filter(|(wanted, _)| wanted.as_bytes() == name).for_each(|(_, seen)| seen.add(value));
    }
    found.into_iter().find_map(|(name, value)| Some((name, value.id()?)))
}

/// Whether a body may name the conversation: not when it is compressed, since the filter reads it as it is sent.
pub fn needs_body(content_encoding: Option<&[u8]>) -> bool {
    content_encoding
        .is_none_or(|encoding| encoding.trim_ascii().is_empty() || encoding.trim_ascii().eq_ignore_ascii_case(b"identity"))
}
