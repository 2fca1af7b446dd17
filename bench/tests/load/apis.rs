//! Both APIs, and how a request names its conversation.

use super::fakes::{config, replica};
use homing_bench::load::{self, Api, HeaderStyle, LoadConfig};
use homing_bench::replica::Received;
use homing_bench::workload::{Kind, SessionShape, Workload};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[tokio::test]
async fn both_apis_see_the_same_engine() {
    let mut hits = Vec::new();
    for api in [Api::Openai, Api::Anthropic] {
        let replica = replica().await;
        let report = load::run(LoadConfig { sessions: 1, api, ..config(&replica) }).await.unwrap();
        assert!(report.errors.is_empty(), "{report:?}");
        assert!(report.sessions_completed > 0, "{report:?}");
        // Output is counted by the engine, or else by the text that came; both are right here.
        let tokens = report.output_tokens_per_minute / 60.0 * report.duration_s;
        assert!((tokens / report.turns as f64 - 256.0).abs() < 1e-6, "{report:?}");
        hits.push(report.prefix_hits.unwrap());
    }
    assert!((hits[0] - hits[1]).abs() < 4.0, "{hits:?}");
}

/// The requests of a short run with subagents, each as its headers.
async fn sent(api: Api, header_style: HeaderStyle) -> Vec<BTreeMap<String, String>> {
    let replica = replica().await;
    let workload = match header_style {
        HeaderStyle::UserId => {
            Workload::new(Kind::Reference(SessionShape { first_tokens: 10, turns: 2, max_tokens: 2, ..SessionShape::default() }), 1)
        }
        _ => Workload::new(Kind::Subagents, 1),
    };
    let duration = Duration::from_millis(800);
    let report = load::run(LoadConfig { sessions: 1, api, header_style, workload, duration, ..config(&replica) }).await.unwrap();
    assert!(report.errors.is_empty(), "{report:?}");
    let received: Vec<Received> = reqwest::get(format!("{}/debug/requests", replica.url())).await.unwrap().json().await.unwrap();
    let path = if api == Api::Openai { "/v1/chat/completions" } else { "/v1/messages" };
    assert!(received.iter().all(|request| request.path == path));
    received.into_iter().map(|request| request.headers.into_iter().collect()).collect()
}

fn values<'a>(requests: &'a [BTreeMap<String, String>], header: &str) -> BTreeSet<&'a str> {
    requests.iter().filter_map(|headers| headers.get(header).map(String::as_str)).collect()
}

#[tokio::test]
async fn a_subagent_names_its_parent() {
    let requests = sent(Api::Openai, HeaderStyle::XSessionId).await;
    let (sessions, parents) = (values(&requests, "x-session-id"), values(&requests, "x-parent-session-id"));
    assert!(!parents.is_empty() && parents.is_subset(&sessions), "{parents:?} {sessions:?}");
    assert!(requests.iter().all(|headers| headers.contains_key("x-session-id")));
}

#[tokio::test]
async fn claude_codes_subagents_share_the_session_and_have_an_agent_id() {
    let requests = sent(Api::Anthropic, HeaderStyle::ClaudeCode).await;
    let (sessions, agents) = (values(&requests, "x-claude-code-session-id"), values(&requests, "x-claude-code-agent-id"));
    assert!(!agents.is_empty() && agents.is_disjoint(&sessions), "{agents:?} {sessions:?}");
    assert!(requests.iter().all(|headers| headers.contains_key("x-claude-code-session-id")));
}

#[tokio::test]
async fn a_name_in_the_body_or_none_is_in_no_header() {
    for (api, style) in [(Api::Anthropic, HeaderStyle::UserId), (Api::Openai, HeaderStyle::None)] {
        let requests = sent(api, style).await;
        assert!(!requests.is_empty());
        assert!(requests.iter().flat_map(BTreeMap::keys).all(|name| !name.contains("session") && !name.contains("agent-id")));
    }
}

#[tokio::test]
async fn a_user_id_on_openais_api_is_refused() {
    let replica = replica().await;
    let error = load::run(LoadConfig { header_style: HeaderStyle::UserId, ..config(&replica) }).await.unwrap_err();
    assert!(error.to_string().contains("--api anthropic"), "{error:#}");
}
