//! Session plans as a file: JSON lines, one [`SessionPlan`] a line, empty lines skipped. Short for people to write by hand:
//!
//! ```json
//! {"id":"a","system":[[1,3500]],"steps":[{"turn":{"text":[[2,7300]],"output":256}},{"turn":{"think_ms":900,"text":[[3,400]],"output":256}}]}
//! ```
//!
//! | key | |
//! |---|---|
//! | `id` | the session's name; a UUID if clients of the system under test have one |
//! | `parent` | the id of the session that started it; absent for none |
//! | `arrival_ms` | milliseconds after the start at which it comes, ascending; absent from every line in a closed loop |
//! | `system` | the system prompt, a list of texts; absent for none |
//! | `steps` | a list of `{"turn": CALL}`, `{"compact": CALL}`, `{"side": CALL}`, `{"fan_out": [SESSION, ..]}` and `"stop"` |
//!
//! A call is `{"think_ms", "text", "output", "hang_up_ms"}`: milliseconds before it (0 if absent), the user's message as a list of texts,
//! the answer's tokens, and, if the client hangs up, how many milliseconds after sending. A text is `[seed, tokens]`: made-up words that
//! depend on the seed alone.

use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use super::mooncake;
use super::plan::{SessionPlan, Text};

/// Prompt tokens or answer tokens that a call may have: far above any model's window, and small enough to make.
pub(super) const MOST_TOKENS: usize = 10_000_000;

/// Writes plans, one a line.
///
/// # Errors
/// What `to` refuses.
pub fn write(mut to: impl Write, plans: impl IntoIterator<Item = SessionPlan>) -> Result<()> {
    for plan in plans {
        serde_json::to_writer(&mut to, &plan)?;
        writeln!(to)?;
    }
    Ok(to.flush()?)
}

/// Reads plans, one a line.
///
/// # Errors
/// The first line that is no plan, or out of order, by its number.
pub fn read(from: impl BufRead) -> Result<Vec<SessionPlan>> {
    let mut plans: Vec<SessionPlan> = Vec::new();
    for line in lines(from) {
        let (number, line) = line?;
        let plan: SessionPlan = serde_json::from_str(&line).with_context(|| format!("line {number} is no session plan"))?;
        check(&plan).with_context(|| format!("line {number}"))?;
        if let Some(last) = plans.last() {
            let (arrival, before) = (plan.arrival_ms, last.arrival_ms);
            ensure!(arrival.is_some() == before.is_some(), "line {number}: either every session has an arrival_ms or none");
            ensure!(arrival >= before, "line {number} arrives before the one above it: sort the trace by arrival_ms");
        }
        plans.push(plan);
    }
    Ok(plans)
}

/// Reads a file of session plans or a [Mooncake](mooncake) trace, whichever it is.
///
/// # Errors
/// A file that cannot be read, has no session, or has a line that is neither.
pub fn read_file(path: &Path) -> Result<Vec<SessionPlan>> {
    let open = || Ok::<_, std::io::Error>(BufReader::new(File::open(path)?));
    let plans = || -> Result<Vec<SessionPlan>> {
        let first = lines(open()?).next().transpose()?.context("it has no session: each line is one")?.1;
        let plans = if mooncake::is_request(&first) { mooncake::read(open()?) } else { read(open()?) }?;
        Ok(plans)
    };
    plans().with_context(|| format!("cannot read the trace {}", path.display()))
}

/// The lines that are not empty, with their numbers.
pub(super) fn lines(from: impl BufRead) -> impl Iterator<Item = Result<(usize, String)>> {
    let numbered = from.lines().enumerate().map(|(at, line)| {
        let number = at + 1;
        Ok((number, line.with_context(|| format!("line {number} cannot be read"))?))
    });
    numbered.filter(|line| !matches!(line, Ok((_, text)) if text.trim().is_empty()))
}

