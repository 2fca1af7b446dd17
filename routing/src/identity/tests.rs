//! Every client's way of naming a conversation, from a file of cases.

use homing_corpus::{mutated, seeds};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    headers: Vec<(String, HeaderValue)>,
    body: Option<String>,
    config: Option<CaseConfig>,
    source: String,
    conversation: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum HeaderValue {
    Text(String),
    Raw { base64: String },
}

#[derive(Deserialize)]
struct CaseConfig {
    conversation: CaseNaming,
}

#[derive(Deserialize)]
struct CaseNaming {
    #[serde(default)]
    headers: Vec<String>,
    #[serde(default)]
    also: Vec<AlsoSource>,
}

fn decode_base64(text: &str) -> Vec<u8> {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> =
        text.bytes().filter(|b| *b != b'=').map(|b| alphabet.iter().position(|a| *a == b).expect("base64") as u32).collect();
    digits
        .chunks(4)
        .flat_map(|chunk| {
            let bits = chunk.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - chunk.len()));
            bits.to_be_bytes()[1..chunk.len()].to_vec()
        })
        .collect()
}

/// Names a request the way the filter does: headers first, then the body.
fn name(case: &Case) -> Option<Conversation> {
    let headers: Vec<(Vec<u8>, Vec<u8>)> = case
        .headers
        .iter()
        .map(|(name, value)| {
            let value = match value {
                HeaderValue::Text(text) => text.clone().into_bytes(),
                HeaderValue::Raw { base64 } => decode_base64(base64),
            };
            (name.clone().into_bytes(), value)
        })
        .collect();
    let config = case.config.as_ref().map(|config| &config.conversation);
    let (own, also) = config.map(|config| (config.headers.clone(), config.also.clone())).unwrap_or_default();
    let namer = Namer::new(Naming { headers: own, also, ..Naming::default() }, &[0; 16], "qwen3-4b");
    let encoding = headers.iter().find(|(name, _)| name == b"content-encoding").map(|(_, value)| value.as_slice());
    let read = || headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
    namer.from_headers(read()).or_else(|| {
        let also = namer.also_from_headers(read());
        match case.body.as_ref().filter(|_| needs_body(encoding)) {
            Some(body) => namer.from_body(body.as_bytes(), also),
            None => also,
        }
    })
}

fn cases() -> Vec<Case> {
    serde_json::from_str::<Cases>(include_str!("../../testdata/identity-cases.json")).expect("the cases").cases
}

#[test]
fn each_request_is_named_by_the_right_source() {
    for case in cases() {
        let source = name(&case).map_or("none".to_owned(), |conversation| conversation.source.as_str().to_owned());
        assert_eq!(source, case.source, "{}", case.name);
    }
}

#[test]
fn two_requests_are_one_conversation_exactly_when_the_cases_say_so() {
    let named: Vec<_> = cases().into_iter().map(|case| (name(&case).map(|found| found.digest), case)).collect();
    for (digest, case) in &named {
        assert_eq!(digest.is_none(), case.conversation.is_none(), "{}", case.name);
        for (other_digest, other) in &named {
            if case.conversation.is_some() {
                let same = digest == other_digest;
                assert_eq!(same, case.conversation == other.conversation, "{} and {}", case.name, other.name);
            }
        }
    }
}

#[test]
fn a_subagent_knows_the_conversation_it_began_in() {
    let named = |case: &str| name(cases().iter().find(|c| c.name == case).expect("the case")).expect("a conversation");
    let main = named("Claude Code main thread");
    assert_eq!((main.parent, named("Dynamo").parent), (None, None));
    assert_eq!(named("subagent of session 1").parent, Some(main.digest));
    let parents = [
        ("nested subagent", "subagent of session 1"),
        ("OpenCode child session", "OpenCode"),
        ("OpenCode child session of its own provider", "OpenCode, its own provider"),
        ("Dynamo child session", "Dynamo"),
        ("Codex subagent thread", "Codex thread 1"),
    ];
    for (child, parent) in parents {
        assert_eq!(named(child).parent, Some(named(parent).digest), "{child}");
    }
}

#[test]
fn a_conversation_is_not_its_own_parent() {
    let namer = Namer::new(Naming::default(), &[0; 16], "a");
    let headers = [(&b"x-session-id"[..], &b"s"[..]), (b"x-parent-session-id", b"s")];
    assert_eq!(namer.from_headers(headers.into_iter()).expect("a conversation").parent, None);
}

