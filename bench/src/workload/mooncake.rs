//! The public traces of Mooncake (kvcache-ai/Mooncake, `FAST25-release/traces`; Qin et al., FAST '25) as session plans.
//!
//! Each line is one request: `{"timestamp": 3052, "input_length": 7234, "output_length": 794, "hash_ids": [0, 28, ..]}`, the time in
//! milliseconds since the trace's start, lengths in tokens. A hash id stands for a block of 512 tokens of the prompt together with all
//! blocks before it; the last block may be shorter. Two requests whose ids begin alike have that much of their prompts in common.
//!
//! - **Texts** are made of the hash ids: the same id is the same text, so prefixes that were shared are shared again.
//! - **Conversations** are not named. A request continues one if its ids begin with all whole blocks of that conversation's last request,
//!   and the last of these blocks was the conversation's own: a system prompt that many have in common continues none.
//! - **Answers** are not in the trace; the next turn has them under its own ids. So each turn is a [`Step::Compact`] whose text is the
//!   whole prompt, and an answer's own cache is not hit.
//! - **Times**: a session comes at its first request's timestamp. What lies between two of its requests is the answer and the think time
//!   together; the answer is taken to need [`TOKEN_MS`] a token.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::collections::HashMap;
use std::io::BufRead;

use super::plan::{Call, SessionPlan, Step, Text};
use super::trace::{MOST_TOKENS, lines};

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 512;
/// Milliseconds that an answer's token is taken to have needed, where a trace does not say.
pub const TOKEN_MS: u64 = 30;

/// A line of a trace. Other keys are ignored: later traces add some.
#[derive(Debug, Deserialize)]
struct Request {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

/// A conversation as it is being read.
struct Thread {
    plan: SessionPlan,
    /// The last request's whole blocks.
    blocks: Vec<u64>,
    last_timestamp: u64,
    last_output: usize,
}

/// Whether a line is one of a Mooncake trace.
pub fn is_request(line: &str) -> bool {
    serde_json::from_str::<Request>(line).is_ok()
}

/// Reads a trace: conversations in the order of their first requests.
///
/// # Errors
/// The first line that is no request, or comes before the one above it, by its number.
pub fn read(from: impl BufRead) -> Result<Vec<SessionPlan>> {
    let mut threads: Vec<Thread> = Vec::new();
    // Which conversation a block came up in first.
    let mut owners: HashMap<u64, usize> = HashMap::new();
    let mut now = 0;
    for line in lines(from) {
        let (number, line) = line?;
        let request: Request = serde_json::from_str(&line).with_context(|| format!("line {number} is no Mooncake request"))?;
        let blocks = request.input_length.div_ceil(BLOCK_TOKENS);
        ensure!(
            blocks == request.hash_ids.len(),
            "line {number}: {} tokens are {blocks} blocks of {BLOCK_TOKENS}, and it has {} hash ids",
            request.input_length,
            request.hash_ids.len()
        );
        let tokens = request.input_length.max(request.output_length);
        ensure!(tokens <= MOST_TOKENS, "line {number} has {tokens} tokens: at most {MOST_TOKENS} can be made");
        ensure!(request.timestamp >= now, "line {number} is earlier than the one above it: sort the trace by timestamp");
        now = request.timestamp;

        let continued = request.hash_ids.iter().rev().find_map(|id| owners.get(id).copied());
        let continued = continued.filter(|&thread| {
            let blocks = &threads[thread].blocks;
            request.hash_ids.starts_with(blocks) && blocks.last().is_some_and(|last| owners.get(last) == Some(&thread))
        });
        let thread = continued.unwrap_or_else(|| {
            threads.push(Thread::new(threads.len(), request.timestamp));
            threads.len() - 1
        });
        for id in &request.hash_ids {
            owners.entry(*id).or_insert(thread);
        }
        threads[thread].add(request);
    }
    Ok(threads.into_iter().map(|thread| thread.plan).collect())
}

impl Thread {
    fn new(number: usize, timestamp: u64) -> Self {
        let id = uuid::Builder::from_random_bytes((number as u128).to_be_bytes()).into_uuid().to_string();
        let plan = SessionPlan { id, parent: None, arrival_ms: Some(timestamp), system: Vec::new(), steps: Vec::new() };
        Self { plan, blocks: Vec::new(), last_timestamp: timestamp, last_output: 0 }
    }

