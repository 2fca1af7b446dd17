//! The engine's behaviour, and what holds for every sequence of requests.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// An engine that can use this many tokens of cache: the null block comes on top.
fn config(usable_tokens: usize) -> EngineConfig {
    EngineConfig {
        kv_cache_tokens: usable_tokens + 4,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        ..EngineConfig::default()
    }
}

fn request(id: RequestId, prompt: impl IntoIterator<Item = u32>, output: usize) -> Request {
    let output = (0..output as u32).map(|n| 1_000_000 + id as u32 * 1000 + n).collect();
    Request { id, prompt: prompt.into_iter().collect(), output, reason: FinishReason::Length }
}

/// Steps until nothing is left to do; all events.
fn drain(engine: &mut Engine) -> Vec<Event> {
    std::iter::from_fn(|| engine.step()).flat_map(|(_, events)| events).collect()
}

fn cached(events: &[Event], of: RequestId) -> usize {
    let cached = events.iter().find_map(|event| match *event {
        Event::Finished { id, cached_tokens, .. } if id == of => Some(cached_tokens),
        _ => None,
    });
    cached.expect("the request has finished")
}

#[test]
fn an_idle_engine_has_no_step() {
    assert_eq!(Engine::new(config(64)).step(), None);
}

#[test]
fn a_request_gives_its_tokens_and_ends_with_its_reason() {
    let mut engine = Engine::new(config(64));
    engine.submit(&request(7, 0..5, 3)).unwrap();
    assert_eq!(
        drain(&mut engine),
        [
            Event::FirstToken { id: 7, cached_tokens: 0 },
            Event::Token { id: 7 },
            Event::Token { id: 7 },
            Event::Finished { id: 7, reason: FinishReason::Length, cached_tokens: 0 },
        ]
    );
    assert_eq!(engine.gauges(), Gauges::default());
}

#[test]
fn a_long_prompt_is_computed_in_chunks_of_the_budget_beside_those_that_decode() {
    let mut engine = Engine::new(config(256));
    engine.submit(&request(1, 0..4, 9)).unwrap();
    engine.step();
    engine.submit(&request(2, 100..140, 1)).unwrap();
    // 40 tokens beside one decoding sequence: 15 + 15 + 10.
    for _ in 0..2 {
        assert_eq!(engine.step().unwrap().1, [Event::Token { id: 1 }]);
    }
    assert_eq!(engine.step().unwrap().1[1], Event::FirstToken { id: 2, cached_tokens: 0 });
}

#[test]
fn a_repeated_prompt_is_cached_up_to_the_block_before_its_last_token() {
    for (length, expected) in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)] {
        let mut engine = Engine::new(config(64));
        engine.submit(&request(1, 0..length, 1)).unwrap();
        drain(&mut engine);
        engine.submit(&request(2, 0..length, 1)).unwrap();
        assert_eq!(cached(&drain(&mut engine), 2), expected, "prompt of {length}");
    }
}

#[test]
fn a_prompt_finds_only_what_has_the_same_tokens_before_it() {
    let mut engine = Engine::new(config(64));
    engine.submit(&request(1, 0..12, 1)).unwrap();
    drain(&mut engine);
    engine.submit(&request(2, [9, 9, 9, 9, 4, 5, 6, 7, 8, 9, 10, 11, 12], 1)).unwrap();
    assert_eq!(cached(&drain(&mut engine), 2), 0);
}

#[test]
fn the_next_turn_finds_the_answer_of_the_turn_before() {
    let mut engine = Engine::new(config(64));
    let first = request(1, 0..6, 7);
    engine.submit(&first).unwrap();
    drain(&mut engine);
    // 6 + 7 tokens, of which the last generated one was never computed: 12 tokens, three full blocks.
    engine.submit(&request(2, first.prompt.into_iter().chain(first.output).chain(50..60), 1)).unwrap();
    assert_eq!(cached(&drain(&mut engine), 2), 12);
}

#[test]
fn requests_of_one_step_share_a_prefix() {
    let mut engine = Engine::new(EngineConfig { max_num_batched_tokens: 100, ..config(64) });
    engine.submit(&request(1, 0..9, 2)).unwrap();
    engine.submit(&request(2, 0..9, 2)).unwrap();
    engine.start_step();
    assert_eq!(engine.gauges().kv_cache_usage, 4.0 / 16.0, "two blocks shared and one each");
    assert_eq!(cached(&drain(&mut engine), 2), 8);
}