#[test]
fn a_header_repeated_with_another_value_names_nothing_whichever_comes_first() {
    let namer = Namer::new(Naming { headers: vec!["x-mine".into(), "x-second".into()], ..Naming::default() }, &[0; 16], "a");
    let source = |headers: &[(&'static str, &'static str)]| {
        let headers = headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        namer.from_headers(headers).map(|named| named.source.as_str().to_owned())
    };
    for name in ["x-mine", "x-session-id"] {
        assert_eq!(source(&[(name, "null"), (name, "a")]), None, "{name}");
        assert_eq!(source(&[(name, "a"), (name, "null")]), None, "{name}");
        assert_eq!(source(&[(name, "a"), ("x-second", "b"), (name, "c")]).as_deref(), Some("x-second"));
    }
}

#[test]
fn pools_and_keys_have_conversations_of_their_own() {
    let digest = |key: u8, pool: &str| {
        let namer = Namer::new(Naming::default(), &[key; 16], pool);
        namer.from_headers([(&b"x-session-id"[..], &b"a"[..])].into_iter()).expect("a conversation").digest
    };
    assert_eq!(digest(0, "a"), digest(0, "a"));
    assert_ne!(digest(0, "a"), digest(0, "b"));
    assert_ne!(digest(0, "a"), digest(1, "a"));
}

#[test]
fn a_cache_mark_that_moves_leaves_the_fingerprint() {
    let namer = Namer::new(Naming::default(), &[0; 16], "a");
    let first = br#"{"messages":[{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral"}}]}]}"#;
    let later =
        br#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"},{"role":"user","content":"go"}]}"#;
    assert_eq!(namer.from_body(first, None), namer.from_body(later, None));
    assert!(namer.from_body(first, None).is_some());
}

#[test]
fn a_field_that_may_hold_an_id_is_valid_to_the_last_byte() {
    let namer = Namer::new(Naming::default(), &[0; 16], "a");
    let name = |before: &[u8], inside: &[u8]| {
        let end = br#"","prompt_cache_key":"k","messages":[{"role":"user","content":"q"}]}"#;
        namer.from_body(&[br#"{"#, before, inside, end].concat(), None).map(|found| found.source)
    };
    let invalid: [&[u8]; 4] = [b"a\xff", b"a\nb", br"a\x", br"a\u00"];
    for inside in invalid {
        for field in [br#""session_id":""#, &br#""user":""#[..], br#""metadata":{"a":1},"conversation":""#] {
            assert_eq!(name(field, inside), None, "{}", inside.escape_ascii());
        }
        assert_eq!(name(br#""other":""#, inside), Some(Source::Known("body:prompt_cache_key")), "{}", inside.escape_ascii());
    }
}

#[test]
fn a_first_message_with_half_a_surrogate_pair_tells_conversations_apart() {
    let namer = Namer::new(Naming::default(), &[0; 16], "a");
    let name = |text: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]}}"#);
        namer.from_body(body.as_bytes(), None).expect("a conversation").digest
    };
    assert_eq!(name(r"one \ud83d"), name(r"one \ud83d"));
    assert_ne!(name(r"one \ud83d"), name(r"two \ud83d"));
}

#[test]
fn a_body_is_read_only_if_it_may_name_something() {
    let reads = |body, fingerprint, also: &[AlsoSource]| {
        let naming = Naming { headers: Vec::new(), body, fingerprint, also: also.to_vec() };
        Namer::new(naming, &[0; 16], "a").reads_bodies()
    };
    assert!(reads(true, false, &[]) && reads(false, true, &[]) && reads(false, false, &[AlsoSource::User]));
    assert!(!reads(false, false, &[]) && !reads(false, false, &[AlsoSource::XUserId]));
}

#[test]
fn an_operators_header_that_names_nothing_leaves_it_to_the_next() {
    let headers = ["x-first".to_owned(), "x-second".to_owned()].to_vec();
    let namer = Namer::new(Naming { headers, ..Naming::default() }, &[0; 16], "a");
    let named = |headers: &[(&str, &str)]| {
        let headers = headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        namer.from_headers(headers).expect("a conversation").source
    };
    let (second, known) = (("x-second", "mine"), ("x-session-id", "theirs"));
    for first in [&[("x-first", "one"), ("x-first", "another")][..], &[("x-first", "null")], &[]] {
        assert_eq!(named(&[first, &[second, known]].concat()), named(&[second]));
        assert_eq!(named(&[&[second, known], first].concat()), named(&[second]));
        assert_eq!(named(&[first, &[known]].concat()), named(&[known]));
    }
    assert_ne!(named(&[("x-first", "one"), second]), named(&[second]));
}

