//! Naming the conversation a request belongs to.
//!
//! Headers come first, since reading them costs nothing; the body is asked only when no header names a conversation. The
//! precedence is the operator's own headers, the clients' native headers, general session headers, the body's fields, and last what
//! the operator asks for besides.
//! An id is an opaque value: it is digested as received and never kept, logged or exported.

mod body;
mod headers;
mod json;
mod model;

use core::hash::Hasher;

use serde::Deserialize;
use siphasher::sip128::{Hasher128, SipHasher24};

pub use headers::{HeaderNames, needs_body};
pub use model::{MAX_MODEL_BYTES, model};

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
    /// Sources that name a conversation only if the operator asks for them, behind every other id, the first one first.
    pub also: Vec<AlsoSource>,
}

/// A source that mostly names a person, a tenant or a single request rather than a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum AlsoSource {
    /// `user`, OpenAI.
    #[serde(rename = "user")]
    User,
    /// `safety_identifier`, OpenAI.
    #[serde(rename = "safety_identifier")]
    SafetyIdentifier,
    /// `metadata.user_id` as a whole, Anthropic.
    #[serde(rename = "metadata.user_id")]
    MetadataUserId,
    /// The header `x-user-id`, which gateways set.
    #[serde(rename = "x-user-id")]
    XUserId,
    /// The header `x-tenant-id`, which gateways set.
    #[serde(rename = "x-tenant-id")]
    XTenantId,
    /// The header `x-client-request-id`: a conversation for Codex and Pi, a single request for Claude Code.
    #[serde(rename = "x-client-request-id")]
    XClientRequestId,
}

impl AlsoSource {
    /// As it is shown in `x-homing-source`.
    fn as_str(self) -> &'static str {
        match self {
            Self::User => "body:user",
            Self::SafetyIdentifier => "body:safety_identifier",
            Self::MetadataUserId => "body:metadata.user_id",
            Self::XUserId => "x-user-id",
            Self::XTenantId => "x-tenant-id",
            Self::XClientRequestId => "x-client-request-id",
        }
    }

    fn is_header(self) -> bool {
        matches!(self, Self::XUserId | Self::XTenantId | Self::XClientRequestId)
    }
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
        self.naming.body || self.naming.fingerprint || self.naming.also.iter().any(|source| !source.is_header())
    }

    /// The conversation the headers name, if they do.
    pub fn from_headers<'a>(&self, headers: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Option<Conversation> {
        let named = self.names.find(headers)?;
        let digest = self.digest(named.source.as_str(), named.id, named.agent);
        let parent = named.parent.map(|(id, agent)| self.digest(named.source.as_str(), id, agent));
        Some(Conversation { digest, source: named.source, parent: parent.filter(|parent| *parent != digest) })
    }

    /// The conversation that a header names which counts only because the operator asked for it, and only behind the ids of the
    /// body: what `from_body` is given, and what names a request whose body is not read.
    pub fn also_from_headers<'a>(&self, headers: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Option<Conversation> {
        let wanted = self.naming.also.iter().filter(|source| source.is_header()).map(|source| source.as_str());
        let (name, id) = headers::first(headers, wanted)?;
        Some(Conversation { digest: self.digest(name, id, None), source: Source::Known(name), parent: None })
    }

    /// The conversation a complete JSON body names, or else `also`, the one from a header behind it.
    pub fn from_body(&self, body: &[u8], also: Option<Conversation>) -> Option<Conversation> {
        let Some(fields) = body::read(body) else { return also };
        let named =
            |source, id: &[u8]| Conversation { digest: self.digest(source, id, None), source: Source::Known(source), parent: None };
        if self.naming.body
            && let Some((source, id)) = fields.id()
        {
            return Some(named(source, &id));
        }
        for source in &self.naming.also {
            if let Some(id) = fields.also(*source) {
                return Some(named(source.as_str(), &id));
            }
            if also.as_ref().is_some_and(|also| also.source.as_str() == source.as_str()) {
                return also;
            }
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
