//! What the page shows when there is little or nothing to show.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use homing_tests::browser::{Screen, Visitor};
use homing_tests::{eventually, tools};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use xtask::fleet::{FleetOptions, FleetStack};
use xtask::process::Process;
use xtask::stack::StackOptions;

use crate::{SOON, column, fact};

/// A collector without a stack.
struct Alone {
    url: String,
    _process: Process,
    _dir: TempDir,
}

async fn alone(mut config: Value) -> Result<Alone> {
    config["listen"] = json!("127.0.0.1:0");
    let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
    let file = dir.path().join("collector.yaml");
    std::fs::write(&file, config.to_string())?;
    let args = ["run".to_owned(), file.display().to_string(), "--ready-json".to_owned()];
    let (process, ready) = Process::start_ready("collector", &tools().collector, &args, dir.path()).await?;
    let url = format!("http://{}", ready["address"].as_str().context("an address")?);
    Ok(Alone { url, _process: process, _dir: dir })
}

/// An address at which nothing listens.
async fn nobody() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?)
}

async fn visit(collector: &Alone) -> Result<Visitor> {
    let visitor = Visitor::start(Screen::DESKTOP).await?;
    visitor.open(&collector.url).await?;
    Ok(visitor)
}

/// The text of what a selector finds first and is seen; empty when it is hidden.
async fn seen(visitor: &Visitor, selector: &str) -> Result<String> {
    visitor.ask(&format!("(() => {{ const node = document.querySelector({selector:?}); return node?.checkVisibility() ? node.textContent : ''; }})()")).await
}

async fn link(visitor: &Visitor) -> Result<String> {
    visitor.ask("document.body.dataset.link").await
}

