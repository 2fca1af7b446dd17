//! Ids in a JSON request body, read in one pass without building a tree.
//!
//! Only known paths are read: searching a body for a key would let the text of a prompt choose the conversation.

use core::fmt;
use std::borrow::Cow;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{BodySource, as_id};

/// The fields of a request body that say which conversation it belongs to.
pub(super) struct Fields<'a>([Field<'a>; TOP.len()]);

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

/// Claude Code's session inside `metadata.user_id`, before it became JSON: `user_<hash>_account_<uuid>_session_<uuid>`.
const OLD_USER_PREFIX: &str = "user_";
const OLD_SESSION_MARK: &str = "_session_";

/// The first block of Claude Code's system text; it changes between requests, so it is no part of a fingerprint.
const BILLING_PREFIX: &str = "x-anthropic-billing-header:";

/// Reads a whole body. `None` if it is not a JSON object.
pub(super) fn read(body: &[u8]) -> Option<Fields<'_>> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let fields = Object(TOP).deserialize(&mut json).ok()?;
    json.end().ok()?;
    Some(Fields(fields))
}

impl<'a> Fields<'a> {
    /// The best source of an id, and the id.
    pub(super) fn id(&self) -> Option<(&'static str, Cow<'a, [u8]>)> {
        let [metadata, session_id, litellm_session_id, conversation, prompt_cache_key, ..] = &self.0;
        let [user_id, metadata_session_id] =
            metadata.get().and_then(|raw| object(raw.get(), ["user_id", "session_id"])).unwrap_or_default();
        let conversation_id = |raw: &'a RawValue| match object(raw.get(), ["id"]) {
            Some([id]) => id.get().and_then(plain_id),
            None => plain_id(raw),
        };
        None.or_else(|| Some(("body:metadata.user_id", user_id.get().and_then(claude_session)?)))
            .or_else(|| Some(("body:session_id", session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:litellm_session_id", litellm_session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:metadata.session_id", metadata_session_id.get().and_then(plain_id)?)))
            .or_else(|| Some(("body:conversation", conversation.get().and_then(conversation_id)?)))
            .or_else(|| Some(("body:prompt_cache_key", prompt_cache_key.get().and_then(plain_id)?)))
    }

    /// An id that the operator asked for.
    pub(super) fn also(&self, source: BodySource) -> Option<(&'static str, Cow<'a, [u8]>)> {
        let [metadata, _, _, _, _, user, safety_identifier, ..] = &self.0;
        match source {
            BodySource::User => Some(("body:user", plain_id(user.get()?)?)),
            BodySource::SafetyIdentifier => Some(("body:safety_identifier", plain_id(safety_identifier.get()?)?)),
            BodySource::MetadataUserId => {
                let [user_id] = object(metadata.get()?.get(), ["user_id"])?;
                Some(("body:metadata.user_id", plain_id(user_id.get()?)?))
            }
        }
    }

    /// Feeds what stays the same over a conversation's turns: the model, the system text without the billing line, and every
    /// message up to the end of the first user message. `None` if there is no user message.
    pub(super) fn fingerprint(&self, mut feed: impl FnMut(&[u8])) -> Option<()> {
        let [.., model, system, instructions, messages, input] = &self.0;
        feed(model.get().map_or("", |raw| raw.get()).as_bytes());
        for raw in [system, instructions].into_iter().filter_map(Field::get) {
            texts(raw, &mut |text| {
                if !text.starts_with(BILLING_PREFIX) {
                    feed(text.as_bytes());
                }
            });
        }
        let turns = messages.get().or(input.get())?;
        if let Some(text) = string(turns.get()) {
            feed(text.as_bytes());
            return Some(());
        }
        let mut found = None;
        each(turns.get(), |message| {
            let [role, content] = object(message.get(), ["role", "content"])?;
            let role = string(role.get()?.get())?;
            feed(role.as_bytes());
            texts(content.get()?, &mut |text| feed(text.as_bytes()));
            found = (role == "user").then_some(());
            if found.is_some() { None } else { Some(()) }
        });
        found
    }
}

/// Calls `with` for the text of a string or of a list of blocks. A block without text counts as it is written; its other fields
/// (`cache_control` moves from turn to turn) do not.
fn texts(raw: &RawValue, with: &mut impl FnMut(&str)) {
    if let Some(text) = string(raw.get()) {
        return with(&text);
    }
    each(raw.get(), |block| {
        match object(block.get(), ["text"]).and_then(|[text]| string(text.get()?.get())) {
            Some(text) => with(&text),
            None => with(block.get()),
        }
        Some(())
    });
}

