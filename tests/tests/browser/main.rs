//! The console in a headless Chromium, against a running stack.

mod admission;
mod restarts;
mod states;

use std::time::Duration;

use anyhow::{Context, Result};
use homing_tests::browser::{Key, Screen, Visitor};
use homing_tests::{all_given_back, chat_body, chat_url, eventually, fast_stack, stack_at_speed, turn};
use serde_json::{Value, json};
use tokio::time::Instant;
use xtask::stack::{MODEL, Stack, StackOptions};

/// How soon the page must show that a replica or the collector is gone.
const SOON: Duration = Duration::from_secs(3);

fn console(stack: &Stack) -> Result<String> {
    let (_, address) = stack.collector.as_ref().context("the collector")?;
    Ok(format!("http://{address}"))
}

async fn pool(stack: &Stack) -> Result<Value> {
    Ok(reqwest::get(format!("{}/api/v1/pools/{MODEL}", console(stack)?)).await?.json().await?)
}

/// A stack, and its console opened and live.
async fn opened(screen: Screen, stack: &Stack) -> Result<Visitor> {
    let visitor = Visitor::start(screen).await?;
    visitor.open(&console(stack)?).await?;
    eventually("the page to be live", async || visitor.ask("document.body.dataset.link === 'live'").await).await?;
    Ok(visitor)
}

/// The text of a fact of the routing card.
async fn fact(visitor: &Visitor, name: &str) -> Result<String> {
    visitor.ask(&format!("document.querySelector('[data-fact={name}] dd').textContent")).await
}

/// The text of a column in every row of the table of replicas.
async fn column(visitor: &Visitor, name: &str) -> Result<Vec<String>> {
    visitor.ask(&format!("[...document.querySelectorAll('.replicas tbody [data-f={name}]')].map((cell) => cell.textContent)")).await
}

fn texts(pool: &Value, pointer: &str) -> Vec<String> {
    let replicas = pool["replicas"].as_array().into_iter().flatten();
    replicas.map(|replica| replica.pointer(pointer).map(ToString::to_string).unwrap_or_default()).collect()
}

