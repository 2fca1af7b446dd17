//! Replicas that come and go while everything runs: by the collector's file, with an Envoy cluster that has all of them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use homing_tests::{all_given_back, eventually, fast_stack, metrics, tools, turn};
use serde_json::{Value, json};
use xtask::process::Process;
use xtask::stack::{MODEL, Stack, StackOptions};

/// A stack whose collector finds its replicas in a file, and may drain by the API.
async fn stack_with_file(replicas: &[usize]) -> Result<(Stack, PathBuf)> {
    let mut stack = fast_stack(StackOptions { collector: false, ..StackOptions::default() }).await?;
    let path = stack.dir.path().join("targets.json");
    write(&path, &addresses(&stack, replicas))?;
    stack.collector = Some(start_collector(&stack, "collector", &path).await?);
    known(&stack, replicas).await?;
    Ok((stack, path))
}

async fn start_collector(stack: &Stack, name: &str, targets: &Path) -> Result<(Process, SocketAddr)> {
    let config = json!({
        "listen": "127.0.0.1:0",
        "api": { "token": "secret" },
        "envoys": [{ "url": format!("http://{}", stack.control) }],
        "pools": [{ "cluster": MODEL, "max_num_seqs": 32, "files": [targets] }],
    });
    let file = stack.dir.path().join(name).with_extension("yaml");
    std::fs::write(&file, config.to_string())?;
    let args = ["run".to_owned(), file.display().to_string(), "--ready-json".to_owned()];
    let (process, ready) = Process::start_ready(name, &tools().collector, &args, stack.dir.path()).await?;
    Ok((process, ready["address"].as_str().context("an address")?.parse()?))
}

fn addresses(stack: &Stack, replicas: &[usize]) -> Vec<SocketAddr> {
    replicas.iter().map(|&index| stack.replicas[index].1).collect()
}

/// Puts a list in place at once.
fn write(path: &Path, targets: &[SocketAddr]) -> Result<()> {
    let next = path.with_extension("next");
    std::fs::write(&next, json!([{ "targets": targets }]).to_string())?;
    Ok(std::fs::rename(next, path)?)
}

async fn status(stack: &Stack) -> Result<Value> {
    status_of(stack.collector.as_ref().context("the collector")?.1).await
}

async fn status_of(console: SocketAddr) -> Result<Value> {
    Ok(reqwest::get(format!("http://{console}/api/v1/pools")).await?.json().await?)
}

/// Waits until Envoy knows exactly these replicas, and that they are ready.
async fn known(stack: &Stack, replicas: &[usize]) -> Result<()> {
    let expected: Vec<_> = addresses(stack, replicas).iter().map(ToString::to_string).collect();
    eventually("the replicas to be known", async || {
        let status = status(stack).await?;
        let names = |list: &Value| -> Vec<String> {
            list.as_array().into_iter().flatten().filter_map(|entry| Some(entry["replica"].as_str()?.to_owned())).collect()
        };
        let seen = &status["pools"][0]["replicas"];
        let ready = seen.as_array().into_iter().flatten().all(|replica| replica["state"] == "ready");
        Ok(ready && names(seen) == expected && names(&status["envoys"][0]["pools"][0]["replicas"]) == expected)
    })
    .await?;
    // What the answer was to may have been sent before the last of them was ready: two more, and it was not.
    exchanges(stack, 2).await
}