#[test]
fn the_longest_unused_content_is_forgotten_first_and_a_prefix_after_its_end() {
    let mut engine = Engine::new(config(32));
    for (id, prompt) in [(1, 0..12), (2, 100..112)] {
        engine.submit(&request(id, prompt, 1)).unwrap();
        drain(&mut engine);
    }
    // Eight blocks: 2 never used, 3 of request 1, 3 of request 2. Four new ones take the unused and the last two of request 1.
    engine.submit(&request(3, 200..216, 1)).unwrap();
    drain(&mut engine);
    engine.submit(&request(4, 0..13, 1)).unwrap();
    assert_eq!(cached(&drain(&mut engine), 4), 4, "the first block of request 1 is left");
    engine.submit(&request(5, 200..217, 1)).unwrap();
    assert_eq!(cached(&drain(&mut engine), 5), 16);
}

#[test]
fn a_full_cache_preempts_the_request_admitted_last_and_recomputes_it_first() {
    let mut engine = Engine::new(EngineConfig { max_num_batched_tokens: 100, ..config(32) });
    engine.submit(&request(1, 0..12, 10)).unwrap();
    engine.submit(&request(2, 100..112, 10)).unwrap();
    // Has no room beside request 2, so it shows who comes first.
    engine.submit(&request(3, 200..220, 10)).unwrap();
    let mut events = Vec::new();
    while engine.counters().preemptions == 0 {
        events.extend(engine.step().expect("room for one request only").1);
    }
    assert_eq!(engine.gauges().running, 1);
    assert_eq!(engine.gauges().waiting, 2);
    events.extend(drain(&mut engine));
    let ends: Vec<_> = events.iter().filter(|event| matches!(event, Event::Finished { .. })).map(Event::id).collect();
    assert_eq!(ends, [1, 2, 3]);
    let first = events.iter().filter(|event| matches!(event, Event::FirstToken { id: 2, .. })).count();
    assert_eq!(first, 1, "tokens that were delivered are not delivered again");
}

#[test]
fn a_preempted_request_is_not_looked_up_a_second_time_for_the_statistics() {
    let mut engine = Engine::new(EngineConfig { max_num_batched_tokens: 100, ..config(32) });
    engine.submit(&request(1, 0..12, 10)).unwrap();
    engine.submit(&request(2, 100..112, 10)).unwrap();
    drain(&mut engine);
    let counters = engine.counters();
    assert!(counters.preemptions > 0);
    assert_eq!(counters.prefix_cache_queries, 12 + 12);
}

#[test]
fn a_waiting_request_is_looked_up_again_at_each_try_but_its_prompt_counts_once() {
    let mut engine = Engine::new(EngineConfig { max_num_batched_tokens: 100, ..config(32) });
    engine.submit(&request(1, 0..20, 3)).unwrap();
    engine.submit(&request(2, 100..120, 1)).unwrap();
    drain(&mut engine);
    let counters = engine.counters();
    assert_eq!(counters.prefix_cache_queries, 20 + 20 * 4);
    assert_eq!(counters.prompt_tokens_computed, 40);
}

#[test]
fn an_aborted_request_leaves_at_once_in_the_middle_of_a_step() {
    let mut engine = Engine::new(config(64));
    engine.submit(&request(1, 0..10, 5)).unwrap();
    engine.submit(&request(2, 50..60, 5)).unwrap();
    engine.start_step().unwrap();
    assert_eq!(engine.gauges().running, 2);
    assert!(engine.abort(1));
    assert!(!engine.abort(1));
    assert_eq!(engine.gauges().running, 1);
    assert!(drain(&mut engine).iter().all(|event| event.id() == 2));
}

#[test]
fn requests_that_cannot_run_are_rejected() {
    let mut engine = Engine::new(config(32));
    assert_eq!(engine.submit(&request(1, 0..30, 3)), Err(Rejected::TooLong { tokens: 33, limit: 32 }));
    assert_eq!(engine.submit(&request(1, 0..0, 3)), Err(Rejected::Empty));
    assert_eq!(engine.submit(&request(1, 0..3, 0)), Err(Rejected::Empty));
    engine.submit(&request(1, 0..3, 1)).unwrap();
    assert_eq!(engine.submit(&request(1, 0..3, 1)), Err(Rejected::DuplicateId(1)));
}

