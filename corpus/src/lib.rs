//! Inputs as foreign programs send them, and a proptest strategy that damages them.
//!
//! Random bytes rarely get past the first character of a format. So a property of a reader takes inputs that the reader takes and a few
//! edits: `input in mutated(seeds("bodies"))`. The seeds lie in `seeds/`, a folder for each kind, and are in the binary, since some tests run
//! where there are no files. Formats of the project's own are no files: their seeds are encoded by the test, from real values.

#![forbid(unsafe_code)]

mod edit;
mod shrink;

use core::fmt;
use core::ops::Deref;
use std::borrow::Cow;

use include_dir::{Dir, include_dir};
use proptest::prelude::*;
use proptest::strategy::NewTree;
use proptest::test_runner::TestRunner;

use shrink::Shrinking;

static SEEDS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/seeds");

/// The longest input that edits make, in bytes: the edits of longer ones would take the time that their number needs.
pub const MAX_BYTES: usize = 64 << 10;

/// Bytes for a reader. A failure shows them as a Rust byte string, `b"\x00..."`.
#[derive(Clone, PartialEq, Eq)]
pub struct Input(Vec<u8>);

impl Input {
    /// Its text, with replacement characters where it is not UTF-8.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }
}

impl Deref for Input {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}

/// The seeds of a kind: the contents of the files in `seeds/<kind>`, in the order of their names.
///
/// # Panics
/// If there is no such kind, or no file in it.
pub fn seeds(kind: &str) -> Vec<&'static [u8]> {
    let files = SEEDS.get_dir(kind).into_iter().flat_map(Dir::files);
    let seeds: Vec<_> = files.map(include_dir::File::contents).collect();
    assert!(!seeds.is_empty(), "the corpus has no seeds of the kind {kind}: add corpus/seeds/{kind}");
    seeds
}

/// One of the seeds, as it is or with up to eight edits; now and then arbitrary bytes. A failure shrinks to the fewest bytes that still fail.
///
/// # Panics
/// If there are no seeds.
pub fn mutated<S: Into<Vec<u8>>>(seeds: impl IntoIterator<Item = S>) -> Mutated {
    let seeds: Vec<Vec<u8>> = seeds.into_iter().map(Into::into).collect();
    assert!(!seeds.is_empty(), "nothing to mutate");
    Mutated { seeds }
}

/// See [`mutated`].
#[derive(Clone, Debug)]
pub struct Mutated {
    seeds: Vec<Vec<u8>>,
}

impl Strategy for Mutated {
    type Tree = Shrinking;
    type Value = Input;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        Ok(Shrinking::new(edit::mutant(runner.rng(), &self.seeds)))
    }
}

#[cfg(test)]
mod tests;
