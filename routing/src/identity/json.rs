//! Steps over JSON text without building a tree: one pass, no recursion, no allocation.
//!
//! The structure is checked to the letter: brackets, commas, colons, literals, numbers, and that every string is closed. What
//! stands inside a string that is only stepped over is not looked at: raw control characters, unknown escapes, lone surrogates
//! and bytes that are not UTF-8 pass there. None of them can move a quote, so none of them can turn text into structure.

use core::fmt;
use std::borrow::Cow;

use serde::de::{Deserializer, Visitor};
use wide::u8x16;

/// The containers around a place inside an object: one bit each, set for an object, behind a mark that shows where they begin.
/// With the object itself, 127 bits are 128 levels: serde_json reads no deeper either.
type Containers = u128;
const OUTSIDE: Containers = 1;
const FULL: Containers = 1 << (Containers::BITS - 1);

/// A field that counts only if it stands once: parsers differ over duplicate keys, so a duplicate is no id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Field<'a> {
    #[default]
    Missing,
    Once(&'a [u8]),
    Repeated,
}

impl<'a> Field<'a> {
    /// The value as it is written.
    pub(super) fn get(self) -> Option<&'a [u8]> {
        match self {
            Self::Once(json) => Some(json),
            Self::Missing | Self::Repeated => None,
        }
    }

    fn add(&mut self, json: &'a [u8]) {
        *self = if *self == Self::Missing { Self::Once(json) } else { Self::Repeated };
    }
}

/// The fields of these names in a text that is one JSON object; `None` if it is anything else.
pub(super) fn object<'a, const N: usize>(json: &'a [u8], names: &[&str; N]) -> Option<[Field<'a>; N]> {
    let mut scanner = Scanner { rest: json };
    let mut fields = [Field::Missing; N];
    let mut more = scanner.open(b'{', b'}')?;
    while more {
        let key = scanner.key()?;
        let value = scanner.value()?;
        if let Some(field) = position(key, names)?.and_then(|index| fields.get_mut(index)) {
            field.add(value);
        }
        more = scanner.more(b'}')?;
    }
    scanner.at_end().then_some(fields)
}

/// Calls `with` for each element of a JSON array until it answers `None`; what follows is not read.
pub(super) fn each<'a>(json: &'a [u8], mut with: impl FnMut(&'a [u8]) -> Option<()>) -> Option<()> {
    let mut scanner = Scanner { rest: json };
    let mut more = scanner.open(b'[', b']')?;
    while more {
        with(scanner.value()?)?;
        more = scanner.more(b']')?;
    }
    Some(())
}

/// The text of a JSON string; `None` if it is none, or not a valid one.
pub(super) fn string(json: &[u8]) -> Option<Cow<'_, str>> {
    /// Borrows where no escape forces a copy, which `Cow`'s own `Deserialize` never does.
    struct Text;
    impl<'de> Visitor<'de> for Text {
        type Value = Cow<'de, str>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string")
        }
        fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
            Ok(Cow::Borrowed(text))
        }
        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Cow::Owned(text.to_owned()))
        }
    }
    if json.first() != Some(&b'"') {
        return None;
    }
    serde_json::Deserializer::from_slice(json).deserialize_str(Text).ok()
}

/// Where a key stands in a list of names, compared as the text it means. `None` if the key's escapes are not valid.
fn position(key: &[u8], names: &[&str]) -> Option<Option<usize>> {
    let [b'"', text @ .., b'"'] = key else { return None };
    // Only an escape makes a key differ from the text it means, and few keys have one.
    if let Some(found) = names.iter().position(|name| name.as_bytes() == text) {
        return Some(Some(found));
    }
    if !text.contains(&b'\\') {
        return Some(None);
    }
    let text = string(key)?;
    Some(names.iter().position(|name| *name == text))
}

/// A place in JSON text.
struct Scanner<'a> {
    rest: &'a [u8],
}

impl<'a> Scanner<'a> {
    /// Steps into a container; false if it is empty and already left again.
    fn open(&mut self, open: u8, close: u8) -> Option<bool> {
        self.take(open)?;
        if self.peek()? == close { self.take(close).map(|()| false) } else { Some(true) }
    }

    /// Steps over the comma before the next element; false if the container ends instead.
    fn more(&mut self, close: u8) -> Option<bool> {
        if self.peek()? == close { self.take(close).map(|()| false) } else { self.take(b',').map(|()| true) }
    }

