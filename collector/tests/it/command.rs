//! The command `homing-collector`, as a user runs it.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homing-collector"));
    command.args(arguments).env_remove("RUST_LOG");
    command
}

fn output(arguments: &[&str]) -> Output {
    command(arguments).output().expect("a command")
}

fn file(folder: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("homing.yaml");
    std::fs::write(&path, text).expect("a file");
    path
}

const VALID: &str = "listen: 127.0.0.1:0\npools: [{cluster: a, replicas: [{address: '127.0.0.1:1', drain: true}]}]\n";

#[test]
fn check_prints_what_it_understood() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(&folder, VALID);
    let path = path.to_str().expect("a path");
    let people = output(&["check", path]);
    let text = String::from_utf8_lossy(&people.stdout).into_owned();
    assert!(people.status.success());
    assert!(text.contains("pool a") && text.contains("127.0.0.1:1 (draining)") && text.contains("every 250ms"), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&output(&["check", path, "--json"]).stdout).expect("JSON");
    assert_eq!(json["scrape"]["interval"], "250ms");
    assert_eq!(json["pools"][0]["replicas"][0]["address"], "127.0.0.1:1");
}

#[test]
fn a_mistake_is_told_and_the_command_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(&folder, &VALID.replace("drain", "drian"));
    for verb in ["check", "run"] {
        let result = output(&[verb, path.to_str().expect("a path")]);
        let text = String::from_utf8_lossy(&result.stderr);
        assert!(!result.status.success() && text.contains("homing.yaml:2:") && text.contains("drian"), "{text}");
        assert!(result.stdout.is_empty());
    }
}

#[test]
fn an_address_that_is_taken_and_a_token_file_that_is_not_there_end_it_with_what_to_do() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(&folder, &VALID.replace("127.0.0.1:0", &taken.local_addr().expect("an address").to_string()));
    let text = String::from_utf8_lossy(&output(&["run", path.to_str().expect("a path")]).stderr).into_owned();
    assert!(text.contains("cannot listen on") && text.contains("set `listen`"), "{text}");
    let path = file(&folder, &format!("{VALID}envoys: [{{url: 'unix:/a', token_file: '/no/such/token'}}]\n"));
    let text = String::from_utf8_lossy(&output(&["run", path.to_str().expect("a path")]).stderr).into_owned();
    assert!(text.contains("envoy unix:/a") && text.contains("/no/such/token"), "{text}");
}

#[cfg(unix)]
#[test]
fn run_tells_where_it_listens_and_ends_promptly_on_either_signal() {
    for signal in ["-TERM", "-INT"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = file(&folder, VALID);
        let child = command(&["run", path.to_str().expect("a path"), "--ready-json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a command");
        let mut child = KillOnDrop(child);
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().expect("output")).read_line(&mut line).expect("a line");
        let ready: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        let address = ready["address"].as_str().expect("an address");
        // An open connection must not hold it up.
        let _connection = std::net::TcpStream::connect(address).expect("it listens");
        let asked = Instant::now();
        assert!(Command::new("kill").args([signal, &child.0.id().to_string()]).status().expect("kill").success());
        assert!(child.0.wait().expect("an end").success());
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    }
}

/// A test that fails leaves nothing running.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
