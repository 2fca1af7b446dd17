//! Ids in a JSON request body.
//!
//! Only known paths are read: searching a body for a key would let the text of a prompt choose the conversation.

use std::borrow::Cow;

use serde::de::IgnoredAny;

use super::json::{Field, each, object, string};
use super::{AlsoSource, as_id};

/// The fields of a request body that say which conversation it belongs to.
pub(super) struct Fields<'a>([Field<'a>; TOP.len()]);

/// Fields that hold ids, then fields that hold text.
const TOP: [&str; 12] = [
    "metadata",
    "session_id",
    "litellm_session_id",
    "conversation",
    "prompt_cache_key",
    "user",
    "safety_identifier",
    "model",
    "system",
    "instructions",
    "messages",
    "input",
];
const IDS: usize = 7;

/// Claude Code's session inside `metadata.user_id`, before it became JSON: `user_<hash>_account_<uuid>_session_<uuid>`.
const OLD_USER_PREFIX: &str = "user_";
const OLD_SESSION_MARK: &str = "_session_";

/// The first block of Claude Code's system text; it changes between requests, so it is no part of a fingerprint.
const BILLING_PREFIX: &[u8] = b"x-anthropic-billing-header:";

/// Reads a whole body. `None` if it is not a JSON object, or if a field that may hold an id is not valid to the last byte.
pub(super) fn read(body: &[u8]) -> Option<Fields<'_>> {
    let fields = object(body, &TOP)?;
    let valid = |json: &[u8]| core::str::from_utf8(json).is_ok_and(|json| serde_json::from_str::<IgnoredAny>(json).is_ok());
    fields.iter().take(IDS).filter_map(|field| field.get()).all(valid).then_some(Fields(fields))
}

impl<'a> Fields<'a> {
    /// The best source of an id, and the id.
    pub(super) fn id(&self) -> Option<(&'static str, Cow<'a, [u8]>)> {
        let [metadata, session_id, litellm_session_id, conversation, prompt_cache_key, ..] = &self.0;
        let [user_id, metadata_session_id] =
            metadata.get().and_then(|json| object(json, &["user_id", "session_id"])).unwrap_or_default();
        let conversation_id = |json: &'a [u8]| match object(json, &["id"]) {
            Some([id]) => id.get().and_then(plain_id),
            None => plain_id(json),
        };
        None.or_else(|| Some(("body:metadata.user_id", user_id.get().and_then(claude_session)?)))
            .or_else(|| Some(("body:session_id", session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:litellm_session_id", litellm_session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:metadata.session_id", metadata_session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:conversation", conversation.get().and_then(conversation_id)?)))
            .or_else(|| Some(("body:prompt_cache_key", prompt_cache_key.get().and_then(plain_id)?)))
    }

    /// An id that the operator asked for.
    pub(super) fn also(&self, source: AlsoSource) -> Option<Cow<'a, [u8]>> {
        let [metadata, _, _, _, _, user, safety_identifier, ..] = &self.0;
        match source {
            AlsoSource::User => plain_id(user.get()?),
            AlsoSource::SafetyIdentifier => plain_id(safety_identifier.get()?),
            AlsoSource::MetadataUserId => {
                let [user_id] = object(metadata.get()?, &["user_id"])?;
                plain_id(user_id.get()?)
            }
            AlsoSource::XUserId | AlsoSource::XTenantId | AlsoSource::XClientRequestId => None,
        }
    }

    /// Feeds what stays the same over a conversation's turns: the model, the system text without the billing line, and every
    /// message up to the end of the first user message. `None` if there is no user message.
    pub(super) fn fingerprint(&self, mut feed: impl FnMut(&[u8])) -> Option<()> {
        let [.., model, system, instructions, messages, input] = &self.0;
        feed(model.get().unwrap_or_default());
        for json in [system, instructions].into_iter().filter_map(|field| field.get()) {
            texts(json, &mut |text| {
                if !text.starts_with(BILLING_PREFIX) {
                    feed(text);
                }
            });
        }
        let turns = messages.get().or(input.get())?;
        if is_string(turns) {
            texts(turns, &mut feed);
            return Some(());
        }
        let mut found = None;
        each(turns, |message| {
            let [role, content] = object(message, &["role", "content"])?;
            let role = string(role.get()?)?;
            feed(role.as_bytes());
            texts(content.get()?, &mut feed);
            found = (role == "user").then_some(());
            if found.is_some() { None } else { Some(()) }
        });
        found
    }
}

/// Calls `with` for the text of a string or of a list of blocks. A block without text counts as it is written; its other fields
/// (`cache_control` moves from turn to turn) do not. So does a string that is not valid: a client that cuts text in the middle
/// of a surrogate pair writes one, and it still tells conversations apart.
fn texts(json: &[u8], with: &mut impl FnMut(&[u8])) {
    if is_string(json) {
        return with(string(json).as_deref().map_or(json, str::as_bytes));
    }
    each(json, |block| {
        let text = object(block, &["text"]).and_then(|[text]| string(text.get()?));
        with(text.as_deref().map_or(block, str::as_bytes));
        Some(())
    });
}

fn is_string(json: &[u8]) -> bool {
    json.first() == Some(&b'"')
}

/// An id that is a string or an integer.
fn plain_id(json: &[u8]) -> Option<Cow<'_, [u8]>> {
    match string(json) {
        Some(Cow::Borrowed(text)) => as_id(text.as_bytes()).map(Cow::Borrowed),
        Some(Cow::Owned(text)) => as_id(text.as_bytes()).map(|id| Cow::Owned(id.to_vec())),
        None => core::str::from_utf8(json).ok()?.parse::<i64>().is_ok().then_some(Cow::Borrowed(json)),
    }
}

/// The session in Claude Code's `metadata.user_id`: the `session_id` of a JSON object inside the string, or the older form.
/// The rest of the value names a machine and a person, so it is never an id.
fn claude_session(json: &[u8]) -> Option<Cow<'_, [u8]>> {
    let text = string(json)?;
    let session = match object(text.as_bytes(), &["session_id"]) {
        Some([session]) => plain_id(session.get()?)?.into_owned(),
        None if text.starts_with(OLD_USER_PREFIX) => as_id(text.rsplit_once(OLD_SESSION_MARK)?.1.as_bytes())?.to_vec(),
        None => return None,
    };
    Some(Cow::Owned(session))
}
