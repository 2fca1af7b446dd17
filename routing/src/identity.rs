//! Naming the conversation a request belongs to.
//!
//! Headers come first, since reading them costs nothing; the body is asked only when no header names a conversation. The
//! precedence is the operator's own headers, the clients' native headers, general session headers, then the body's fields.
//! An id is an opaque value: it is digested as received and never kept, logged or exported.

mod body;
mod headers;

use core::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

pub use headers::{HeaderNames, needs_body};

/// The longest id that names a conversation, in bytes. Longer values are text, not ids.
pub const MAX_ID_BYTES: usize = 512;

/// Which parts of a request may name its conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Naming {
    /// Headers the operator names, before every other source; lower case.
    pub headers: Vec<String>,
    /// Whether the body is read when no header names the conversation.
    pub body: bool,
    /// Whether the content of the first messages names a conversation that nothing else does.
    pub fingerprint: bool,
    /// Body fields that name a person rather than a conversation, behind every other id, if the operator asks for them.
    pub also: Vec<BodySource>,
}

/// A body field that names a person, or a cache family, rather than a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodySource {
    /// `user`, OpenAI.
    User,
    /// `safety_identifier`, OpenAI.
    SafetyIdentifier,
    /// `metadata.user_id` as a whole, Anthropic.
    MetadataUserId,
}

impl Default for Naming {
    fn default() -> Self {
        Self { headers: Vec::new(), body: true, fingerprint: true, also: Vec::new() }
    }
}

/// A conversation's name inside Homing: a keyed digest of pool, source, id and agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub u128);

impl core::fmt::Display for Digest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A named conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Its name.
    pub digest: Digest,
    /// What named it: a header in lower case, `body:<path>` or `fingerprint`.
    pub source: Source,
    /// The conversation this one began in, if it is a subagent's.
    pub parent: Option<Digest>,
}

/// What named a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A header or a body field this crate knows.
    Known(&'static str),
    /// A header the operator named.
    Operator(std::rc::Rc<str>),
}

impl Source {
    /// As it is shown in `x-homing-source`.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Known(name) => name,
            Self::Operator(name) => name,
        }
    }
}

/// Names conversations for one pool.
#[derive(Clone, Debug)]
pub struct Namer {
    naming: Naming,
    names: HeaderNames,
    /// Keyed and fed with the pool, so that one pool's conversations are not another's.
    hasher: SipHasher24,
}

impl Namer {
    /// A namer for the pool of `cluster`. `key` makes digests unpredictable to clients; a fleet shares one.
    pub fn new(naming: Naming, key: &[u8; 16], cluster: &str) -> Self {
        let mut hasher = SipHasher24::new_with_key(key);
        feed(&mut hasher, cluster.as_bytes());
        let names = HeaderNames::new(&naming.headers);
        Self { naming, names, hasher }
    }

    /// Whether a request without an id in its headers is to be named by its body.
    pub fn reads_bodies(&self) -> bool {
        self.naming.body || self.naming.fingerprint || !self.naming.also.is_empty()
    }

    /// The conversation the headers name, if they do.
    pub fn from_headers<'a>(&self, headers: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Option<Conversation> {
        let named = self.names.find(headers)?;
        let digest = self.digest(named.source.as_str(), named.id, named.agent);
        let parent = named.agent.map(|_| self.digest(named.source.as_str(), named.id, named.parent_agent));
        Some(Conversation { digest, source: named.source, parent })
    }

    /// The conversation a complete JSON body names, if it does.
    pub fn from_body(&self, body: &[u8]) -> Option<Conversation> {
        let fields = body::read(body)?;
        let id = if self.naming.body { fields.id() } else { None };
        let also = || self.naming.also.iter().find_map(|source| fields.also(*source));
        if let Some((source, id)) = id.or_else(also) {
            return Some(Conversation { digest: self.digest(source, &id, None), source: Source::Known(source), parent: None });
        }
        if !self.naming.fingerprint {
            return None;
        }
        let mut hasher = self.hasher;
        feed(&mut hasher, FINGERPRINT.as_bytes());
        fields.fingerprint(|part| feed(&mut hasher, part))?;
        Some(Conversation { digest: finish(&hasher), source: Source::Known(FINGERPRINT), parent: None })
    }

    fn digest(&self, source: &str, id: &[u8], agent: Option<&[u8]>) -> Digest {
        let mut hasher = self.hasher;
        feed(&mut hasher, source.as_bytes());
        feed(&mut hasher, id);
        if let Some(agent) = agent {
            feed(&mut hasher, agent);
        }
        finish(&hasher)
    }
}

const FINGERPRINT: &str = "fingerprint";

/// Feeds one part with its length, so that no two lists of parts are the same bytes.
fn feed(hasher: &mut SipHasher24, part: &[u8]) {
    hasher.write(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
    hasher.write(part);
}

fn finish(hasher: &SipHasher24) -> Digest {
    Digest(hasher.finish128().as_u128())
}

/// The id in a raw value, if it is one: not blank, not too long, not a word for "nothing".
fn as_id(value: &[u8]) -> Option<&[u8]> {
    let id = value.trim_ascii();
    let nothing = [&b"null"[..], b"undefined", b"none"].iter().any(|word| id.eq_ignore_ascii_case(word));
    (!id.is_empty() && id.len() <= MAX_ID_BYTES && !nothing).then_some(id)
}

#[cfg(test)]
mod tests;
