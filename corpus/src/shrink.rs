//! The smallest part of an input that still fails.

use core::ops::Range;

use proptest::strategy::ValueTree;

use crate::Input;

/// An input that becomes smaller: parts of it are left out, at first halves, at last single bytes.
#[derive(Clone, Debug)]
pub struct Shrinking {
    /// What failed last.
    bytes: Vec<u8>,
    /// The part that the value now tried lacks.
    without: Option<Range<usize>>,
    /// The length of the parts that are left out now; 0 when none is left to be tried.
    length: usize,
    /// Where the next part begins.
    at: usize,
    /// Whether a part of this length could be left out since the first was tried.
    helped: bool,
}

impl Shrinking {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { length: bytes.len(), bytes, without: None, at: 0, helped: false }
    }

    /// Goes on to the next part; false behind the last.
    fn next(&mut self) -> bool {
        if self.at >= self.bytes.len() {
            // Single bytes are tried again while that helps, since others may have been needed before.
            self.length = if self.length > 1 || !self.helped { self.length / 2 } else { self.length };
            (self.at, self.helped) = (0, false);
        }
        if self.length == 0 || self.bytes.is_empty() {
            return false;
        }
        self.without = Some(self.at..(self.at + self.length).min(self.bytes.len()));
        true
    }
}

impl ValueTree for Shrinking {
    type Value = Input;

    fn current(&self) -> Input {
        let mut bytes = self.bytes.clone();
        if let Some(part) = self.without.clone() {
            bytes.drain(part);
        }
        Input(bytes)
    }

    /// Called when the current value fails.
    fn simplify(&mut self) -> bool {
        if let Some(part) = self.without.take() {
            self.bytes.drain(part);
            self.helped = true;
        }
        self.next()
    }

    /// Called when the current value passes. The last one is what failed before, so that a property's other values get their turn.
    fn complicate(&mut self) -> bool {
        let Some(part) = self.without.take() else { return false };
        self.at = part.end;
        self.next();
        true
    }
}