/// What a plan's types allow and no engine can do.
fn check(plan: &SessionPlan) -> Result<()> {
    for call in plan.calls() {
        ensure!(call.output > 0, "a call asks for no tokens: give each an output of at least 1");
        let tokens = Text::count(&call.text).max(call.output);
        ensure!(tokens <= MOST_TOKENS, "a call has {tokens} tokens: at most {MOST_TOKENS} can be made");
    }
    let system = Text::count(&plan.system);
    ensure!(system <= MOST_TOKENS, "a system prompt has {system} tokens: at most {MOST_TOKENS} can be made");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Call, Kind, Step, Workload};
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    fn any_call() -> impl Strategy<Value = Call> {
        let text = prop::collection::vec((any::<u64>(), 0usize..100_000).prop_map(Text::from), 0..4);
        (any::<u64>(), text, 1usize..5_000, any::<Option<u64>>()).prop_map(|(think_ms, text, output, hang_up_ms)| Call {
            think_ms,
            text,
            output,
            hang_up_ms,
        })
    }

    fn any_plan(step: impl Strategy<Value = Step>) -> impl Strategy<Value = SessionPlan> {
        let system = prop::collection::vec((any::<u64>(), 0usize..10_000).prop_map(Text::from), 0..3);
        (".*", any::<Option<u16>>(), any::<Option<u64>>(), system, prop::collection::vec(step, 0..4)).prop_map(
            |(id, parent, arrival_ms, system, steps)| SessionPlan {
                id,
                parent: parent.map(|parent| parent.to_string()),
                arrival_ms,
                system,
                steps,
            },
        )
    }

    fn any_step() -> impl Strategy<Value = Step> {
        let step = prop_oneof![
            any_call().prop_map(Step::Turn),
            any_call().prop_map(Step::Compact),
            any_call().prop_map(Step::Side),
            Just(Step::Stop),
        ];
        step.prop_recursive(3, 12, 3, |step| prop::collection::vec(any_plan(step), 0..3).prop_map(Step::FanOut))
    }

    proptest! {
        #[test]
        fn what_was_written_is_what_is_read(plans in prop::collection::vec(any_plan(any_step()), 0..5), open: bool) {
            let arrive = |(at, plan)| SessionPlan { arrival_ms: open.then_some(1000 * at as u64), ..plan };
            let plans: Vec<_> = plans.into_iter().enumerate().map(arrive).collect();
            let mut file = Vec::new();
            write(&mut file, plans.clone()).unwrap();
            prop_assert_eq!(file.iter().filter(|byte| **byte == b'\n').count(), plans.len());
            prop_assert_eq!(read(&file[..]).unwrap(), plans);
        }

        #[test]
        fn any_file_is_plans_that_read_back_or_an_error_that_names_a_line(file in mutated(seeds("traces"))) {
            match read(&file[..]) {
                Ok(plans) => {
                    let mut written = Vec::new();
                    write(&mut written, plans.clone()).unwrap();
                    prop_assert_eq!(read(&written[..]).unwrap(), plans);
                }
                Err(error) => prop_assert!(error.to_string().starts_with("line "), "{error:#}"),
            }
        }

        #[test]
        fn any_mooncake_trace_is_plans_that_can_be_written_or_an_error_that_names_a_line(file in mutated(seeds("mooncake"))) {
            match mooncake::read(&file[..]) {
                Ok(plans) => {
                    let requests = file.text().lines().filter(|line| !line.trim().is_empty()).count();
                    prop_assert_eq!(plans.iter().map(|plan| plan.steps.len()).sum::<usize>(), requests);
                    let mut written = Vec::new();
                    write(&mut written, plans.clone()).unwrap();
                    prop_assert_eq!(read(&written[..]).unwrap(), plans);
                }
                Err(error) => prop_assert!(error.to_string().starts_with("line "), "{error:#}"),
            }
        }
    }

    #[test]
    fn a_plan_can_be_written_by_hand() {
        let text = r#"
            {"id":"a","system":[[1,8]],"steps":[{"turn":{"text":[[2,5]],"output":3}},"stop"]}
        "#;
        let plans = read(text.as_bytes()).unwrap();
        assert_eq!(plans[0].steps[1], Step::Stop);
        assert_eq!(plans[0].largest_call(), 8 + 5 + 3);
    }

    #[test]
    fn errors_name_the_line_and_what_is_wrong() {
        let error = |text: &str| format!("{:#}", read(text.as_bytes()).unwrap_err());
        assert!(error("\n{\"id\":\"a\"}").starts_with("line 2 is no session plan: missing field `steps`"));
        let arrives = |arrival: &str| format!("{{\"id\":\"a\",{arrival}\"steps\":[]}}\n");
        assert!(error(&(arrives("\"arrival_ms\":1,") + &arrives(""))).starts_with("line 2: either every session"));
        assert!(error(&(arrives("\"arrival_ms\":2,") + &arrives("\"arrival_ms\":1,"))).starts_with("line 2 arrives before"));
        assert!(error(r#"{"id":"a","steps":[],"think":1}"#).contains("unknown field `think`"));
        let nothing = r#"{"id":"a","steps":[{"fan_out":[{"id":"b","steps":[{"side":{"text":[],"output":0}}]}]}]}"#;
        assert!(error(nothing).contains("an output of at least 1"));
        assert!(error(r#"{"id":"a","steps":[{"turn":{"text":[[1,99999999999]],"output":1}}]}"#).contains("at most"));
    }

    #[test]
    fn a_workload_written_and_read_is_the_same_workload() {
        let plans: Vec<_> = Workload::new(Kind::Agents, 5).sessions(0).take(20).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        write(&file, plans.clone()).unwrap();
        let read = Workload::from_trace(read_file(file.path()).unwrap());
        assert_eq!(read.sessions(0).collect::<Vec<_>>(), plans);
        assert_eq!(read.sessions(18).count(), 2);
    }

    #[test]
    fn a_file_without_sessions_says_what_it_lacks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "\n").unwrap();
        let error = format!("{:#}", read_file(file.path()).unwrap_err());
        assert!(error.contains("has no session") && error.contains(&file.path().display().to_string()), "{error}");
    }
}
