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

fn run(arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_homing-bench")).args(arguments).output().unwrap()
}

fn stdout(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_workload_written_to_a_file_is_simulated_from_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    stdout(&["workload", "--kind", "open", "--rate", "30", "--sessions", "6", "--seed", "3", "--out", path]);
    assert_eq!(stdout(&["workload", "--trace", path]), std::fs::read_to_string(path).unwrap());

    let text = stdout(&["simulate", "--trace", path, "--policy", "homing,vllm-0.27", "--minutes", "10", "--json"]);
    let reports: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(reports.iter().map(|report| report["policy"].as_str().unwrap()).collect::<Vec<_>>(), ["homing", "vllm-0.27"]);
    for report in reports {
        assert_eq!([&report["sessions_started"], &report["sessions_done"], &report["turns"]], [6.0, 6.0, 36.0], "{report}");
    }
}

#[test]
fn a_simulation_of_several_seeds_has_means_and_deviations() {
    let text = stdout(&["simulate", "--policy", "hash", "--sessions", "6", "--minutes", "3", "--seeds", "3", "--json"]);
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((report["runs"].as_u64(), report["sessions"].as_u64()), (Some(3), Some(6)));
    assert!(report["prefix_hits"].as_f64().unwrap() > 50.0 && report["deviation"]["prefix_hits"].as_f64().unwrap() > 0.0, "{text}");
}

#[test]
fn a_trace_that_cannot_be_read_is_an_error_that_names_it() {
    let output = run(&["simulate", "--trace", "/nowhere/trace.jsonl"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("/nowhere/trace.jsonl"), "{error}");
}
