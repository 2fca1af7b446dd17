//! How a request came to the replica that served it.

/// How a request came to the replica that served it: a metric label and a debug header.
///
/// Counted from where a request really went: a turn is sticky only if its home served it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    /// A turn served at its conversation's home.
    Sticky,
    /// A conversation's first turn, or its first since it was forgotten.
    Placed,
    /// A turn sent elsewhere since its home was full; the conversation keeps its home.
    Spilled,
    /// The client named the replica.
    Pinned,
    /// No conversation could be named: least loaded, nothing remembered.
    Unkeyed,
    /// The home was gone, or a retry moved the turn: the conversation has a new home.
    Rehomed,
    /// The choice was left to Envoy.
    Passed,
    /// No replica answered: Envoy did in its place, or the client left first.
    Unserved,
}

impl Outcome {
    /// Every outcome, in the order of their numbers.
    pub const ALL: [Self; 8] =
        [Self::Sticky, Self::Placed, Self::Spilled, Self::Pinned, Self::Unkeyed, Self::Rehomed, Self::Passed, Self::Unserved];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sticky => "sticky",
            Self::Placed => "placed",
            Self::Spilled => "spilled",
            Self::Pinned => "pinned",
            Self::Unkeyed => "unkeyed",
            Self::Rehomed => "rehomed",
            Self::Passed => "passed",
            Self::Unserved => "unserved",
        }
    }
}
