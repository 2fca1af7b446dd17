//! The Grafana dashboard and the alert rules name only metrics and labels that a running stack has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, ensure};
use homing_routing::outcome::Outcome;
use homing_tests::{eventually, fast_stack, tools, turn};
use promql_parser::label::MatchOp;
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};
use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::process::Process;
use xtask::stack::{MODEL, Stack, StackOptions};
use xtask::tools::root;
use xtask::vllm::free_addresses;

/// The series that all exporters have: for each name, what each label's values are.
type Exported = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// A collector beside the stack's, for the series that only one with sources and a store has. None of them can be used.
struct Lonely {
    metrics: String,
    _process: Process,
    _folder: TempDir,
}

impl Lonely {
    async fn start() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("homing-lonely-").tempdir()?;
        let [store] = *free_addresses(1)? else { anyhow::bail!("a port") };
        let config = json!({
            "listen": "127.0.0.1:0",
            "envoys": [{ "dns": { "name": "nowhere.invalid", "port": 9901 } }],
            "pools": [{ "cluster": MODEL, "files": [folder.path().join("none.yaml")] }],
            "affinity": { "store": format!("redis://{store}") },
        });
        let file = folder.path().join("collector.yaml");
        fs::write(&file, config.to_string())?;
        let args = ["run".to_owned(), file.display().to_string(), "--ready-json".to_owned()];
        let (process, ready) = Process::start_ready("lonely", &tools().collector, &args, folder.path()).await?;
        let metrics = format!("http://{}/metrics", ready["address"].as_str().context("an address")?);
        Ok(Self { metrics, _process: process, _folder: folder })
    }
}

async fn exported(stack: &Stack, lonely: &Lonely) -> Result<Exported> {
    let (_, console) = stack.collector.as_ref().context("the collector")?;
    let envoy = format!("http://{}/stats/prometheus?filter=homing", stack.envoy.admin);
    let mut exported = Exported::new();
    for url in [envoy, format!("http://{console}/metrics"), lonely.metrics.clone()] {
        let text = reqwest::get(&url).await?.text().await?;
        for line in text.lines().filter(|line| line.starts_with("homing")) {
            let series = line.rsplit_once(' ').context("a value")?.0;
            // An exporter's series is an expression of its own.
            let Expr::VectorSelector(series) = parse(series)? else { continue };
            let labels = exported.entry(name(&series)?).or_default();
            // Prometheus adds it, to tell where it read the series.
            labels.entry("instance".to_owned()).or_default().insert(url.clone());
            for label in &series.matchers.matchers {
                labels.entry(label.name.clone()).or_default().insert(label.value.clone());
            }
        }
    }
    Ok(exported)
}

fn parse(text: &str) -> Result<Expr> {
    parser::parse(text).map_err(|error| anyhow::anyhow!("{text}: {error}"))
}

fn name(selector: &VectorSelector) -> Result<String> {
    selector.name.clone().context("a selector without a metric's name")
}

/// Checks every metric and label of an expression, and returns the labels that its result may have.
fn check(expr: &Expr, exported: &Exported) -> Result<BTreeSet<String>> {
    Ok(match expr {
        Expr::VectorSelector(selector) => check_selector(selector, exported)?,
        Expr::MatrixSelector(matrix) => check_selector(&matrix.vs, exported)?,
        Expr::Aggregate(aggregate) => {
            let inner = check(&aggregate.expr, exported)?;
            match &aggregate.modifier {
                Some(LabelModifier::Include(by)) => {
                    for label in &by.labels {
                        ensure!(inner.contains(label), "it sums by `{label}`, which is none of {inner:?}");
                    }
                    by.labels.iter().cloned().collect()
                }
                Some(LabelModifier::Exclude(without)) => {
                    inner.into_iter().filter(|label| !without.labels.contains(label)).collect()
                }
                None => BTreeSet::new(),
            }
        }
        Expr::Binary(binary) => {
            let (left, right) = (check(&binary.lhs, exported)?, check(&binary.rhs, exported)?);
            if let Some(LabelModifier::Include(on)) = binary.modifier.as_ref().and_then(|modifier| modifier.matching.as_ref()) {
                for label in &on.labels {
                    ensure!(left.contains(label) && right.contains(label), "it matches on `{label}`, which one side does not have");
                }
            }
            left
        }
        Expr::Call(call) => {
            let mut labels = BTreeSet::new();
            for argument in &call.args.args {
                labels.extend(check(argument, exported)?);
            }
            // Where there is nothing, there is nothing that has labels.
            if call.func.name == "absent" { BTreeSet::new() } else { labels }
        }
        Expr::Paren(inner) => check(&inner.expr, exported)?,
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) => BTreeSet::new(),
        other => anyhow::bail!("this test does not know {other:?}"),
    })
}

