//! A reference session's texts, of the [workload](crate::workload) that the simulator runs too.

pub use crate::workload::SessionShape;
use crate::workload::{Kind, SessionPlan, Text, Workload};

/// One session's own texts, which depend on the seed and the session's number alone.
#[derive(Clone, Debug)]
pub struct Session(SessionPlan);

impl Session {
    /// The session with this number, of all those with this seed.
    pub fn new(shape: SessionShape, seed: u64, number: u64) -> Self {
        Self(Workload::new(Kind::Reference(shape), seed).session(number).expect("a kind has sessions without end"))
    }

    /// Its name: a version 4 UUID.
    pub fn id(&self) -> String {
        self.0.id.clone()
    }

    /// The system prompt, the same for all sessions with this seed.
    pub fn system(&self) -> String {
        Text::join(&self.0.system)
    }

    /// The user's message of a turn, counted from 0.
    pub fn message(&self, turn: usize) -> String {
        self.0.calls().nth(turn).map(|call| Text::join(&call.text)).unwrap_or_default()
    }
}
