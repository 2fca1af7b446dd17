//! What sessions send: how long their contexts are, how many turns they have, and how long they think between them.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::load::SessionShape;
use crate::text::{Prompt, text_of, words};

/// Kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WorkloadName {
    /// Synthetic agent sessions that send the next turn when the last has come back: a shared system prompt of 3.5k tokens, a first
    /// message of 7.3k, five more turns of 400, 256 tokens out.
    Reference,
    /// The same, with think times as agents have them: most under a second, one in twenty above ten, some of minutes.
    Agents,
    /// As `agents`, but one session in eight begins with 20k tokens and has 20 turns.
    Skewed,
}

/// A kind of load with its seed.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    name: WorkloadName,
    seed: u64,
}

/// One session as it goes on.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: u64,
    shape: SessionShape,
    /// The texts of the history, each with its role.
    history: Vec<(&'static str, String)>,
    turn: usize,
    rng: ChaCha8Rng,
    thinks: bool,
}

impl Workload {
    /// A kind of load; the same seed gives the same sessions.
    pub fn new(name: WorkloadName, seed: u64) -> Self {
        Self { name, seed }
    }

    /// The session with this number.
    pub(super) fn session(&self, number: u64) -> Session {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed.wrapping_mul(1_000_003).wrapping_add(number));
        let mut shape = SessionShape::default();
        if self.name == WorkloadName::Skewed && rng.random_range(0..8) == 0 {
            shape = SessionShape { first_tokens: 20_000, turns: 20, ..shape };
        }
        let system = text_of(&words(self.seed, shape.system_tokens));
        let thinks = self.name != WorkloadName::Reference;
        Session { number, shape, history: vec![("system", system)], turn: 0, rng, thinks }
    }
}

impl Session {
    /// Whether it has sent all its turns.
    pub(super) fn is_done(&self) -> bool {
        self.turn >= self.shape.turns
    }

    /// The next turn's prompt.
    pub(super) fn next_prompt(&mut self) -> Vec<u32> {
        let tokens = if self.turn == 0 { self.shape.first_tokens } else { self.shape.turn_tokens };
        self.turn += 1;
        self.history.push(("user", text_of(&words(self.rng.random(), tokens))));
        let mut prompt = Prompt::default();
        for (role, text) in &self.history {
            prompt.turn(role, text);
        }
        prompt.into_tokens()
    }

    /// Takes the answer into the history.
    pub(super) fn answered(&mut self, output: &[u32]) {
        self.history.push(("assistant", text_of(output)));
    }

    /// Tokens of an answer.
    pub(super) fn max_tokens(&self) -> usize {
        self.shape.max_tokens
    }

    /// How long the agent works on an answer before it sends the next turn.
    pub(super) fn think(&mut self) -> Duration {
        if !self.thinks {
            // The way to the client and back. Without it, sessions of one shape march in step and flatter any policy.
            return Duration::from_secs_f64(self.rng.random_range(0.05..0.4));
        }
        let seconds = match self.rng.random_range(0..1000) {
            0..800 => self.rng.random_range(0.05..1.0),
            800..950 => self.rng.random_range(1.0..10.0),
            950..990 => self.rng.random_range(10.0..60.0),
            _ => self.rng.random_range(60.0..240.0),
        };
        Duration::from_secs_f64(seconds)
    }
}