    /// Steps over a key and its colon; returns the key as it is written.
    fn key(&mut self) -> Option<&'a [u8]> {
        self.peek()?;
        let before = self.rest;
        self.take(b'"')?;
        self.string()?;
        let key = taken(before, self.rest);
        self.take(b':')?;
        Some(key)
    }

    /// Steps over a value of any kind; returns it as it is written.
    fn value(&mut self) -> Option<&'a [u8]> {
        let mut containers = OUTSIDE;
        self.peek()?;
        let before = self.rest;
        loop {
            // A value begins here.
            let (first, after) = self.next()?;
            match first {
                b'"' => self.string()?,
                b'{' | b'[' => {
                    if containers >= FULL {
                        return None;
                    }
                    containers = containers << 1 | Containers::from(first == b'{');
                    let is_empty = self.peek()? == closing(containers);
                    if !is_empty {
                        if first == b'{' {
                            self.key()?;
                        }
                        continue;
                    }
                }
                b't' => self.rest = after.strip_prefix(b"rue")?,
                b'f' => self.rest = after.strip_prefix(b"alse")?,
                b'n' => self.rest = after.strip_prefix(b"ull")?,
                b'-' | b'0'..=b'9' => self.rest = number(first, after)?,
                _ => return None,
            }
            // A value has ended, and with it perhaps some of the containers around it.
            loop {
                if containers == OUTSIDE {
                    return Some(taken(before, self.rest));
                }
                let (byte, _) = self.next()?;
                if byte == b',' {
                    break;
                }
                if byte != closing(containers) {
                    return None;
                }
                containers >>= 1;
            }
            if containers & 1 == 1 {
                self.key()?;
            }
        }
    }

    /// Steps over the rest of a string, behind its opening quote.
    fn string(&mut self) -> Option<()> {
        self.rest = self.rest.get(string_end(self.rest)?..)?;
        Some(())
    }

    /// The next byte that is no white space, which it steps over.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        loop {
            let (first, after) = self.rest.split_first()?;
            self.rest = after;
            if !matches!(first, b' ' | b'\n' | b'\r' | b'\t') {
                return Some((*first, after));
            }
        }
    }

    /// The next byte that is no white space, where it then stands.
    fn peek(&mut self) -> Option<u8> {
        while let [b' ' | b'\n' | b'\r' | b'\t', after @ ..] = self.rest {
            self.rest = after;
        }
        self.rest.first().copied()
    }

    fn take(&mut self, wanted: u8) -> Option<()> {
        (self.next()?.0 == wanted).then_some(())
    }

    fn at_end(&mut self) -> bool {
        self.peek().is_none()
    }
}

/// Where a string's text ends, behind its closing quote. Whole blocks are looked at, whatever they hold: an agent's text has an escape
/// every few words, and a search that begins anew behind each would cost more than the bytes between them.
fn string_end(text: &[u8]) -> Option<usize> {
    let mut rest = text;
    let mut escapes = Escapes::default();
    loop {
        let (block, after) = match rest.split_first_chunk() {
            Some((block, after)) => (*block, Some(after)),
            None => {
                let mut block = [0; BLOCK];
                block.get_mut(..rest.len())?.copy_from_slice(rest);
                (block, None)
            }
        };
        let quotes = bits_of(&block, b'"') & !escapes.next(bits_of(&block, b'\\'));
        if quotes != 0 {
            let before = text.len().saturating_sub(rest.len());
            return before.checked_add(quotes.trailing_zeros() as usize)?.checked_add(1);
        }
        rest = after?;
    }
}

const BLOCK: usize = 64;

/// Where a byte stands in a block, one bit for each place.
fn bits_of(block: &[u8; BLOCK], byte: u8) -> u64 {
    let wanted = u8x16::splat(byte);
    block.as_chunks::<16>().0.iter().rev().fold(0, |bits, part| {
        let found = u8x16::from(*part).simd_eq(wanted).to_bitmask();
        bits << 16 | u64::from(found)
    })
}

/// Which bytes of a string are escaped, block by block.
#[derive(Default)]
struct Escapes {
    /// Whether the next block's first byte is.
    first: bool,
}

impl Escapes {
    /// The escaped places of the next block, by its backslashes.
    ///
    /// In a run of backslashes each second one is escaped, and what follows a run of odd length. Adding the runs' starts carries each to
    /// its run's end, without a loop (Langdale and Lemire, "Parsing Gigabytes of JSON per Second", 2019).
    fn next(&mut self, backslashes: u64) -> u64 {
        const EVEN: u64 = u64::MAX / 3;
        let first = u64::from(self.first);
        let backslashes = backslashes & !first;
        let behind = backslashes << 1 | first;
        let odd_starts = backslashes & !EVEN & !behind;
        let (ends, carried) = odd_starts.overflowing_add(backslashes);
        self.first = carried;
        (EVEN ^ (ends << 1)) & behind
    }
}

/// What closes the innermost container.
fn closing(containers: Containers) -> u8 {
    if containers & 1 == 1 { b'}' } else { b']' }
}

/// What lies between two places in the same text.
fn taken<'a>(before: &'a [u8], after: &[u8]) -> &'a [u8] {
    before.get(..before.len().saturating_sub(after.len())).unwrap_or_default()
}

/// Steps over a number whose first byte is known; returns what follows.
fn number(first: u8, after: &[u8]) -> Option<&[u8]> {
    fn digits(text: &[u8]) -> Option<&[u8]> {
        let count = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        text.get(count..).filter(|_| count > 0)
    }
    let (first, after) = if first == b'-' { after.split_first()? } else { (&first, after) };
    let mut rest = match first {
        b'0' => after,
        b'1'..=b'9' => digits(after).unwrap_or(after),
        _ => return None,
    };
    if let [b'.', fraction @ ..] = rest {
        rest = digits(fraction)?;
    }
    if let [b'e' | b'E', b'+' | b'-', exponent @ ..] | [b'e' | b'E', exponent @ ..] = rest {
        rest = digits(exponent)?;
    }
    Some(rest)
}

#[cfg(test)]
mod tests;
