//! The shape of an agent's session, and its texts.

use crate::text::{text_of, words};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::hash::{DefaultHasher, Hash, Hasher};

/// An agent's session: a system prompt that all sessions share, a long first message of its own, then turns that each add a little to a
/// history sent whole every time. Token counts are exact on the stand-in replica, where four bytes are one token, and approximate on a
/// real engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SessionShape {
    /// Tokens of the system prompt.
    pub system_tokens: usize,
    /// Tokens of the first message.
    pub first_tokens: usize,
    /// Requests in a session, the first included.
    pub turns: usize,
    /// Tokens that the user adds at each turn after the first.
    pub turn_tokens: usize,
    /// Most tokens in an answer.
    pub max_tokens: usize,
}

impl Default for SessionShape {
    fn default() -> Self {
        Self { system_tokens: 3500, first_tokens: 7300, turns: 6, turn_tokens: 400, max_tokens: 256 }
    }
}

/// One session's own texts, which depend on the seed and the session's number alone.
#[derive(Clone, Copy, Debug)]
pub struct Session {
    shape: SessionShape,
    seed: u64,
    number: u64,
}

impl Session {
    /// The session with this number, of all those with this seed.
    pub fn new(shape: SessionShape, seed: u64, number: u64) -> Self {
        Self { shape, seed, number }
    }

    /// Its name: a version 4 UUID.
    pub fn id(&self) -> String {
        let mut rng = ChaCha8Rng::seed_from_u64(self.hash("id", 0));
        uuid::Builder::from_random_bytes(rng.random()).into_uuid().to_string()
    }

    /// The system prompt, the same for all sessions with this seed.
    pub fn system(&self) -> String {
        text_of(&words(self.seed, self.shape.system_tokens))
    }

    /// The user's message of a turn, counted from 0.
    pub fn message(&self, turn: usize) -> String {
        let tokens = if turn == 0 { self.shape.first_tokens } else { self.shape.turn_tokens };
        text_of(&words(self.hash("message", turn), tokens))
    }

    fn hash(&self, what: &str, turn: usize) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, self.number, what, turn).hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_share_the_system_prompt_and_nothing_else() {
        let session = |seed, number| Session::new(SessionShape::default(), seed, number);
        let (one, two) = (session(1, 1), session(1, 2));
        assert_eq!(one.system(), two.system());
        assert_ne!(one.system(), session(2, 1).system());
        assert_ne!(one.id(), two.id());
        assert_ne!(one.message(0)[..20], two.message(0)[..20]);
        assert_ne!(one.message(1), one.message(2));
        assert_eq!(one.message(1), session(1, 1).message(1));
    }

    #[test]
    fn texts_have_the_shapes_tokens() {
        let session = Session::new(SessionShape::default(), 0, 0);
        assert_eq!([session.system().len(), session.message(0).len(), session.message(1).len()], [3500 * 4, 7300 * 4, 400 * 4]);
    }
}
