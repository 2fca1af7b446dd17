//! The pages of docs and the collector say the same: here the table of docs/configuration.md and the configuration's schema.

mod api;
mod metrics;

use std::collections::BTreeMap;

use homing_collector::config::Config;
use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/configuration.md");

/// The keys of the page's table, and what stands as their default.
fn documented() -> BTreeMap<String, String> {
    let (_, page) = PAGE.split_once("## The collector\n").expect("the table's place");
    let lines = page.lines().skip_while(|line| !line.starts_with("| `")).take_while(|line| line.starts_with("| "));
    let rows = lines.flat_map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(|cell| cell.trim().split(", ").map(|text| text.trim_matches('`')));
        let (keys, defaults) = (cells.next().expect("keys"), cells.next().expect("defaults"));
        // One default may stand for all keys of a row.
        let defaults: Vec<_> = defaults.collect();
        keys.enumerate().map(move |(n, key)| (key.to_owned(), defaults[n.min(defaults.len() - 1)].to_owned())).collect::<Vec<_>>()
    });
    rows.collect()
}

/// A part of the schema, without the indirections.
fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        return resolved(root.pointer(name).expect("a definition"), root);
    }
    let either = schema["anyOf"].as_array().and_then(|either| either.iter().find(|one| one.get("$ref").is_some()));
    either.map_or(schema, |one| resolved(one, root))
}

/// Every key that takes a value of its own: what stands as its default on the page.
fn keys(path: &str, schema: &Value, root: &Value, found: &mut BTreeMap<String, String>) {
    let items = resolved(schema, root)["items"].clone();
    let (path, within) =
        if items.is_null() { (path.to_owned(), resolved(schema, root)) } else { (format!("{path}[]"), resolved(&items, root)) };
    let required: Vec<_> = within["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, key) in within["properties"].as_object().into_iter().flatten() {
        let full = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let inner = resolved(key, root);
        let has_keys = |schema: &Value| resolved(schema, root).get("properties").is_some();
        if has_keys(inner) || inner.get("items").is_some_and(has_keys) {
            keys(&full, key, root, found);
            continue;
        }
        let default = match &key["default"] {
            _ if required.contains(&name.as_str()) => "required".to_owned(),
            Value::Null => "none".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        found.insert(full, default);
    }
}

#[test]
fn every_key_is_documented_with_its_default() {
    let root = serde_json::to_value(Config::schema()).expect("JSON");
    let mut known = BTreeMap::new();
    keys("", &root, &root, &mut known);
    assert!(known.len() > 30, "{known:?}");
    let mut documented = documented();
    // These say what the section as a whole does.
    for section in ["pools[].tls", "envoys[].tls"] {
        assert!(documented.remove(section).is_some(), "{section}");
    }
    // The same keys as a pool's, which the page says in one row.
    known.retain(|key, _| !key.starts_with("envoys[].tls."));
    // A default that the schema does not tell.
    if let Some(default) = documented.get("affinity.prefix") {
        known.insert("affinity.prefix".to_owned(), default.clone());
    }
    // A store is required in a section that is not.
    known.insert("affinity.store".to_owned(), "none".to_owned());
    assert_eq!(documented, known);
}

#[test]
fn the_tests_that_the_page_on_security_names_are_there() {
    let page = include_str!("../../../docs/security.md");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    // The last cell of each row; those with code are files or commands.
    let rows =
        page.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.trim_end_matches(" |").rsplit(" | ").next());
    let named = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(|name| !name.starts_with("cargo "));
    let mut count = 0;
    for name in named {
        let file = match name.split_once('/') {
            Some((folder @ ("e2e" | "browser"), file)) => format!("tests/tests/{folder}/{file}"),
            Some(("collector", file)) if !file.contains('/') => format!("collector/tests/it/{file}"),
            _ => name.to_owned(),
        };
        assert!(root.join(&file).is_file(), "{name}: {file} is no file");
        count += 1;
    }
    assert!(count > 15, "{count}");
}
