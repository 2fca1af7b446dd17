//! What a router believes to be in each replica's prefix cache: the prompts it has sent there.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A piece of a prompt together with all pieces before it, and what keeping it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) hash: u64,
    /// Tokens in it.
    pub(super) tokens: usize,
}

/// The pieces of one replica, the least recently sent forgotten first.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    /// The cost of all pieces together is at most this.
    capacity: usize,
    used: usize,
    /// Of each piece its cost and when it was last sent.
    pieces: HashMap<u64, (usize, u64)>,
    by_age: BTreeMap<u64, u64>,
    clock: u64,
}

/// The hashes of a prompt cut at `ends`, ascending, each chained on the one before.
pub(super) fn pieces(prompt: &[u32], ends: impl IntoIterator<Item = usize>) -> Vec<Piece> {
    let (mut from, mut parent) = (0, 0u64);
    let piece = |end: usize| {
        let mut hasher = DefaultHasher::new();
        (parent, &prompt[from..end]).hash(&mut hasher);
        let tokens = end - from;
        (from, parent) = (end, hasher.finish());
        Piece { hash: parent, tokens }
    };
    ends.into_iter().map(piece).collect()
}

impl PrefixIndex {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, used: 0, pieces: HashMap::new(), by_age: BTreeMap::new(), clock: 0 }
    }

    /// How many of the first pieces are known.
    pub(super) fn matched(&self, pieces: &[Piece]) -> usize {
        pieces.iter().take_while(|piece| self.pieces.contains_key(&piece.hash)).count()
    }

    /// Notes a prompt that was sent; a prefix is younger than its end, so it is forgotten later.
    pub(super) fn sent(&mut self, pieces: &[Piece], cost: impl Fn(&Piece) -> usize) {
        for piece in pieces.iter().rev() {
            self.clock += 1;
            match self.pieces.insert(piece.hash, (cost(piece), self.clock)) {
                Some((_, age)) => {
                    self.by_age.remove(&age);
                }
                None => self.used += cost(piece),
            }
            self.by_age.insert(self.clock, piece.hash);
        }
        while self.used > self.capacity
            && let Some((_, hash)) = self.by_age.pop_first()
        {
            self.used -= self.pieces.remove(&hash).map_or(0, |(cost, _)| cost);
        }
    }
}