fn check_selector(selector: &VectorSelector, exported: &Exported) -> Result<BTreeSet<String>> {
    let name = name(selector)?;
    let labels = exported.get(&name).with_context(|| format!("no metric is called `{name}`"))?;
    for matcher in &selector.matchers.matchers {
        let values = labels.get(&matcher.name).with_context(|| format!("`{name}` has no label `{}`", matcher.name))?;
        // An outcome that did not happen has no series yet.
        let may_be = |value: &str| matcher.name == "outcome" && Outcome::ALL.iter().any(|outcome| outcome.as_str() == value);
        if matcher.op == MatchOp::Equal {
            let there = values.contains(&matcher.value) || may_be(&matcher.value);
            ensure!(there, "`{name}` has no series with {}={}", matcher.name, matcher.value);
        }
    }
    Ok(labels.keys().cloned().collect())
}

/// Grafana's own variables, in place of which stands what they may be.
fn without_variables(expr: &str) -> String {
    expr.replace("$__rate_interval", "1m").replace("$pool", ".*")
}

fn dashboard() -> Result<Value> {
    Ok(serde_json::from_slice(&fs::read(root().join("envoy/grafana/homing.json"))?)?)
}

fn alerts() -> Result<Vec<Value>> {
    let text = fs::read_to_string(root().join("envoy/prometheus/alerts.yaml"))?;
    let rules: Value = serde_saphyr::from_str(&text)?;
    rules["groups"][0]["rules"].as_array().cloned().context("rules")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_expression_names_metrics_and_labels_that_a_stack_under_load_has() -> Result<()> {
    let pool = json!({ "admission": { "mode": "working_set" } });
    let stack = fast_stack(StackOptions { pool, ..StackOptions::default() }).await?;
    let lonely = Lonely::start().await?;
    for _ in 0..2 {
        for conversation in 0..6 {
            turn(&stack, &format!("dashboard-{conversation}"), 4).await?;
        }
    }
    // A refused exchange, so that there is an error to count.
    reqwest::Client::new().post(format!("http://{}/homing/v1/sync", stack.control)).body("{}").send().await?;
    eventually("every engine to report", async || {
        let exported = exported(&stack, &lonely).await?;
        Ok(exported.contains_key("homing_collector_replica_prefix_hit_rate") && exported.contains_key("homing_errors_total"))
    })
    .await?;
    let exported = exported(&stack, &lonely).await?;

    let dashboard = dashboard()?;
    let mut checked = 0;
    for panel in dashboard["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().context("targets")? {
            let (title, expr) = (&panel["title"], target["expr"].as_str().context("an expression")?);
            let labels = check(&parse(&without_variables(expr))?, &exported).with_context(|| format!("panel {title}: {expr}"))?;
            for label in shown_labels(target["legendFormat"].as_str().unwrap_or_default()) {
                ensure!(labels.contains(&label), "panel {title}: its legend shows `{label}`, which is none of {labels:?}");
            }
            checked += 1;
        }
    }
    for rule in alerts()? {
        let (alert, expr) = (&rule["alert"], rule["expr"].as_str().context("an expression")?);
        let labels = check(&parse(expr)?, &exported).with_context(|| format!("alert {alert}: {expr}"))?;
        let summary = rule["annotations"]["summary"].as_str().context("a summary")?;
        for label in shown_labels(&summary.replace("$labels.", "")).into_iter().filter(|label| label != "$value") {
            ensure!(labels.contains(&label), "alert {alert}: its summary shows `{label}`, which is none of {labels:?}");
        }
        checked += 1;
    }
    assert!(checked > 20, "{checked} expressions");
    Ok(())
}

#[test]
fn operations_says_what_to_do_about_every_alert() -> Result<()> {
    let page = fs::read_to_string(root().join("docs/operations.md"))?;
    let (_, section) = page.split_once("## Alerts\n").context("a section on alerts")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let explained: BTreeSet<_> = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let alerts = alerts()?;
    let there: BTreeSet<_> = alerts.iter().filter_map(|rule| rule["alert"].as_str()).collect();
    assert_eq!(explained, there);
    Ok(())
}

/// The labels between double braces.
fn shown_labels(text: &str) -> Vec<String> {
    text.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0.trim().to_owned())).collect()
}

#[test]
fn a_metric_or_label_that_does_not_exist_is_found() {
    let labels = BTreeMap::from([("pool".to_owned(), BTreeSet::from(["a".to_owned()]))]);
    let exported = Exported::from([("known".to_owned(), labels)]);
    let checked = |text: &str| check(&parse(text).expect("an expression"), &exported).map_err(|error| error.to_string());
    assert!(checked("sum by (pool) (rate(known{pool=\"a\"}[1m])) / 2").is_ok());
    // Nothing is left to show of what is absent.
    assert_eq!(checked("absent(known)"), Ok(BTreeSet::new()));
    for (wrong, why) in [
        ("sum(unknown)", "no metric is called `unknown`"),
        ("absent(unknown)", "no metric is called `unknown`"),
        ("known{replica=\"x\"}", "no label `replica`"),
        ("known{pool=\"b\"}", "no series with pool=b"),
        ("sum by (replica) (known)", "sums by `replica`"),
        ("known and on (replica) known", "matches on `replica`"),
    ] {
        assert!(checked(wrong).is_err_and(|error| error.contains(why)), "{wrong}");
    }
}