    fn add(&mut self, request: Request) {
        let whole = request.input_length / BLOCK_TOKENS;
        let text = |(at, id): (usize, &u64)| Text { seed: *id, tokens: BLOCK_TOKENS.min(request.input_length - at * BLOCK_TOKENS) };
        let answered = TOKEN_MS * self.last_output as u64;
        let call = Call {
            think_ms: (request.timestamp - self.last_timestamp).saturating_sub(answered),
            text: request.hash_ids.iter().enumerate().map(text).collect(),
            output: request.output_length.max(1),
            hang_up_ms: None,
        };
        self.plan.steps.push(Step::Compact(call));
        self.blocks = request.hash_ids;
        self.blocks.truncate(whole);
        (self.last_timestamp, self.last_output) = (request.timestamp, request.output_length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Next, Session};

    const SAMPLE: &str = include_str!("../../testdata/mooncake.jsonl");

    fn sample() -> Vec<SessionPlan> {
        read(SAMPLE.as_bytes()).unwrap()
    }

    /// The prompts that a session sends, as text.
    fn prompts(plan: &SessionPlan) -> Vec<String> {
        let mut session = Session::new(plan.clone());
        let mut prompts = Vec::new();
        while let Next::Call(_) = session.advance() {
            prompts.push(session.messages().iter().map(|message| message.text.as_str()).collect());
            session.answered("an answer".into());
        }
        prompts
    }

    fn shared_tokens(one: &str, two: &str) -> usize {
        one.bytes().zip(two.bytes()).take_while(|(one, two)| one == two).count() / crate::text::TOKEN_BYTES
    }

    #[test]
    fn requests_that_go_on_from_an_earlier_one_are_turns_of_a_conversation() {
        // Two conversations of three and two turns and two single requests; all but the last begin with the same block.
        let turns: Vec<_> = sample().iter().map(|plan| plan.steps.len()).collect();
        assert_eq!(turns, [3, 2, 1, 1]);
    }

    #[test]
    fn prompts_have_the_traces_lengths_and_share_what_its_hash_ids_share() {
        let plans = sample();
        let first = prompts(&plans[0]);
        assert_eq!(first.iter().map(|prompt| prompt.len() / 4).collect::<Vec<_>>(), [1324, 2048, 3000]);
        assert_eq!(shared_tokens(&first[0], &first[1]), 2 * BLOCK_TOKENS);
        assert_eq!(shared_tokens(&first[1], &first[2]), 4 * BLOCK_TOKENS);
        // The block that conversations have in common.
        assert_eq!(shared_tokens(&first[0], &prompts(&plans[1])[0]), BLOCK_TOKENS);
        assert_eq!(shared_tokens(&first[0], &prompts(&plans[3])[0]), 0);
    }

    #[test]
    fn sessions_come_when_they_came_and_think_between_their_answers() {
        let plans = sample();
        assert_eq!(plans.iter().map(|plan| plan.arrival_ms).collect::<Vec<_>>(), [Some(0), Some(500), Some(9000), Some(30000)]);
        // 12 s between the first two requests, of which 100 tokens are 3.
        assert_eq!(plans[0].calls().map(|call| call.think_ms).collect::<Vec<_>>(), [0, 9_000, 0]);
        assert_eq!(plans[0].calls().map(|call| call.output).collect::<Vec<_>>(), [100, 500, 20]);
    }

    #[test]
    fn two_requests_that_go_on_from_the_same_one_are_two_conversations() {
        let line = |at: u64, tokens: usize, ids: &[u64]| {
            format!("{{\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
        };
        let text = line(0, 1024, &[1, 2]) + &line(1, 1536, &[1, 2, 3]) + &line(2, 1536, &[1, 2, 4]) + &line(3, 2048, &[1, 2, 4, 5]);
        let turns: Vec<_> = read(text.as_bytes()).unwrap().iter().map(|plan| plan.steps.len()).collect();
        assert_eq!(turns, [2, 2]);
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text: &str| format!("{:#}", read(text.as_bytes()).unwrap_err());
        assert!(error("{}").starts_with("line 1 is no Mooncake request: missing field `timestamp`"));
        let short = r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}"#;
        assert!(error(short).contains("600 tokens are 2 blocks of 512, and it has 1 hash ids"));
        let unsorted = SAMPLE.lines().rev().collect::<Vec<_>>().join("\n");
        assert!(error(&unsorted).contains("line 2 is earlier"));
    }
}