/// Waits until Envoy took this many more snapshots.
async fn exchanges(stack: &Stack, more: u64) -> Result<()> {
    let version = async || Ok::<_, anyhow::Error>(metrics(stack).await?["homing_snapshot_version"][0].1);
    let before = version().await?;
    eventually("snapshots", async || Ok(version().await? >= before + more)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_added_gets_new_conversations_and_one_that_is_removed_loses_its_own_and_no_request_fails() -> Result<()> {
    let (stack, path) = stack_with_file(&[0, 1]).await?;
    let stack = Arc::new(stack);
    // Turns of other conversations all the time, none of which may fail.
    let ended = Arc::new(AtomicBool::new(false));
    let load = tokio::spawn({
        let (stack, ended) = (stack.clone(), ended.clone());
        async move {
            let mut turns = 0_u32;
            while !ended.load(Ordering::SeqCst) {
                let turn = turn(&stack, &format!("load-{}", turns % 16), 4).await?;
                ensure!(turn.status == 200 && turn.outcome != "passed", "turn {turns}: {turn:?}");
                turns += 1;
            }
            Ok(turns)
        }
    });

    let third = addresses(&stack, &[2])[0].to_string();
    let mut homes = Vec::new();
    for number in 0..4 {
        homes.push(turn(&stack, &format!("early-{number}"), 1).await?.replica);
    }
    assert!(!homes.contains(&third), "it is in the cluster and not in the file");

    write(&path, &addresses(&stack, &[0, 1, 2]))?;
    known(&stack, &[0, 1, 2]).await?;
    for (number, home) in homes.iter().enumerate() {
        let turn = turn(&stack, &format!("early-{number}"), 1).await?;
        assert_eq!((turn.outcome.as_str(), &turn.replica), ("sticky", home), "no conversation moves because one was added");
    }
    let mut late = Vec::new();
    for number in 0..12 {
        late.push((number, turn(&stack, &format!("late-{number}"), 1).await?.replica));
    }
    late.retain(|(_, replica)| *replica == third);
    assert!(!late.is_empty(), "the new replica gets new conversations");

    write(&path, &addresses(&stack, &[0, 1]))?;
    known(&stack, &[0, 1]).await?;
    for (number, _) in &late {
        let conversation = format!("late-{number}");
        let moved = turn(&stack, &conversation, 1).await?;
        assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
        assert_ne!(moved.replica, third);
        let next = turn(&stack, &conversation, 1).await?;
        assert_eq!((next.outcome.as_str(), &next.replica), ("sticky", &moved.replica));
    }
    ended.store(true, Ordering::SeqCst);
    assert!(load.await?? > 0);
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_drained_by_command_is_left_by_its_conversations_and_comes_back() -> Result<()> {
    let (stack, _) = stack_with_file(&[0, 1]).await?;
    let home = turn(&stack, "moves", 1).await?.replica;
    let token = stack.dir.path().join("token");
    std::fs::write(&token, "secret\n")?;
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let drain = async |more: &[&str]| -> Result<()> {
        let mut command = tokio::process::Command::new(&tools().collector);
        command.args(["drain", &home, "--url", &format!("http://{console}"), "--token-file"]).arg(&token).args(more);
        let output = command.output().await?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // A snapshot that was under way may not have it yet.
        exchanges(&stack, 3).await
    };
    drain(&[]).await?;
    let moved = turn(&stack, "moves", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    assert_ne!(moved.replica, home);
    for number in 0..4 {
        assert_ne!(turn(&stack, &format!("new-{number}"), 1).await?.replica, home, "it takes no new conversation");
    }
    drain(&["--undo"]).await?;
    let mut placed = Vec::new();
    for number in 0..4 {
        placed.push(turn(&stack, &format!("later-{number}"), 1).await?.replica);
    }
    assert!(placed.contains(&home), "{placed:?}");
    all_given_back(&stack).await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_collectors_the_later_one_is_heard_until_it_is_gone() -> Result<()> {
    let (stack, _) = stack_with_file(&[0, 1]).await?;
    let other = stack.dir.path().join("others.json");
    write(&other, &addresses(&stack, &[2]))?;
    let (mut later, console) = start_collector(&stack, "later", &other).await?;
    let third = addresses(&stack, &[2])[0].to_string();
    let envoy = async |console: SocketAddr| Ok::<_, anyhow::Error>(status_of(console).await?["envoys"][0].clone());
    let earlier = stack.collector.as_ref().context("the collector")?.1;
    eventually("the earlier one to stand by", async || Ok(envoy(earlier).await?["standby"] == true)).await?;
    assert!(envoy(earlier).await?["problem"].is_null(), "nothing is wrong");
    assert_eq!(envoy(console).await?["standby"], false);
    assert_eq!(turn(&stack, "a", 1).await?.replica, third, "the later one's replicas count");

    later.kill().await?;
    eventually("the earlier one to be heard again", async || Ok(envoy(earlier).await?["standby"] == false)).await?;
    let moved = turn(&stack, "a", 1).await?;
    assert_eq!((moved.status, moved.outcome.as_str()), (200, "rehomed"));
    all_given_back(&stack).await
}
