//! The edits.

use core::ops::Range;

use proptest::prelude::RngExt as _;
use proptest::test_runner::TestRng;

use crate::MAX_BYTES;

/// What is special in some format: structure, words, marks of YAML and of event streams, control bytes, text that is not UTF-8.
#[rustfmt::skip]
const TOKENS: &[&[u8]] = &[
    b"\"", b"'", b"{", b"}", b"[", b"]", b":", b",", b"\\", b"/", b"#", b"@", b"=", b"(", b"-", b" ", b"\t", b"\n", b"\r\n", b"\n\n",
    b"{}", b"[]", b"\"\"", b"null", b"true", b"false", b"auto", b"none", b"{\"a\":", b",\"a\":1", b"\\u0000", b"\\ud83d", b"\\\"", b"\\n",
    b"\n---\n", b"&a ", b"*a", b"<<: ", b"!!binary ", b"data: ", b"1s", b"99999999999999h",
    b"\0", b"\x1b[31m", b"\x7f", b"\xff", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\xf0\x9f\x98\x80",
];

/// Numbers at the edge of a type.
#[rustfmt::skip]
const NUMBERS: &[&[u8]] = &[
    b"0", b"-1", b"-0", b"1", b"0.1", b"1.5", b"255", b"256", b"65535", b"65536", b"2147483648", b"4294967295", b"4294967296",
    b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616",
    b"1e19", b"1e308", b"1e999", b"-1e999", b"1e-999", b"NaN", b"+Inf", b"-Inf", b"0x7f",
];

/// Values of binary fields.
const FIELDS: &[&[u8]] = &[&[0; 4], &[0xff; 4], &[0; 8], &[0xff; 8], &[0xff, 0xff, 0xff, 0x7f], &[1, 0, 0, 0]];

/// What a place in a text may be: seldom a byte in the middle of a word, mostly the edge of something.
const EDGES: &[u8] = b"\n,:{}[]\"' =#&;";

/// A seed with some edits.
pub(crate) fn mutant(rng: &mut TestRng, seeds: &[Vec<u8>]) -> Vec<u8> {
    if rng.random_ratio(1, 32) {
        return (0..rng.random_range(0..400)).map(|_| rng.random()).collect();
    }
    let mut bytes = pick(rng, seeds).clone();
    // None is an input too: what holds for damaged ones holds for whole ones.
    let count = if rng.random_ratio(1, 32) { 0 } else { rng.random_range(1..=8_u32).min(rng.random_range(1..=8)) };
    for _ in 0..count {
        edit(rng, &mut bytes, seeds);
    }
    bytes.truncate(MAX_BYTES);
    bytes
}

fn edit(rng: &mut TestRng, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    match rng.random_range(0..100) {
        // Bytes.
        0..12 => {
            if let Some(byte) = place(rng, bytes) {
                bytes[byte] ^= 1 << rng.random_range(0..8_u32);
            }
        }
        12..22 => {
            if let Some(byte) = place(rng, bytes) {
                bytes[byte] = if rng.random() { *pick(rng, EDGES) } else { rng.random() };
            }
        }
        // Ranges: missing, twice, elsewhere.
        22..34 => drop(bytes.drain(range(rng, bytes))),
        34..44 => {
            let range = range(rng, bytes);
            let copy = bytes[range.clone()].to_vec();
            insert(bytes, range.end, &copy);
        }
        44..52 => {
            let range = range(rng, bytes);
            let moved: Vec<_> = bytes.drain(range).collect();
            let at = edge(rng, bytes);
            insert(bytes, at, &moved);
        }
        // Tokens: between others, in the place of others, very often.
        52..64 => {
            let at = edge(rng, bytes);
            let token = *pick(rng, TOKENS);
            insert(bytes, at, token);
        }
        64..72 => {
            let range = range(rng, bytes);
            let token = if rng.random_ratio(1, 4) { *pick(rng, FIELDS) } else { *pick(rng, TOKENS) };
            bytes.splice(range, token.iter().copied());
        }
        72..84 => {
            if let Some(number) = number(rng, bytes) {
                bytes.splice(number, pick(rng, NUMBERS).iter().copied());
            }
        }
        84..87 => {
            let at = edge(rng, bytes);
            let many = pick(rng, TOKENS).repeat(*pick(rng, &[2, 17, 130, 1_000]));
            insert(bytes, at, &many);
        }
        // A field of a binary format.
        87..91 => {
            let at = place(rng, bytes).unwrap_or(0);
            let field = *pick(rng, FIELDS);
            let end = (at + field.len()).min(bytes.len());
            bytes.splice(at..end, field.iter().copied());
        }
        // Another seed's end, or a part of it.
        91..96 => {
            let other = pick(rng, seeds);
            let part = other[range(rng, other)].to_vec();
            let at = edge(rng, bytes);
            insert(bytes, at, &part);
        }
        96..98 => {
            let other = pick(rng, seeds);
            let (at, from) = (edge(rng, bytes), edge(rng, other));
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => bytes.truncate(rng.random_range(0..=bytes.len())),
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, inserted: &[u8]) {
    if bytes.len() + inserted.len() <= MAX_BYTES {
        bytes.splice(at..at, inserted.iter().copied());
    }
}

fn pick<'a, T>(rng: &mut TestRng, of: &'a [T]) -> &'a T {
    &of[rng.random_range(0..of.len())]
}

/// A byte's place; none in an empty text.
fn place(rng: &mut TestRng, bytes: &[u8]) -> Option<usize> {
    (!bytes.is_empty()).then(|| rng.random_range(0..bytes.len()))
}

/// A place between two bytes: mostly before or behind an edge.
fn edge(rng: &mut TestRng, bytes: &[u8]) -> usize {
    let at = rng.random_range(0..=bytes.len());
    if rng.random_ratio(1, 3) {
        return at;
    }
    let next = bytes[at..].iter().position(|byte| EDGES.contains(byte));
    next.map_or(bytes.len(), |next| at + next + usize::from(rng.random::<bool>()))
}

/// What stands between two places: a few bytes, a word, a field, a line, or more.
fn range(rng: &mut TestRng, bytes: &[u8]) -> Range<usize> {
    let from = edge(rng, bytes);
    let near = (from + *pick(rng, &[1, 4, 16, 64, 1_024])).min(bytes.len());
    let to = from + edge(rng, &bytes[from..near]);
    from..to
}

/// The digits of a number.
fn number(rng: &mut TestRng, bytes: &[u8]) -> Option<Range<usize>> {
    let at = place(rng, bytes)?;
    let from = at + bytes[at..].iter().position(u8::is_ascii_digit)?;
    let digits = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
    Some(from..from + digits)
}