/// A share of every replica, as the page writes it.
fn percents(pool: &Value, pointer: &str) -> Vec<String> {
    let share = |replica: &Value| replica.pointer(pointer).and_then(Value::as_f64);
    let replicas = pool["replicas"].as_array().into_iter().flatten();
    replicas.map(|replica| share(replica).map_or("–".to_owned(), |share| format!("{:.0} %", (share * 100.0).round()))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_card_and_the_rows_say_what_the_api_says_and_move_under_load() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    assert_eq!(fact(&visitor, "sticky").await?, "–", "before the first request nothing is made up");
    assert_eq!(visitor.ask::<String>("document.querySelector('h2').textContent").await?, MODEL);
    let note: String = visitor.ask("document.querySelector('[data-f=routing-note]').textContent").await?;
    assert_eq!(note, "No request has ended yet.");

    for round in 0..3 {
        for conversation in 0..8 {
            turn(&stack, &format!("seen-{conversation}"), 4 + round).await?;
        }
    }
    let pinned = reqwest::Client::new().post(chat_url(&stack)).header("x-homing-replica", stack.replicas[2].1.to_string());
    pinned.json(&chat_body("pinned", 4)).send().await?.error_for_status()?.bytes().await?;
    all_given_back(&stack).await?;
    eventually("the page to show what the API says", async || {
        let pool = pool(&stack).await?;
        let routing = &pool["routing"];
        let share = routing["sticky_share"].as_f64().map(|share| format!("{:.0} %", share * 100.0));
        Ok(routing["requests"]["sticky"] == 16
            && routing["requests"]["pinned"] == 1
            && Some(fact(&visitor, "sticky").await?) == share
            && fact(&visitor, "affinity").await? == "On"
            && fact(&visitor, "threshold").await? == "8"
            && fact(&visitor, "margin").await? == "8"
            && fact(&visitor, "in-flight").await?.parse().ok() == routing["in_flight"].as_u64()
            && fact(&visitor, "envoys").await? == "1"
            && column(&visitor, "sticky").await? == texts(&pool, "/requests/sticky")
            && column(&visitor, "spilled").await? == texts(&pool, "/requests/spilled")
            && column(&visitor, "pinned").await? == texts(&pool, "/requests/pinned")
            && column(&visitor, "placed").await? == texts(&pool, "/requests/placed")
            && column(&visitor, "rehomed").await? == texts(&pool, "/requests/rehomed")
            && column(&visitor, "in_flight").await? == texts(&pool, "/in_flight")
            && column(&visitor, "running").await? == texts(&pool, "/running")
            && column(&visitor, "waiting").await? == texts(&pool, "/waiting")
            && column(&visitor, "kv").await? == percents(&pool, "/kv_usage")
            && column(&visitor, "hits").await? == percents(&pool, "/prefix_hit_rate")
            && column(&visitor, "held").await? == texts(&pool, "/held_conversations")
            && column(&visitor, "name").await?.iter().map(|name| json!(name).to_string()).eq(texts(&pool, "/replica")))
    })
    .await?;
    eventually("the last hour's cached share", async || {
        // What comes before the collector's first step is in none.
        turn(&stack, "seen-0", 4).await?;
        let share = pool(&stack).await?["hour"]["cached_share"].as_f64().map(|share| format!("{:.0} %", share * 100.0));
        Ok(share.is_some() && Some(visitor.ask::<String>("document.querySelector('[data-f=share]').textContent").await?) == share)
    })
    .await?;
    let titles: Vec<String> =
        visitor.ask("[...document.querySelectorAll('figcaption .title')].map((title) => title.textContent)").await?;
    assert_eq!(titles, ["Prompt tokens per second", "Generated tokens per second", "Prefix hit rate", "In flight by replica"]);
    let prompt: String = visitor.ask("document.querySelector('[role=slider]').getAttribute('aria-valuetext')").await?;
    assert!(prompt.contains("cached") && prompt.contains("computed"), "{prompt}");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_flight_is_shown_while_it_is() -> Result<()> {
    let stack = std::sync::Arc::new(stack_at_speed(StackOptions::default(), 10.0).await?);
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    assert_eq!(fact(&visitor, "in-flight").await?, "0");
    let long = {
        let stack = stack.clone();
        tokio::spawn(async move { turn(&stack, "long", 1500).await })
    };
    eventually("one in flight", async || {
        let rows = column(&visitor, "in_flight").await?;
        Ok(fact(&visitor, "in-flight").await? == "1" && rows.iter().filter(|count| *count == "1").count() == 1)
    })
    .await?;
    long.await??;
    eventually("none in flight", async || Ok(fact(&visitor, "in-flight").await? == "0")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_killed_and_then_the_collector_are_seen_to_be_gone_within_three_seconds_and_so_is_its_return()
-> Result<()> {
    let mut stack = fast_stack(StackOptions::default()).await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    stack.replicas[1].0.kill().await?;
    let killed = Instant::now();
    eventually("the row to be down", async || Ok(column(&visitor, "state").await? == ["ready", "down", "ready", "ready"])).await?;
    assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
    assert!(column(&visitor, "problem").await?[1].contains("refused"));
    assert_eq!(visitor.ask::<String>("document.title").await?, "(1) Homing");
    let announced: String = visitor.ask("document.getElementById('announcer').textContent").await?;
    assert!(announced.ends_with("is down"), "it is read out: {announced}");
    eventually("the figures to be marked as old", async || {
        visitor.ask("document.querySelectorAll('.replicas tbody tr')[1].hasAttribute('data-old')").await
    })
    .await?;

    assert_eq!(visitor.complaints(), Vec::<String>::new());
    stack.collector.as_mut().context("the collector")?.0.kill().await?;
    let killed = Instant::now();
    eventually("the page to be stale", async || visitor.ask("document.body.dataset.link === 'stale'").await).await?;
    // The last state may be as good as new when the collector ends.
    assert!(killed.elapsed() < SOON + Duration::from_secs(1), "{:?}", killed.elapsed());
    let notice: String = visitor.ask("document.getElementById('notice').textContent").await?;
    assert!(notice.starts_with("Nothing from the collector for"), "{notice}");

    stack.revive_collector().await?;
    let back = Instant::now();
    eventually("the page to be live", async || visitor.ask("document.body.dataset.link === 'live'").await).await?;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    eventually("the charts to begin anew, as the collector's history does", async || {
        visitor.ask("document.querySelector('.nothing:not([hidden])')?.textContent.startsWith('No figures yet') ?? false").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_has_a_name_and_is_reached_by_keyboard() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    turn(&stack, "one", 4).await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    eventually("the charts", async || visitor.ask("document.querySelectorAll('[role=slider][aria-valuetext]').length === 4").await)
        .await?;

    let nodes = visitor.accessibility().await?;
    let text = |value: &Option<chromiumoxide::cdp::browser_protocol::accessibility::AxValue>| -> String {
        value.as_ref().and_then(|value| value.value.as_ref()?.as_str()).unwrap_or_default().to_owned()
    };
    let seen: Vec<(String, String)> =
        nodes.iter().filter(|node| !node.ignored).map(|node| (text(&node.role), text(&node.name))).collect();
    let names = |role: &str| -> Vec<&str> {
        let mut names: Vec<_> = seen.iter().filter(|(own, _)| own == role).map(|(_, name)| name.as_str()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names("main").len(), 1);
    assert_eq!(names("banner").len(), 1);
    assert_eq!(names("region"), ["Envoys", MODEL], "each section is a landmark with its title as name");
    assert_eq!(names("table"), ["Envoys that get snapshots from this collector", &format!("Replicas of {MODEL}")]);
    assert!(names("columnheader").iter().any(|name| name.contains("Spilled here")), "{:?}", names("columnheader"));
    assert_eq!(names("rowheader").len(), 5);
    assert_eq!(names("meter"), ["Context of recent conversations against the cache"]);
    assert_eq!(names("slider").len(), 4);
    for (role, name) in &seen {
        let needs_name = ["link", "button", "slider", "table", "columnheader", "rowheader", "meter", "region", "heading"];
        assert!(!needs_name.contains(&role.as_str()) || !name.trim().is_empty(), "a {role} without a name");
    }

    let mut reached = Vec::new();
    // The link to the content, four charts, and two links at the end.
    for _ in 0..7 {
        visitor.press(Key::Tab).await?;
        let at: (String, bool) = visitor
            .ask(
                "[`${document.activeElement.tagName} ${document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()}`.slice(0, 60), \
                 getComputedStyle(document.activeElement).outlineStyle !== 'none']",
            )
            .await?;
        assert!(at.1, "focus is not seen on {}", at.0);
        reached.push(at.0);
    }
    assert_eq!(reached[0], "A Skip to the pools");
    for wanted in ["Prompt tokens per second, by time", "In flight by replica, by time", "API", "Metrics"] {
        assert!(reached.iter().any(|name| name.contains(wanted)), "{wanted} is not in {reached:?}");
    }

    visitor.ask::<bool>("document.querySelector('[role=slider]').focus(), true").await?;
    let value = "document.querySelector('[role=slider]').getAttribute('aria-valuetext')";
    assert!(visitor.ask::<String>(value).await?.starts_with("now: cached"));
    visitor.press(Key::Left).await?;
    assert!(!visitor.ask::<String>(value).await?.starts_with("now"), "the arrow moves the reading to another moment");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_scrolls_sideways_and_colours_follow_the_preference() -> Result<()> {
    let stack = fast_stack(StackOptions::default()).await?;
    let visitor = opened(Screen::PHONE, &stack).await?;
    let ground = "getComputedStyle(document.body).backgroundColor";
    let mut grounds = Vec::new();
    for screen in [
        Screen { width: 320, ..Screen::PHONE },
        Screen::PHONE,
        Screen::PHONE.dark(),
        Screen { width: 768, ..Screen::DESKTOP },
        Screen::DESKTOP,
    ] {
        visitor.set_screen(screen).await?;
        eventually(&format!("{screen:?} to be as wide as what it shows"), async || {
            visitor.ask("document.documentElement.scrollWidth <= innerWidth").await
        })
        .await?;
        grounds.push(visitor.ask::<String>(ground).await?);
    }
    assert_eq!(grounds[0], grounds[1]);
    assert_ne!(grounds[1], grounds[2], "dark is not light");
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    Ok(())
}
