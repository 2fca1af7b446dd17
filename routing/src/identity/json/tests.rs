//! The scanner against serde_json, on JSON of every kind and on what mutations make of it.

use homing_corpus::{mutated, seeds};
use proptest::prelude::*;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess};
use serde_json::value::{RawValue, Value};

use super::*;

const NAMES: [&str; 3] = ["metadata", "session_id", "messages"];

/// The same reading of an object by serde_json.
struct Reference;

impl<'de> Visitor<'de> for Reference {
    type Value = [Field<'de>; NAMES.len()];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Self::Value::default();
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            match NAMES.iter().position(|name| *name == key) {
                Some(index) => fields[index].add(map.next_value::<&RawValue>()?.get().as_bytes()),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(fields)
    }
}

impl<'de> DeserializeSeed<'de> for Reference {
    type Value = [Field<'de>; NAMES.len()];

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

fn reference(body: &[u8]) -> serde_json::Result<[Field<'_>; NAMES.len()]> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let fields = Reference.deserialize(&mut json)?;
    json.end()?;
    Ok(fields)
}

/// Whether serde_json refuses what stands inside a string, which the scanner does not look at.
fn is_inside_a_string(error: &serde_json::Error) -> bool {
    let error = error.to_string();
    ["control character", "invalid escape", "invalid unicode", "surrogate", "hex escape"].iter().any(|what| error.contains(what))
}

/// Whether serde_json ran out of text in the middle of an escape, which the scanner does not look at either.
fn is_short_escape(error: &serde_json::Error, body: &[u8]) -> bool {
    let escape = body.windows(2).rposition(|pair| pair == br"\u");
    error.is_eof() && escape.is_some_and(|at| body.len() - at < r"\u0000".len())
}

/// The scanner finds what serde_json finds, and nothing where serde_json sees no JSON object.
fn agrees(body: &[u8]) -> Result<(), TestCaseError> {
    let scanned = object(body, &NAMES);
    match reference(body) {
        Ok(fields) => prop_assert_eq!(scanned, Some(fields), "{}", body.escape_ascii()),
        Err(error) if is_inside_a_string(&error) || is_short_escape(&error, body) => {}
        Err(error) => prop_assert_eq!(scanned, None, "{}: {}", error, body.escape_ascii()),
    }
    Ok(())
}

/// Text with what JSON has to escape, and with what it need not.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[\"\\\\/\n\t\u{1}{}\\[\\]:, a\u{e9}\u{1f600}]{0,24}"]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![2 => prop::sample::select(NAMES.to_vec()).prop_map(str::to_owned), 1 => text()]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(key(), inner, 0..5).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// A body: its keys may repeat and may be written with escapes, and its white space varies.
fn body() -> impl Strategy<Value = String> {
    let member = (key(), value(), any::<bool>(), any::<bool>()).prop_map(|(key, value, escaped, pretty)| {
        let key = match key.chars().next() {
            Some(first) if escaped && first.is_ascii() => format!("\"\\u{:04x}{}", u32::from(first), &quoted(&key[1..])[1..]),
            _ => quoted(&key),
        };
        if pretty { format!("\n\t {key} : {value:#}\r\n") } else { format!("{key}:{value}") }
    });
    prop::collection::vec(member, 0..6).prop_map(|members| format!("{{{}}}", members.join(",")))
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[derive(Clone, Debug)]
enum Mutation {
    Delete(prop::sample::Index, usize),
    Insert(prop::sample::Index, u8),
    /// Puts a byte in the place of one that may be structure.
    Swap(prop::sample::Index, u8),
    Cut(prop::sample::Index),
}

impl Mutation {
    fn apply(&self, body: &mut Vec<u8>) {
        match self {
            Self::Delete(at, count) => {
                let at = at.index(body.len() + 1);
                body.drain(at..(at + count).min(body.len()));
            }
            Self::Insert(at, byte) => body.insert(at.index(body.len() + 1), *byte),
            Self::Swap(at, byte) => {
                let places: Vec<_> = (0..body.len()).filter(|at| b"{}[]\",:\\".contains(&body[*at])).collect();
                if !places.is_empty() {
                    body[*at.get(&places)] = *byte;
                }
            }
            Self::Cut(at) => body.truncate(at.index(body.len() + 1)),
        }
    }
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let structure = prop::sample::select(b"{}[]\",:\\ 0-1.eEtn/u".to_vec());
    prop_oneof![
        4 => (any::<prop::sample::Index>(), 1_usize..4).prop_map(|(at, count)| Mutation::Delete(at, count)),
        4 => (any::<prop::sample::Index>(), structure.clone()).prop_map(|(at, byte)| Mutation::Insert(at, byte)),
        8 => (any::<prop::sample::Index>(), structure).prop_map(|(at, byte)| Mutation::Swap(at, byte)),
        1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Insert(at, byte)),
        1 => any::<prop::sample::Index>().prop_map(Mutation::Cut),
    ]
}

proptest! {
    #[test]
    fn json_is_read_as_serde_json_reads_it(body in body()) {
        prop_assert!(reference(body.as_bytes()).is_ok(), "{}", body);
        agrees(body.as_bytes())?;
    }

    #[test]
    fn damaged_json_names_nothing_that_serde_json_does_not(body in body(), mutations in prop::collection::vec(mutation(), 1..4)) {
        let mut body = body.into_bytes();
        mutations.iter().for_each(|mutation| mutation.apply(&mut body));
        agrees(&body)?;
    }

    #[test]
    fn any_damaged_body_is_read_as_serde_json_reads_it(body in mutated(seeds("bodies"))) {
        agrees(&body)?;
    }

    #[test]
    fn any_bytes_are_read_as_serde_json_reads_them(bytes: Vec<u8>, structure in r#"[{}\[\]":,\\ 0-9.eE+\-truefalsn]{0,24}"#) {
        agrees(&bytes)?;
        agrees(format!("{{\"session_id\":{structure}}}").as_bytes())?;
        agrees(format!("{{{structure}").as_bytes())?;
    }

    #[test]
    fn numbers_and_literals_are_read_to_the_letter(scalar in "-?[0-9]{0,3}[.]?[0-9]{0,2}([eE][+-]?[0-9]{0,2})?|tru?e?|fals?e?|nul?l?") {
        agrees(format!("{{\"session_id\":{scalar}}}").as_bytes())?;
        agrees(format!("{{\"x\":[{scalar} , {scalar}]}}").as_bytes())?;
    }

    /// Runs of backslashes of every length, across the borders of blocks too.
    #[test]
    fn a_string_ends_at_its_first_quote_that_is_not_escaped(text in prop::collection::vec(prop_oneof![
        20 => prop::collection::vec(prop::sample::select(b"\x21\x23\x5b\x5d\xa2\xdc\x00\xff".to_vec()), 1..20),
        10 => (1_usize..140).prop_map(|length| vec![b'\\'; length]),
        1 => Just(vec![b'"']),
    ], 0..24)) {
        let text = text.concat();
        let mut bytes = text.iter().zip(1..);
        let mut end = None;
        while let Some((byte, behind)) = bytes.next() {
            match byte {
                b'"' => end = end.or(Some(behind)),
                b'\\' => drop(bytes.next()),
                _ => {}
            }
        }
        prop_assert_eq!(string_end(&text), end);
    }

    #[test]
    fn strings_are_decoded_as_serde_json_decodes_them(text in text()) {
        let json = quoted(&text);
        let decoded = string(json.as_bytes());
        prop_assert_eq!(decoded.as_deref(), Some(text.as_str()));
    }
}

#[test]
fn what_is_found_stands_as_it_is_written() {
    let body =
        br#" { "a" : [1, {"session_id":"no"}], "s\u0065ssion_id" : "x\"}" , "metadata":{ "k": [ ] } ,"messages":1,"messages":2 } "#;
    let fields = object(body, &NAMES).expect("an object");
    assert_eq!(fields, [Field::Once(br#"{ "k": [ ] }"#), Field::Once(br#""x\"}""#), Field::Repeated]);
}

#[test]
fn brackets_keys_colons_and_commas_stand_where_they_must() {
    let brackets =
        ["[}", "[1}", "{]", r#"{"a":1]"#, "[[1}]", r#"[{"a":1]]"#, r#"{"a":[1}}"#, r#"{"a":[}}"#, "[1,]", "[,]", "[1 1]"];
    let keys =
        [r#"{"a"}"#, "{1:2}", r#"{"a":1,2:3}"#, r#"{"a":1,[]:2}"#, r#"{"a":1,"b"}"#, r#"{"a":1,}"#, r#"{"a" 1}"#, r#"{"a"::1}"#];
    for value in brackets.into_iter().chain(keys) {
        for name in ["session_id", "other"] {
            let body = format!(r#"{{"{name}":{value},"metadata":1}}"#);
            assert_eq!(object(body.as_bytes(), &NAMES), None, "{body}");
        }
    }
}

#[test]
fn nesting_is_bounded_wherever_it_stands() {
    let nested = |key: &str, (open, close): (&str, &str), depth: usize| {
        format!(r#"{{"{key}":{}0{},"session_id":"x"}}"#, open.repeat(depth), close.repeat(depth))
    };
    for key in ["metadata", "messages", "other"] {
        for pair in [("[", "]"), (r#"{"a":"#, "}")] {
            assert!(object(nested(key, pair, 127).as_bytes(), &NAMES).is_some(), "{key} {}", pair.0);
            for depth in [128, 129, 255, 256, 10_000] {
                assert_eq!(object(nested(key, pair, depth).as_bytes(), &NAMES), None, "{key} {} {depth}", pair.0);
            }
        }
        assert_eq!(object(format!(r#"{{"{key}":{}"#, "[{\"a\":".repeat(10_000)).as_bytes(), &NAMES), None);
        // Many containers, none inside another.
        assert!(object(nested(key, ("[[],", "]"), 100).as_bytes(), &NAMES).is_some());
    }
}

#[test]
fn long_strings_end_where_they_are_closed() {
    for inside in ["x", r"\\", r#"\""#, r"\n", r"\u005c", "\u{1f600}"] {
        let long = inside.repeat(1 << 18);
        let body = format!(r#"{{"other":"{long}","session_id":"{long}"}}"#);
        let [_, session_id, _] = object(body.as_bytes(), &NAMES).expect("an object");
        assert_eq!(session_id.get().map(<[u8]>::len), Some(long.len() + 2));
        assert_eq!(object(&body.as_bytes()[..body.len() - 2], &NAMES), None, "not closed");
    }
}

#[test]
fn what_stands_inside_a_string_that_is_stepped_over_is_not_looked_at() {
    let lenient: [&[u8]; 5] = [b"\n", b"\xff", br"\x", br"\ud83d", br"\uzzzz"];
    for inside in lenient {
        let body = [&br#"{"other":""#[..], inside, br#"","session_id":"x"}"#].concat();
        let [_, session_id, _] = object(&body, &NAMES).expect("an object");
        assert_eq!(session_id, Field::Once(br#""x""#));
    }
    assert_eq!(object(br#"{"\x":1,"session_id":"x"}"#, &NAMES), None, "a key must mean something");
}

#[test]
fn elements_are_read_until_enough_are_known() {
    let mut seen = Vec::new();
    let read = each(br#"[1, "a]", [2] , !"#, |element| {
        seen.push(element);
        (seen.len() < 3).then_some(())
    });
    assert_eq!((read, seen), (None, vec![&b"1"[..], b"\"a]\"", b"[2]"]));
    assert_eq!(each(b"[1 2]", |_| Some(())), None);
    assert_eq!(each(b"[ ]", |_| None), Some(()));
}
