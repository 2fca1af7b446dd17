//! The tables of docs/configuration.md and the reader say the same.

use serde_json::{Value, json};

use super::super::read;

const PAGE: &str = include_str!("../../../../docs/configuration.md");

/// One row: the key, and what the columns of the default and of what is allowed say.
struct Row {
    key: &'static str,
    default: &'static str,
    allowed: &'static str,
}

/// The rows of the table behind this text.
fn table(behind: &str) -> Vec<Row> {
    let (_, page) = PAGE.split_once(behind).expect("the table's place");
    let lines = page.lines().skip_while(|line| !line.starts_with("| `")).take_while(|line| line.starts_with("| "));
    let rows = lines.map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let [key, default, allowed] = core::array::from_fn(|_| cells.next().expect("a cell"));
        Row { key: key.trim_matches('`'), default, allowed }
    });
    rows.collect()
}

fn filter() -> Vec<Row> {
    table("## The filter\n")
}

fn pool() -> Vec<Row> {
    table("Each pool:\n")
}

/// What stands between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A value as the tables write it: what YAML would take it for.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}

/// The smallest configuration in which this key means something, as JSON.
fn smallest(key: &str) -> Value {
    match key {
        "token" => json!({ "role": "control" }),
        "header" => json!({ "role": "model" }),
        _ if key.starts_with("admission.") => {
            json!({ "role": "route", "pools": [{ "cluster": "a", "admission": { "mode": "working_set" } }] })
        }
        _ => json!({ "role": "route", "pools": [{ "cluster": "a" }] }),
    }
}

/// The configuration with the key, of the filter or of its pool, set to this value.
fn with(is_pools: bool, key: &str, value: &Value) -> Value {
    let mut config = smallest(key);
    let pointer = format!("/{}", key.replace('.', "/"));
    let (parent, last) = pointer.rsplit_once('/').expect("a key");
    let parent = format!("{}{parent}", if is_pools { "/pools/0" } else { "" });
    if config.pointer(&parent).is_none() {
        let (outer, name) = parent.rsplit_once('/').expect("a key");
        config.pointer_mut(outer).expect("the pool")[name] = json!({});
    }
    config.pointer_mut(&parent).expect("the key's place")[last] = value.clone();
    // The other bound of the grace must not be the one that is found wrong.
    if last == "max_grace" {
        config["pools"][0]["admission"]["min_grace"] = json!("10ms");
    } else if last == "min_grace" {
        config["pools"][0]["admission"]["max_grace"] = json!("300s");
    }
    config
}

/// What the configuration comes to, or why it is refused.
fn outcome(config: &Value) -> Result<String, String> {
    read(config.to_string().as_bytes()).map(|role| format!("{role:?}")).map_err(|error| error.to_string())
}

fn rows() -> impl Iterator<Item = (bool, Row)> {
    filter().into_iter().map(|row| (false, row)).chain(pool().into_iter().map(|row| (true, row)))
}

#[test]
fn every_key_is_documented_and_every_documented_key_is_one() {
    for (is_pools, within) in [(false, ""), (true, ""), (true, "conversation."), (true, "admission.")] {
        let refusal = outcome(&with(is_pools, &format!("{within}no_such_key"), &json!(1))).expect_err("an unknown key");
        let (_, expected) = refusal.split_once("expected one of").expect("the keys there are");
        let mut known = quoted(expected);
        // The two that have keys of their own.
        known.retain(|key| !["conversation", "admission"].contains(key));
        let rows = if is_pools { pool() } else { filter() };
        let in_group = |row: &Row| row.key.strip_prefix(within).filter(|rest| !rest.contains('.'));
        let mut documented: Vec<_> = rows.iter().filter_map(in_group).collect();
        known.sort_unstable();
        documented.sort_unstable();
        assert_eq!(known, documented, "{within}");
    }
}

#[test]
fn a_key_that_is_set_to_its_default_changes_nothing() {
    let mut seen = 0;
    for (is_pools, Row { key, default, .. }) in rows() {
        let default = match default {
            "required" | "none" => continue,
            "empty" => json!(""),
            quoted => value(quoted.trim_matches('`')),
        };
        seen += 1;
        let mut without = with(is_pools, key, &default);
        let keys: Vec<_> = key.split('.').collect();
        let parent = keys[..keys.len() - 1]
            .iter()
            .fold(if is_pools { "/pools/0".to_owned() } else { String::new() }, |path, key| format!("{path}/{key}"));
        without.pointer_mut(&parent).and_then(Value::as_object_mut).expect("an object").remove(keys[keys.len() - 1]);
        assert_eq!(outcome(&with(is_pools, key, &default)), outcome(&without), "{key}");
    }
    assert!(seen > 15, "only {seen} defaults were found");
}

#[test]
fn what_is_allowed_is_taken_and_what_lies_beside_it_is_refused() {
    let mut ends = 0;
    for (is_pools, Row { key, allowed, .. }) in rows() {
        if ["role", "conversation.also", "replicas"].contains(&key) {
            continue;
        }
        let is_taken = |text: &str| outcome(&with(is_pools, key, &value(text)));
        for text in quoted(allowed) {
            ends += 1;
            is_taken(text).unwrap_or_else(|why| panic!("{key}: {text} is refused: {why}"));
        }
        for (is_upper, text) in limits(allowed) {
            let beside = beside(text, is_upper);
            is_taken(&beside).expect_err(&format!("{key}: {beside} is taken, though {allowed} is allowed"));
        }
        if allowed.contains(" or ") && !allowed.contains(" to ") {
            is_taken("something_else").expect_err(key);
        }
    }
    assert!(ends > 30, "only {ends} values were found");
}

/// The two ends of `A` to `B`, and whether each is the upper one.
fn limits(allowed: &str) -> Vec<(bool, &str)> {
    let Some((lower, upper)) = allowed.split_once(" to ") else { return Vec::new() };
    let (lower, upper) = (quoted(lower).pop().expect("a lower end"), quoted(upper).pop().expect("an upper end"));
    vec![(false, lower), (true, upper)]
}

/// The next value beyond an end: a number or a duration in its own unit.
fn beside(end: &str, is_upper: bool) -> String {
    let digits = end.trim_end_matches(char::is_alphabetic);
    let number: i64 = digits.parse().expect("a number");
    format!("{}{}", if is_upper { number + 1 } else { number - 1 }, &end[digits.len()..])
}