/// The bodies of the corpus, and those of the cases.
fn bodies() -> Vec<Vec<u8>> {
    let cases = cases().into_iter().filter_map(|case| case.body).map(String::into_bytes);
    seeds("bodies").into_iter().map(<[u8]>::to_vec).chain(cases.filter(|body| body.len() < 4_096)).collect()
}

/// Lines `name: value`, as pairs.
fn lines(text: &[u8]) -> impl DoubleEndedIterator<Item = (&[u8], &[u8])> + Clone {
    text.split(|byte| *byte == b'\n').map(|line| {
        let colon = line.windows(2).position(|pair| pair == b": ");
        colon.and_then(|colon| Some((line.get(..colon)?, line.get(colon + 2..)?))).unwrap_or((line, b""))
    })
}

/// A namer that takes ids from wherever it can.
fn greedy() -> Namer {
    let headers = vec!["X-Mine".to_owned(), "x-second".to_owned()];
    let also = vec![AlsoSource::XTenantId, AlsoSource::User, AlsoSource::MetadataUserId, AlsoSource::SafetyIdentifier];
    Namer::new(Naming { headers, also, ..Naming::default() }, &[7; 16], "a")
}

proptest! {
    #[test]
    fn any_body_has_one_name_however_it_is_spaced(body in mutated(bodies())) {
        let named = greedy().from_body(&body, None);
        prop_assert_eq!(&named, &greedy().from_body(&body, None));
        prop_assert_eq!(named, greedy().from_body(&[b" \n", &body[..], b"\r\t"].concat(), None));
    }

    #[test]
    fn any_body_inside_a_prompt_names_nothing(body in mutated(bodies())) {
        let content = body.text();
        let prompt = serde_json::json!({ "model": "m", "messages": [{ "role": "user", "content": content }] }).to_string();
        let named = greedy().from_body(prompt.as_bytes(), None).expect("a fingerprint");
        prop_assert_eq!(named.source, Source::Known(FINGERPRINT));
    }

    #[test]
    fn any_headers_have_one_name_in_whatever_order(text in mutated(seeds("headers"))) {
        let namer = greedy();
        let named = namer.from_headers(lines(&text));
        prop_assert_eq!(&named, &namer.from_headers(lines(&text).rev()));
        prop_assert_eq!(namer.also_from_headers(lines(&text)), namer.also_from_headers(lines(&text).rev()));
        if let Some(named) = named {
            prop_assert!(lines(&text).any(|(name, _)| name == named.source.as_str().as_bytes()));
            prop_assert_ne!(named.parent, Some(named.digest));
        }
    }

    #[test]
    fn any_content_encoding_but_none_hides_the_body(encoding in mutated([&b"gzip"[..], b"identity", b" ", b"zstd, identity"])) {
        let text = encoding.text();
        let is_plain = text.trim_matches(|c: char| c.is_ascii_whitespace()).is_empty()
            || text.trim_matches(|c: char| c.is_ascii_whitespace()).eq_ignore_ascii_case("identity");
        prop_assert_eq!(needs_body(Some(&encoding)), is_plain);
    }

    #[test]
    fn an_id_in_the_body_is_found_wherever_it_stands(id in "[a-zA-Z0-9:@%_-]{1,64}", before in "[ -~]{0,40}", after in "[ -~]{0,40}") {
        prop_assume!(!["null", "none", "undefined"].contains(&id.to_ascii_lowercase().as_str()));
        let namer = Namer::new(Naming::default(), &[0; 16], "a");
        let body = serde_json::json!({ "a": before, "session_id": id, "z": [after] }).to_string();
        let alone = serde_json::json!({ "session_id": id }).to_string();
        prop_assert!(namer.from_body(body.as_bytes(), None).is_some());
        prop_assert_eq!(namer.from_body(body.as_bytes(), None), namer.from_body(alone.as_bytes(), None));
    }
}
