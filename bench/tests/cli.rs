//! The program as it is started.

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A replica's process, ended with the test.
struct Process {
    child: Child,
    url: String,
}

impl Process {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_homing-bench"))
            .args(["replica", "--ready-json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap();
        Self { child, url: format!("http://{}", ready["address"].as_str().unwrap()) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_replica_ends_at_once_on_a_signal_though_a_stream_is_open() {
    for name in ["TERM", "INT"] {
        let mut replica = Process::start(&[]);
        let body = r#"{"messages":[{"role":"user","content":"hello"}],"max_tokens":10000,"stream":true}"#;
        let response = reqwest::Client::new().post(format!("{}/v1/chat/completions", replica.url)).body(body).send().await.unwrap();
        let signalled = Instant::now();
        assert!(Command::new("kill").args(["-s", name, &replica.child.id().to_string()]).status().unwrap().success());
        assert!(response.bytes().await.is_err(), "the stream is cut");
        assert!(replica.child.wait().unwrap().success());
        assert!(signalled.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn load_prints_one_line_of_json() {
    let replica = Process::start(&["--speed", "400", "--model", "m"]);
    let output = Command::new(env!("CARGO_BIN_EXE_homing-bench"))
        .args(["load", "--json", "--url", &replica.url, "--replicas", &replica.url, "--model", "m", "--speed", "400"])
        .args(["--sessions", "2", "--duration", "1s", "--first-tokens", "1000"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "no progress where nobody looks");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1);
    let report: Value = serde_json::from_str(&text).unwrap();
    for field in
        ["sessions", "sessions_per_hour", "output_tokens_per_minute", "ttfb_p50_s", "ttfb_p95_s", "replicas_busy", "prefix_hits"]
    {
        assert!(report[field].as_f64().unwrap() > 0.0, "{field} in {text}");
    }
    assert!(report["stayed"].is_null());
}