/// An id that is a string or an integer.
fn plain_id(raw: &RawValue) -> Option<Cow<'_, [u8]>> {
    let json = raw.get();
    match string(json) {
        Some(Cow::Borrowed(text)) => as_id(text.as_bytes()).map(Cow::Borrowed),
        Some(Cow::Owned(text)) => as_id(text.as_bytes()).map(|id| Cow::Owned(id.to_vec())),
        None => json.parse::<i64>().is_ok().then_some(Cow::Borrowed(json.as_bytes())),
    }
}

/// The session in Claude Code's `metadata.user_id`: the `session_id` of a JSON object inside the string, or the older form.
/// The rest of the value names a machine and a person, so it is never an id.
fn claude_session(raw: &RawValue) -> Option<Cow<'_, [u8]>> {
    let text = string(raw.get())?;
    let session = match object(&text, ["session_id"]) {
        Some([session]) => plain_id(session.get()?)?.into_owned(),
        None if text.starts_with(OLD_USER_PREFIX) => as_id(text.rsplit_once(OLD_SESSION_MARK)?.1.as_bytes())?.to_vec(),
        None => return None,
    };
    Some(Cow::Owned(session))
}

/// A field that counts only if it stands once: parsers differ over duplicate keys, so a duplicate is no id.
#[derive(Clone, Copy, Default)]
enum Field<'a> {
    #[default]
    Missing,
    Once(&'a RawValue),
    Repeated,
}

impl<'a> Field<'a> {
    fn get(&self) -> Option<&'a RawValue> {
        match self {
            Self::Once(raw) => Some(raw),
            Self::Missing | Self::Repeated => None,
        }
    }
}

/// The text of a JSON string.
fn string(json: &str) -> Option<Cow<'_, str>> {
    /// Borrows where no escape forces a copy, which `Cow`'s own `Deserialize` never does.
    struct Text;
    impl<'de> Visitor<'de> for Text {
        type Value = Cow<'de, str>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string")
        }
        fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
            Ok(Cow::Borrowed(text))
        }
        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Cow::Owned(text.to_owned()))
        }
    }
    if !json.starts_with('"') {
        return None;
    }
    serde_json::Deserializer::from_str(json).deserialize_str(Text).ok()
}

/// The named fields of a JSON object, unparsed.
fn object<'a, const N: usize>(json: &'a str, keys: [&'static str; N]) -> Option<[Field<'a>; N]> {
    if !json.trim_start().starts_with('{') {
        return None;
    }
    Object(keys).deserialize(&mut serde_json::Deserializer::from_str(json)).ok()
}

struct Object<const N: usize>([&'static str; N]);

impl<'de, const N: usize> DeserializeSeed<'de> for Object<N> {
    type Value = [Field<'de>; N];

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for Object<N> {
    type Value = [Field<'de>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = [Field::Missing; N];
        while let Some(index) = map.next_key_seed(Key(&self.0))? {
            match index.and_then(|index| fields.get_mut(index)) {
                None => drop(map.next_value::<IgnoredAny>()?),
                Some(field) => {
                    let raw = map.next_value()?;
                    *field = if matches!(field, Field::Missing) { Field::Once(raw) } else { Field::Repeated };
                }
            }
        }
        Ok(fields)
    }
}

/// Finds a key in a list without copying it.
struct Key<'k>(&'k [&'static str]);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|known| *known == key))
    }
}

/// Calls `with` for each element of a JSON array until it answers `None`.
fn each<'a>(json: &'a str, with: impl FnMut(&'a RawValue) -> Option<()>) {
    struct Elements<F>(F);
    impl<'de, F: FnMut(&'de RawValue) -> Option<()>> Visitor<'de> for Elements<F> {
        type Value = ();
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array")
        }
        fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
            while let Some(element) = seq.next_element()? {
                (self.0)(element).ok_or_else(|| A::Error::custom("enough"))?;
            }
            Ok(())
        }
    }
    // The error is either `enough` or an element the caller has no use for.
    let _ = serde_json::Deserializer::from_str(json).deserialize_seq(Elements(with));
}
