//! What naming a conversation costs per request: from the headers, from an id at the end of the body, from the content.
//!
//! `cargo bench -p homing-routing` measures; `-- --save-baseline NAME` keeps the run and `-- --baseline NAME` compares with it.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homing_routing::identity::{Namer, Naming};
use serde_json::json;

/// What an agent reads and sends again: source code, full of quotes and line ends.
const SOURCES: [&str; 4] = [
    include_str!("../src/router.rs"),
    include_str!("../src/table.rs"),
    include_str!("../src/pool.rs"),
    include_str!("../src/control.rs"),
];

/// An OpenAI client's request behind a load balancer, its session last.
const HEADERS: [(&str, &str); 15] = [
    (":authority", "models.example.com"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    (":scheme", "https"),
    ("user-agent", "opencode/1.18.19 ai-sdk/provider-utils/3.0.9 runtime/bun/1.2.21"),
    ("content-type", "application/json"),
    ("content-length", "183422"),
    ("authorization", "Bearer xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"),
    ("accept", "text/event-stream"),
    ("accept-encoding", "gzip, deflate, br, zstd"),
    ("x-forwarded-for", "10.1.2.3"),
    ("x-forwarded-proto", "https"),
    ("x-request-id", "6e2f8c1c-49f4-4c5f-9d0a-0a4f0c1f3c11"),
    ("x-envoy-expected-rq-timeout-ms", "600000"),
    ("x-session-affinity", "ses_6f2c9b1d8ffeH3vQ0x7yTgJm2K"),
];

/// A chat of an agent, in the order its client writes it: messages, system text, tools, and the metadata at the end.
fn body(bytes: usize, metadata: &str) -> Vec<u8> {
    let tools: Vec<_> = (0..bytes / 8192 + 1)
        .take(24)
        .map(|n| {
            json!({
                "name": format!("tool_{n}"),
                "description": "Reads a file.\n\nUsage:\n- `file_path` is absolute\n- at most 2000 lines are \"read\" at once",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": false,
                    "required": ["file_path"],
                    "properties": {
                        "file_path": {"type": "string", "description": "The absolute path of the file"},
                        "offset": {"type": "integer", "minimum": 0, "description": "The line to start from"},
                        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 2000},
                    },
                },
            })
        })
        .collect();
    let system = json!([
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.a1b; cc_entrypoint=cli;"},
        {"type": "text", "text": SOURCES[1].get(..bytes / 8).unwrap_or(SOURCES[1]), "cache_control": {"type": "ephemeral"}},
    ]);
    let task = SOURCES[2].get(..bytes / 16).unwrap_or(SOURCES[2]);
    let mut messages = vec![json!({"role": "user", "content": [{"type": "text", "text": task}]}).to_string()];
    let fixed = system.to_string().len() + json!(tools).to_string().len() + messages[0].len() + metadata.len();
    let mut written = fixed + 200;
    for turn in 0.. {
        let source = SOURCES[turn % SOURCES.len()];
        let source = source.get(..(bytes / 8).min(source.len())).unwrap_or(source);
        let call = json!({"role": "assistant", "content": [
            {"type": "text", "text": "I'll look at the next file."},
            {"type": "tool_use", "id": format!("toolu_{turn:024}"), "name": "tool_0", "input": {"file_path": "/src/table.rs", "limit": 400}},
        ]});
        let result = json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": format!("toolu_{turn:024}"), "content": [{"type": "text", "text": source}]},
        ]});
        let (call, result) = (call.to_string(), result.to_string());
        written += call.len() + result.len() + 2;
        if written > bytes {
            break;
        }
        messages.extend([call, result]);
    }
    let (messages, tools) = (messages.join(","), json!(tools));
    let head = "\"model\":\"qwen3-4b\",\"max_tokens\":32000,\"temperature\":1,\"stream\":true";
    format!("{{{head},\"messages\":[{messages}],\"system\":{system},\"tools\":{tools}{metadata}}}").into_bytes()
}

const SESSION: &str = r#","metadata":{"user_id":"{\"device_id\":\"dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd\",\"account_uuid\":\"\",\"session_id\":\"00000003-0000-4000-8000-000000000003\"}"}"#;

fn identity(criterion: &mut Criterion) {
    let namer = Namer::new(Naming::default(), &[7; 16], "qwen3-4b");

    let headers = HEADERS.map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    assert!(namer.from_headers(headers.into_iter()).is_some());
    criterion.bench_function("headers/15", |bencher| {
        bencher.iter(|| namer.from_headers(black_box(&headers).iter().copied()));
    });

    for (kind, metadata, source) in [("id", SESSION, "body:metadata.user_id"), ("fingerprint", "", "fingerprint")] {
        let mut group = criterion.benchmark_group(kind);
        for (size, bytes) in [("4KB", 4 << 10), ("64KB", 64 << 10), ("1MB", 1 << 20)] {
            let body = body(bytes, metadata);
            assert!((bytes * 3 / 4..=bytes).contains(&body.len()), "{size} is {} bytes", body.len());
            assert_eq!(namer.from_body(&body, None).expect("a conversation").source.as_str(), source);
            group.throughput(Throughput::Bytes(body.len() as u64));
            group.bench_function(size, |bencher| bencher.iter(|| namer.from_body(black_box(&body), None)));
        }
        group.finish();
    }
}

criterion_group!(benches, identity);
criterion_main!(benches);
