//! Requests, and what becomes of them.

use super::blocks::{BlockHash, BlockId};

/// Names a request; the caller's own, one of its kind in an engine.
pub type RequestId = u64;

/// A request as it is submitted. What the model would say is given with it, so the engine has no opinion on text.
#[derive(Clone, Debug)]
pub struct Request {
    /// The request's name.
    pub id: RequestId,
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// The tokens that will be generated, at least one.
    pub output: Vec<u32>,
    /// Why the request ends after `output`.
    pub reason: FinishReason,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its answer.
    Stop,
    /// The request's token limit was reached.
    Length,
}

/// Something a step brought, in the order it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first output token.
    FirstToken {
        /// The request.
        id: RequestId,
        /// Prompt tokens that were found in the prefix cache when the request was first scheduled; a multiple of the block size.
        cached_tokens: usize,
    },
    /// An output token after the first.
    Token {
        /// The request.
        id: RequestId,
    },
    /// The request ended; its last token's event comes before.
    Finished {
        /// The request.
        id: RequestId,
        /// Why it ended.
        reason: FinishReason,
        /// As in [`Event::FirstToken`].
        cached_tokens: usize,
    },
}

impl Event {
    /// The request that it is about.
    pub fn id(&self) -> RequestId {
        match *self {
            Self::FirstToken { id, .. } | Self::Token { id } | Self::Finished { id, .. } => id,
        }
    }
}

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// It could never run.
    #[error("prompt and output have {tokens} tokens, but the KV cache holds {limit}: shorten the request or raise kv_cache_tokens")]
    TooLong {
        /// Prompt and output tokens.
        tokens: usize,
        /// What one request may have.
        limit: usize,
    },
    /// There is nothing to compute.
    #[error("a request needs at least one prompt token and one output token")]
    Empty,
    /// The name is taken.
    #[error("request {0} is in the engine already: give each request an id of its own")]
    DuplicateId(RequestId),
}

/// A request inside the engine. Its tokens are known by their blocks' hashes alone.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) reason: FinishReason,
    pub(super) prompt_tokens: usize,
    pub(super) output_tokens: usize,
    /// Output tokens made so far.
    pub(super) generated: usize,
    /// Tokens whose KV is in `blocks`.
    pub(super) computed: usize,
    /// Tokens that the step in progress computes.
    pub(super) scheduled: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Of each full block of prompt and output.
    pub(super) hashes: Vec<BlockHash>,
    /// Found in the prefix cache when first scheduled.
    pub(super) cached_tokens: Option<usize>,
    pub(super) preempted: bool,
}

impl Sequence {
    pub(super) fn new(request: &Request, block_size: usize) -> Self {
        Self {
            id: request.id,
            reason: request.reason,
            prompt_tokens: request.prompt.len(),
            output_tokens: request.output.len(),
            generated: 0,
            computed: 0,
            scheduled: 0,
            blocks: Vec::new(),
            hashes: super::blocks::hash_blocks(&request.prompt, &request.output, block_size),
            cached_tokens: None,
            preempted: false,
        }
    }

    /// Tokens that exist: the prompt and what was generated.
    pub(super) fn known(&self) -> usize {
        self.prompt_tokens + self.generated
    }

    /// Tokens that exist and are not computed.
    pub(super) fn pending(&self) -> usize {
        self.known() - self.computed
    }

    /// Whether the next step only computes the token generated last.
    pub(super) fn decodes(&self) -> bool {
        self.generated > 0 && self.pending() == 1
    }
}
