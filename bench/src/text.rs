//! Text and tokens of the stand-in: one token is four bytes of text.
//!
//! A real tokenizer makes about four bytes of English one token, so counts are plausible without one. The four bytes *are* the token's
//! number (little endian), so no two pieces share a token and a token can be turned back into its text. What a prefix cache needs is that
//! an answer sent back verbatim becomes the tokens that the engine generated: answers are whole tokens long, and the text of each message
//! is padded to whole tokens, so an answer starts and ends on a token's boundary in every later prompt.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Bytes of text in one token.
pub const TOKEN_BYTES: usize = 4;

/// Pads a message's text to whole tokens. A space, because clients trim an answer's end: the trimmed answer pads back to the same tokens.
const PAD: u8 = b' ';

const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

/// A prompt in its canonical form, a ChatML-like template: for each turn a marker, its role, its text and an end marker, each padded to
/// whole tokens; at the end the opening of the assistant's turn.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    tokens: Vec<u32>,
}

impl Prompt {
    /// Appends a turn: `role` as the API names it (`system`, `user`, `assistant`, `tool`), and its whole text.
    pub fn turn(&mut self, role: &str, text: &str) {
        self.open(role);
        self.piece(text);
        self.piece(TURN_END);
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is nothing yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Opens the assistant's turn and returns the prompt's tokens; what the engine generates comes right after them.
    pub fn into_tokens(mut self) -> Vec<u32> {
        self.open("assistant");
        self.tokens
    }

    fn open(&mut self, role: &str) {
        self.piece(TURN_START);
        self.piece(role);
    }

    fn piece(&mut self, text: &str) {
        self.tokens.extend(pieces(text));
    }
}

/// The tokens of text on its own, without a template.
pub fn tokens_of(text: &str) -> Vec<u32> {
    pieces(text).collect()
}

fn pieces(text: &str) -> impl Iterator<Item = u32> {
    text.as_bytes().chunks(TOKEN_BYTES).map(|chunk| {
        let mut token = [PAD; TOKEN_BYTES];
        token[..chunk.len()].copy_from_slice(chunk);
        u32::from_le_bytes(token)
    })
}

/// `count` tokens of made-up words, the same for the same seed. Each word is three letters and a space: one token.
pub fn words(seed: u64, count: usize) -> Vec<u32> {
    const CONSONANTS: &[u8; 20] = b"bcdfghjklmnpqrstvwxz";
    const VOWELS: &[u8; 5] = b"aeiou";
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pick = |letters: &[u8]| letters[rng.random_range(0..letters.len())];
    (0..count).map(|_| u32::from_le_bytes([pick(CONSONANTS), pick(VOWELS), pick(CONSONANTS), b' '])).collect()
}

/// The answer to a prompt: `count` tokens that depend on the prompt alone.
pub fn answer(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut hasher = DefaultHasher::new();
    prompt.hash(&mut hasher);
    words(hasher.finish(), count)
}

/// The text of tokens made by [`words`] or [`answer`].
pub fn text_of(tokens: &[u32]) -> String {
    tokens.iter().flat_map(|token| token.to_le_bytes()).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_answer_sent_back_gives_the_tokens_that_were_generated() {
        let mut first = Prompt::default();
        first.turn("system", "be brief");
        first.turn("user", "hello, who are you?");
        let prompt = first.into_tokens();
        let generated = answer(&prompt, 7);

        for sent_back in [text_of(&generated), text_of(&generated).trim().to_owned()] {
            let mut second = Prompt::default();
            second.turn("system", "be brief");
            second.turn("user", "hello, who are you?");
            second.turn("assistant", &sent_back);
            second.turn("user", "go on");
            let next = second.into_tokens();
            assert_eq!(next[..prompt.len()], prompt);
            assert_eq!(next[prompt.len()..][..7], generated);
        }
    }

    #[test]
    fn answers_depend_on_the_prompt_alone() {
        assert_eq!(answer(&[1, 2], 5), answer(&[1, 2], 5));
        assert_ne!(answer(&[1, 2], 5), answer(&[1, 3], 5));
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_token_for_four_bytes_begun(text in ".*") {
            let mut prompt = Prompt::default();
            prompt.piece(&text);
            prop_assert_eq!(prompt.tokens.len(), text.len().div_ceil(TOKEN_BYTES));
        }

        #[test]
        fn words_are_one_token_each(seed: u64, count in 0usize..50) {
            let text = text_of(&words(seed, count));
            prop_assert_eq!(text.len(), count * TOKEN_BYTES);
            prop_assert_eq!(text.split_whitespace().count(), count);
        }
    }
}
