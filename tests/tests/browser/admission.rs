//! The page of a pool that admits by working set.

use anyhow::Result;
use homing_tests::browser::Screen;
use homing_tests::scripted::{ask, held, occupy};
use homing_tests::{all_given_back, chat_url, eventually, stack_at_speed};
use serde_json::json;
use xtask::stack::StackOptions;

use crate::{column, fact, opened, pool};

#[tokio::test(flavor = "multi_thread")]
async fn the_card_shows_who_is_held_for_how_long_and_why_and_each_row_what_is_active_and_where_admission_is_off_nothing_of_it()
-> Result<()> {
    let replica_args = ["--kv-tokens", "5000"].map(str::to_owned).into();
    let mut stack = stack_at_speed(StackOptions { replicas: 1, replica_args, ..StackOptions::default() }, 1.0).await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    let parts = "[...document.querySelectorAll('[data-fact=held-back], [data-fact=longest-held], [data-fact=active], \
                 [data-f=active-head], [data-f=active-cell]')]";
    eventually("the row", async || Ok(column(&visitor, "state").await? == ["ready"])).await?;
    assert_eq!(visitor.ask::<usize>(&format!("{parts}.length")).await?, 5);
    assert!(!visitor.ask::<bool>(&format!("{parts}.some((part) => part.checkVisibility())")).await?);

    stack
        .restart_envoy(json!({ "admission": { "mode": "working_set" }, "conversation": { "body": false, "fingerprint": false } }))
        .await?;
    let visitor = opened(Screen::DESKTOP, &stack).await?;
    eventually("all of it to be shown", async || visitor.ask(&format!("{parts}.every((part) => part.checkVisibility())")).await)
        .await?;
    assert_eq!((fact(&visitor, "held-back").await?.as_str(), fact(&visitor, "longest-held").await?.as_str()), ("0", "–"));

    let first = occupy(&stack).await?;
    let second = tokio::spawn(ask(chat_url(&stack), "second".to_owned(), None, 3_000));
    held(&stack, 1).await?;
    let note = |name: &str| format!("document.querySelector('[data-fact={name}] .below').textContent");
    eventually("one held, and why", async || {
        Ok(fact(&visitor, "held-back").await? == "1" && visitor.ask::<String>(&note("held-back")).await? == "1 no room")
    })
    .await?;
    let age = fact(&visitor, "longest-held").await?;
    assert!(age.ends_with(" s"), "{age}");
    eventually("its age to rise", async || Ok(fact(&visitor, "longest-held").await? != age)).await?;

    let admission = pool(&stack).await?["admission"].clone();
    let usage = admission["usage"].as_f64().unwrap_or(0.0);
    let percent = format!("{:.0} %", (usage * 100.0).round());
    assert_eq!(fact(&visitor, "active").await?, percent);
    assert_eq!(visitor.ask::<String>(&note("active")).await?, "1 conversation, of 5.0k tokens");
    let row = column(&visitor, "active").await?;
    assert!(row[0].starts_with(&percent) && row[0].ends_with("of 5.0k"), "{row:?}");
    let bar: String = visitor.ask("document.querySelector('[data-f=active-bar] i').style.width").await?;
    let width: f64 = bar.trim_end_matches('%').parse()?;
    assert!((width / 100.0 - usage).abs() < 0.001, "{bar} for {usage}");
    for width in [320, 768, 1000, Screen::DESKTOP.width] {
        visitor.set_screen(Screen { width, ..Screen::DESKTOP }).await?;
        eventually("all of it to fit the screen", async || visitor.ask("document.documentElement.scrollWidth <= innerWidth").await)
            .await?;
    }

    first.abort();
    assert_eq!(second.await??.status, 200);
    eventually("nobody to be held", async || {
        Ok(fact(&visitor, "held-back").await? == "0" && fact(&visitor, "longest-held").await? == "–")
    })
    .await?;
    assert_eq!(visitor.complaints(), Vec::<String>::new());
    all_given_back(&stack).await
}