#[tokio::test(flavor = "multi_thread")]
async fn before_its_first_state_the_page_says_so_and_a_collector_that_gives_none_is_named() -> Result<()> {
    let collector =
        alone(json!({ "pools": [{ "cluster": "pool", "replicas": [{ "address": nobody().await?.to_string() }] }] })).await?;
    let mut taken = Vec::new();
    for _ in 0..64 {
        taken.push(reqwest::get(format!("{}/api/v1/events", collector.url)).await?.error_for_status()?);
    }
    let visitor = visit(&collector).await?;
    assert_eq!((link(&visitor).await?.as_str(), seen(&visitor, "#link-text").await?.as_str()), ("loading", "connecting"));
    let shapes = "document.getElementById('loading').checkVisibility() && document.querySelector('#pools *') === null";
    assert!(visitor.ask::<bool>(shapes).await?, "grey shapes stand where figures will be, and no figure");
    assert_eq!(seen(&visitor, "#envoys").await?, "", "nor an empty table");

    eventually("the page to give the collector up", async || Ok(link(&visitor).await? == "lost")).await?;
    assert!(seen(&visitor, "#notice").await?.starts_with("The collector does not answer; "));
    assert_eq!(seen(&visitor, "#announcer").await?, "The collector does not answer");
    assert_eq!(seen(&visitor, "#loading").await?, "");

    drop(taken);
    let freed = tokio::time::Instant::now();
    eventually("the page to be live", async || Ok(link(&visitor).await? == "live")).await?;
    assert!(freed.elapsed() < SOON, "{:?}", freed.elapsed());
    assert_eq!(seen(&visitor, "#notice").await?, "");
    assert_eq!(visitor.ask::<usize>("document.querySelectorAll('.pool .facts').length").await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_asked_yet_is_neither_well_nor_broken() -> Result<()> {
    // It takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    let collector = alone(json!({
        "scrape": { "timeout": "30s" },
        "envoys": [{ "url": format!("http://{}", nobody().await?) }],
        "pools": [{ "cluster": "pool", "replicas": [{ "address": silent.local_addr()?.to_string() }] }],
    }))
    .await?;
    let visitor = visit(&collector).await?;
    eventually("the page to be live", async || Ok(link(&visitor).await? == "live")).await?;
    assert_eq!(column(&visitor, "state").await?, ["not asked yet"]);
    assert_eq!(seen(&visitor, ".envoys [data-f=state]").await?, "not asked yet");
    assert_eq!(seen(&visitor, "[data-f=summary]").await?, "0 of 1 replica ready, 1 not asked yet");
    assert_eq!(visitor.ask::<String>("document.title").await?, "Homing", "nothing is wrong");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_and_a_replica_that_never_answered_and_a_name_without_an_address_are_told_and_no_figure_is_made_up() -> Result<()>
{
    let (replica, envoy) = (nobody().await?, nobody().await?);
    let collector = alone(json!({
        "drain_file": "/nowhere/drained.yaml",
        "envoys": [{ "url": format!("http://{envoy}") }],
        "pools": [
            { "cluster": "lost", "replicas": [{ "address": replica.to_string() }] },
            { "cluster": "nameless", "dns": [{ "name": "replicas.invalid", "port": 8000 }] },
        ],
    }))
    .await?;
    let visitor = visit(&collector).await?;
    eventually("the name to be looked up", async || {
        Ok(!seen(&visitor, "#pools > :nth-child(2) [data-f=sources]").await?.is_empty())
    })
    .await?;
    eventually("the Envoy to be tried", async || Ok(seen(&visitor, ".envoys [data-f=state]").await? == "not connected")).await?;

    assert!(seen(&visitor, ".envoys .problem").await?.contains("is it running"));
    for column in ["version", "age", "since"] {
        assert_eq!(seen(&visitor, &format!(".envoys [data-f={column}]")).await?, "–", "{column}");
    }
    for name in ["affinity", "threshold", "margin", "sticky", "in-flight"] {
        assert_eq!(fact(&visitor, name).await?, "–", "{name}");
    }
    assert_eq!(fact(&visitor, "envoys").await?, "0");
    assert!(seen(&visitor, "[data-f=routing-note]").await?.starts_with("No Envoy is connected"));
    assert!(seen(&visitor, ".capacity [data-f=sum]").await?.starts_with("Not known"));

    assert_eq!(column(&visitor, "state").await?, ["down"]);
    assert!(column(&visitor, "problem").await?[0].contains("the connection was refused; is vLLM running"));
    for name in ["in_flight", "running", "waiting", "sticky", "placed", "other", "held", "kv", "hits", "age"] {
        assert_eq!(column(&visitor, name).await?, ["–"], "{name}");
    }

    let nameless = "#pools > :nth-child(2)";
    let none = seen(&visitor, &format!("{nameless} [data-f=no-replicas]")).await?;
    assert_eq!(none, "No replica of this pool was found. Until one is, Envoys keep those they know.");
    let source = seen(&visitor, &format!("{nameless} [data-f=sources]")).await?;
    assert!(source.starts_with("dns replicas.invalid:8000: ") && !source.contains("kept"), "{source}");
    assert!(seen(&visitor, "#drain-file").await?.starts_with("The drain file cannot be used: "));
    assert_eq!(visitor.ask::<String>("document.title").await?, "(4) Homing", "replica, Envoy, name and drain file");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_collectors_the_earlier_ones_page_says_standby_and_a_store_that_is_away_is_told() -> Result<()> {
    let stack = StackOptions { concurrency: 1, ..StackOptions::default() };
    let mut fleet =
        FleetStack::start(tools(), &FleetOptions { stack, envoys: 2, collectors: 2, redis: true, ..FleetOptions::default() })
            .await?;
    let page = |fleet: &FleetStack, index: usize| format!("http://{}", fleet.collectors[index].console);
    let store = format!("redis://{}/0", fleet.store().context("Redis")?);
    let visitor = Visitor::start(Screen::DESKTOP).await?;
    for (index, condition) in [(1, "connected"), (0, "standby")] {
        visitor.open(&page(&fleet, index)).await?;
        eventually("both Envoys", async || {
            let states: String =
                visitor.ask("[...document.querySelectorAll('.envoys [data-f=state]')].map((n) => n.textContent).join()").await?;
            Ok(states == format!("{condition},{condition}"))
        })
        .await?;
    }
    assert_eq!(seen(&visitor, ".envoys .problem").await?, "", "standing by is no problem");
    let homes = format!("0 homes of conversations known, kept in {store} too");
    eventually("the store", async || Ok(seen(&visitor, "#envoys [data-f=homes]").await? == homes)).await?;
    assert_eq!(seen(&visitor, "#envoys [data-f=store]").await?, "");
    assert_eq!(visitor.ask::<String>("document.title").await?, "Homing");

    fleet.redis.take().context("Redis")?.kill().await?;
    eventually("the store to be missed", async || {
        let told = seen(&visitor, "#envoys [data-f=store]").await?;
        Ok(told.starts_with(&format!("Homes are not kept in {store}: ")) && told.contains("does the server run"))
    })
    .await?;
    assert_eq!(visitor.ask::<String>("document.title").await?, "(1) Homing");
    fleet.start_redis().await?;
    eventually("it to be back", async || Ok(seen(&visitor, "#envoys [data-f=store]").await?.is_empty())).await?;
    fleet.collectors[1].process.take().context("the later collector")?.kill().await?;
    eventually("this one to work", async || Ok(seen(&visitor, ".envoys [data-f=state]").await? == "connected")).await?;
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_envoys_and_with_an_empty_list_the_page_says_what_to_do() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let list = dir.path().join("targets.json");
    std::fs::write(&list, "[]")?;
    let collector = alone(json!({ "pools": [{ "cluster": "empty", "files": [list] }] })).await?;
    let visitor = visit(&collector).await?;
    eventually("the list to be read", async || {
        Ok(seen(&visitor, "[data-f=no-replicas]").await?.starts_with("This pool has no replicas"))
    })
    .await?;
    assert!(seen(&visitor, "#envoys [data-f=none]").await?.contains("Name one under envoys"));
    assert_eq!(seen(&visitor, "#envoys table").await?, "");
    assert!(seen(&visitor, "[data-f=routing-note]").await?.starts_with("No Envoy is configured"));
    assert_eq!(visitor.ask::<String>("document.title").await?, "Homing");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_say_is_text_and_never_part_of_the_page() -> Result<()> {
    // A replica and an Envoy whose answers are markup, and a pool whose name is.
    let hostile = says("HTTP/1.1 500 <b>x</b>\r\ncontent-type: text/html\r\ncontent-length: 44\r\nconnection: close\r\n\r\n<img src=x onerror=document.title='taken'>  ").await?;
    let collector = alone(json!({
        "envoys": [{ "url": format!("http://{hostile}") }],
        "pools": [{ "cluster": "<img src=x onerror=\"document.title='taken'\">", "replicas": [{ "address": hostile.to_string() }] }],
    }))
    .await?;
    let visitor = visit(&collector).await?;
    eventually("the page to be live", async || Ok(link(&visitor).await? == "live")).await?;
    eventually("Envoy's answer to be told", async || Ok(!seen(&visitor, ".envoys [data-f=problem]").await?.is_empty())).await?;
    assert!(seen(&visitor, "h2").await?.contains("<img src=x"), "the name is shown as it is");
    assert_eq!(visitor.ask::<usize>("document.querySelectorAll('img[src=x], iframe, [onerror]').length").await?, 0);
    assert_ne!(visitor.ask::<String>("document.title").await?, "taken");
    Ok(())
}

/// A server that answers everything with these bytes.
async fn says(answer: &'static str) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                // What was asked does not matter; a client that left does not either.
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    Ok(address)
}
