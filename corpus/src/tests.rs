use std::collections::HashSet;

use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng};

use super::*;

const BODY: &[u8] = br#"{"session_id":"a","messages":[{"role":"user","content":"12345"}]}"#;

/// What a property fails with at last, if it fails.
fn smallest_failure(fails: impl Fn(&[u8]) -> bool) -> Option<Input> {
    let config = Config { cases: 5_000, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let found = runner.run(&mutated([BODY]), |input| {
        prop_assert!(!fails(&input));
        Ok(())
    });
    match found {
        Err(TestError::Fail(_, input)) => Some(input),
        _ => None,
    }
}

#[test]
fn every_kind_has_seeds_and_no_seed_is_longer_than_an_input() {
    for kind in SEEDS.dirs() {
        for seed in seeds(kind.path().to_str().expect("a name")) {
            assert!(seed.len() <= 20 << 10, "{}: trim it to what a reader reads", kind.path().display());
        }
    }
}

#[test]
fn a_seed_comes_whole_and_damaged_in_many_ways() {
    let (mut runner, strategy) = (TestRunner::deterministic(), mutated([BODY]));
    let inputs: Vec<_> = (0..2_000).map(|_| strategy.new_tree(&mut runner).expect("an input").current()).collect();
    let different: HashSet<_> = inputs.iter().map(|input| input.to_vec()).collect();
    assert!(different.contains(BODY) && different.len() > 1_500, "{}", different.len());
    // Much is left of most of them, or they would get no further than random bytes.
    let kept = inputs.iter().filter(|input| input.windows(12).any(|part| part == &BODY[..12])).count();
    assert!(kept > 1_000, "{kept}");
    assert!(inputs.iter().all(|input| input.len() <= MAX_BYTES));
}

#[test]
fn every_edit_is_made_some_time() {
    let finds = |what: &[u8]| smallest_failure(|input| input.windows(what.len()).any(|part| part == what)).is_some();
    for what in [&b"1e999"[..], b"\xff", b"\0", &[0xff; 8], b"[[[[[[[[[[[[[[[[[", br#""a","messages":"a""#, b"{{"] {
        assert!(finds(what), "{}", what.escape_ascii());
    }
}

#[test]
fn a_failure_shrinks_to_what_makes_it_one() {
    let failure = smallest_failure(|input| input.windows(4).any(|part| part == b"1e99") && input.contains(&b'{'));
    assert!(matches!(failure.as_deref(), Some(b"{1e99" | b"1e99{")), "{failure:?}");
}

#[test]
fn an_input_is_shown_as_a_byte_string() {
    assert_eq!(format!("{:?}", Input(b"\"a\"\n\xff".to_vec())), r#"b"\"a\"\n\xff""#);
}