#[test]
fn the_default_costs_are_those_of_a_4b_model_on_an_a4000() {
    let mut engine = Engine::new(EngineConfig::default());
    engine.submit(&request(1, 0..11_000, 2)).unwrap();
    let mut prefill = Duration::ZERO;
    let decode = loop {
        let (duration, events) = engine.step().unwrap();
        match events.first() {
            Some(Event::Token { .. }) => break duration,
            _ => prefill += duration,
        }
    };
    let rate = 11_000.0 / prefill.as_secs_f64();
    assert!((3_600.0..3_900.0).contains(&rate), "{rate} tokens/s");
    assert!((0.027..0.029).contains(&decode.as_secs_f64()), "{decode:?}");
}

/// What a driver may do to an engine.
#[derive(Clone, Debug)]
enum Action {
    /// A prompt of a family (its prefix) with a tail of its own, and how many tokens to generate.
    Submit {
        family: u32,
        shared: u32,
        own: u32,
        output: usize,
    },
    Abort {
        nth: usize,
    },
    StartStep,
    FinishStep,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0u32..3, 1u32..30, 0u32..20, 1usize..12)
            .prop_map(|(family, shared, own, output)| Action::Submit { family, shared, own, output }),
        1 => (0usize..40).prop_map(|nth| Action::Abort { nth }),
        4 => Just(Action::StartStep),
        4 => Just(Action::FinishStep),
    ]
}

/// Carries out the actions and drains; the engine, its events, and the ids that were accepted and aborted.
fn play(actions: &[Action], kv_cache_tokens: usize, reserve: bool) -> (Engine, Vec<Event>, Vec<RequestId>, Vec<RequestId>) {
    let mut engine = Engine::new(EngineConfig { reserve_full_sequence: reserve, ..config(kv_cache_tokens) });
    let (mut events, mut accepted, mut aborted) = (Vec::new(), Vec::new(), Vec::new());
    for (id, action) in actions.iter().enumerate() {
        let id = id as RequestId;
        match *action {
            Action::Submit { family, shared, own, output } => {
                let own = (0..own).map(|n| 10_000 + id as u32 * 100 + n);
                let prompt = (0..shared).map(|n| family * 1000 + n).chain(own);
                if engine.submit(&request(id, prompt, output)).is_ok() {
                    accepted.push(id);
                }
            }
            Action::Abort { nth } => {
                if let Some(&id) = accepted.get(nth)
                    && engine.abort(id)
                {
                    aborted.push(id);
                }
            }
            Action::StartStep => drop(engine.start_step()),
            Action::FinishStep => engine.finish_step(&mut events),
        }
        engine.check();
    }
    engine.finish_step(&mut events);
    events.extend(drain(&mut engine));
    (engine, events, accepted, aborted)
}

proptest! {
    #[test]
    fn every_request_ends_once_and_gives_all_its_blocks_back(
        actions in prop::collection::vec(action(), 1..80),
        kv_cache_tokens in 40usize..200,
        reserve: bool,
    ) {
        let (engine, events, accepted, aborted) = play(&actions, kv_cache_tokens, reserve);
        engine.check();
        prop_assert_eq!(engine.gauges(), Gauges::default());

        let mut ends: BTreeMap<RequestId, u32> = BTreeMap::new();
        for event in &events {
            if matches!(event, Event::Finished { .. }) {
                *ends.entry(event.id()).or_default() += 1;
            }
        }
        aborted.iter().for_each(|id| *ends.entry(*id).or_default() += 1);
        prop_assert_eq!(ends, accepted.iter().map(|id| (*id, 1)).collect::<BTreeMap<_, _>>());

        let counters = engine.counters();
        prop_assert!(counters.prefix_cache_hits <= counters.prefix_cache_queries);
        prop_assert_eq!(counters.finished_length, (accepted.len() - aborted.len()) as u64);
        prop_assert_eq!(counters.aborted, aborted.len() as u64);
        let tokens = events.iter().filter(|event| !matches!(event, Event::Finished { .. })).count();
        prop_assert_eq!(counters.generation_tokens, tokens as u64);
    }

    #[test]
    fn the_same_input_gives_the_same_output(
        actions in prop::collection::vec(action(), 1..60),
        kv_cache_tokens in 40usize..200,
    ) {
        let (first, second) = (play(&actions, kv_cache_tokens, true), play(&actions, kv_cache_tokens, true));
        prop_assert_eq!(first.1, second.1);
        prop_assert_eq!(first.0.counters(), second.0.counters());
    }
}
