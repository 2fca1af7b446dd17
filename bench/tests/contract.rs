//! The stand-in replica answers as vLLM did: each recorded exchange is sent again and the answers are compared.

use homing_bench::engine::EngineConfig;
use homing_bench::replica::{Replica, ReplicaConfig, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A recorded exchange, as testdata/README.md describes it.
struct Exchange {
    method: String,
    path: String,
    body: Option<String>,
    headers: Vec<(String, String)>,
    status: u16,
    answer_headers: BTreeSet<String>,
    content_type: Option<String>,
    answer: String,
}

impl Exchange {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/answers").join(format!("{name}.txt"));
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).replace("\r\n", "\n");
        let (request, response) = text.split_once("\n\n").unwrap();
        let (head, answer) = response.trim_start().split_once("\n\n").unwrap();
        let mut request = request.lines().map(|line| line.strip_prefix("> ").unwrap());
        let (method, path) = request.next().unwrap().split_once(' ').unwrap();
        let (arguments, body): (Vec<_>, Vec<_>) = request.partition(|line| line.starts_with("curl arg: "));
        let pair = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut head = head.lines();
        let status = head.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let answer_headers: Vec<_> = head.filter_map(pair).collect();
        Self {
            method: method.to_owned(),
            path: path.to_owned(),
            body: body.first().map(|body| (*body).to_owned()),
            headers: arguments.iter().filter_map(|line| pair(line.strip_prefix("curl arg: ")?)).collect(),
            status,
            content_type: answer_headers.iter().find(|(name, _)| name == "content-type").map(|(_, value)| value.clone()),
            answer_headers: answer_headers.into_iter().map(|(name, _)| name).collect(),
            answer: answer.trim_end().to_owned(),
        }
    }

    async fn send_again(&self, replica: &Replica) -> reqwest::Response {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut request = client.request(self.method.parse().unwrap(), format!("{}{}", replica.url(), self.path));
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        if let Some(body) = &self.body {
            request = request.header("content-type", "application/json").body(body.clone());
        }
        request.send().await.unwrap()
    }
}

/// JSON (or any text around it) with every string value and number blanked: what is left is the keys, their order, nulls and structure.
fn shape(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => {
                let mut escaped = false;
                let end = rest[1..].find(|c| {
                    let closes = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    closes
                });
                end.expect("a string that is closed") + 2
            }
            '0'..='9' => rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()),
            other => other.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        match first {
            '"' if !after.starts_with(':') => out.push_str("\"\""),
            '0'..='9' => out.push('0'),
            _ => out.push_str(token),
        }
        rest = after;
    }
    out
}

/// An answer's shape. vLLM's tokens are not the stand-in's, and some are no text on their own: how often an event of a stream comes again
/// in a row is left out.
fn stream_shape(text: &str) -> String {
    let shape = shape(text);
    let mut events: Vec<_> = shape.split("\n\n").collect();
    events.dedup();
    events.join("\n\n")
}

/// A server that was recorded, as testdata/README.md describes it.
#[derive(Clone, Copy, PartialEq)]
enum Server {
    V026,
    V026TwoRanks,
    V032,
}

impl Server {
    async fn stand_in(self) -> Replica {
        let block_size = if self == Self::V032 { 32 } else { 128 };
        let config = ReplicaConfig {
            model: "tiny".to_owned(),
            max_model_len: if self == Self::V032 { 2048 } else { 4096 },
            speed: 1000.0,
            engine: EngineConfig { block_size, ..EngineConfig::default() },
            version: if self == Self::V032 { Version::V0_32 } else { Version::V0_26 },
            ranks: if self == Self::V026TwoRanks { 2 } else { 1 },
            ..ReplicaConfig::default()
        };
        Replica::start(config).await.unwrap()
    }

    fn read(self, name: &str) -> Exchange {
        match self {
            Self::V026 => Exchange::read(name),
            Self::V026TwoRanks => Exchange::read(&format!("dp2-{name}")),
            Self::V032 => Exchange::read(&format!("0.32/{name}")),
        }
    }
}

/// Sends each exchange again, compares all but the body, and the body as `compare` does.
async fn answers_compare(server: Server, names: &[&str], compare: fn(&str) -> String) {
    for name in names {
        let exchange = server.read(name);
        let replica = server.stand_in().await;
        let response = exchange.send_again(&replica).await;
        assert_eq!(response.status().as_u16(), exchange.status, "{name}");
        let mut headers: BTreeSet<_> = response.headers().keys().map(ToString::to_string).collect();
        if server != Server::V026 {
            assert!(headers.remove("x-request-id"), "the stand-in names requests, whatever was recorded");
        }
        assert_eq!(headers, exchange.answer_headers, "{name}");
        assert_eq!(response.headers()["server"], "uvicorn", "{name}");
        let content_type = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(content_type, exchange.content_type, "{name}");
        let answer = response.text().await.unwrap();
        assert_eq!(compare(answer.trim_end()), compare(&exchange.answer), "{name}");
    }
}

#[tokio::test]
async fn answers_have_the_recorded_shape() {
    let names = [
        "chat-nonstream",
        "chat-stream",
        "chat-stream-nousage",
        "chat-stream-continuous",
        "chat-dprank-abc",
        "completions",
        "completions-ids",
        "completions-stream",
        "completions-stream-nousage",
        "responses-nonstream",
        "responses-stream",
        "responses-stream-dprank5",
        "responses-items",
        "messages-nonstream-cold",
        "messages-stream",
        "messages-stream-dprank5",
        "messages-count",
        "messages-400",
        "models",
    ];
    answers_compare(Server::V026, &names, stream_shape).await;
    answers_compare(Server::V026TwoRanks, &["responses-rank2"], stream_shape).await;
    let names = ["chat-stream", "messages-stream-cold", "responses-rank5", "responses-stream", "models"];
    answers_compare(Server::V032, &names, stream_shape).await;
}

#[tokio::test]
async fn errors_and_fixed_answers_are_the_recorded_ones_to_the_byte() {
    let names = [
        "404-path",
        "chat-400-badjson",
        "chat-400-toolong",
        "chat-400-toolongprompt",
        "chat-400-validation",
        "chat-404-model",
        "chat-405",
        "chat-dprank5-dp1",
        "completions-404-model",
        "completions-400-toolong",
        "completions-400-toolongprompt",
        "completions-400-notokens",
        "completions-dprank5",
        "completions-stream-dprank5",
        "responses-404-model",
        "responses-400-badjson",
        "responses-400-toolong",
        "responses-notokens",
        "tokenize-404-model",
        "messages-404",
        "messages-toolong",
        "messages-dprank5",
        "count-404",
        "health",
        "ping",
        "version",
    ];
    answers_compare(Server::V026, &names, str::to_owned).await;
    let names = ["chat-rank2", "chat-rank-1", "stream-rank2", "messages-rank2", "completions-rank2"];
    answers_compare(Server::V026TwoRanks, &names, str::to_owned).await;
    let names = ["chat-rank5", "chat-stream-rank5", "messages-404", "messages-rank5", "messages-toolong"];
    answers_compare(Server::V032, &names, str::to_owned).await;
}

#[tokio::test]
async fn token_counts_are_those_of_the_prompts() {
    // The tokens themselves are the stand-in's own.
    let blank_tokens = |text: &str| {
        let (before, rest) = text.split_once("\"tokens\":[").unwrap();
        stream_shape(&format!("{before}{}", rest.split_once(']').unwrap().1))
    };
    answers_compare(Server::V026, &["tokenize-prompt", "tokenize-messages"], blank_tokens).await;
}

#[tokio::test]
async fn a_stream_of_token_ids_has_them_all() {
    let (exchange, replica) = (Exchange::read("completions-ids-stream"), Server::V026.stand_in().await);
    let text = exchange.send_again(&replica).await.text().await.unwrap();
    assert_eq!(stream_shape(text.trim_end()), stream_shape(&exchange.answer));
    assert_eq!(text.matches("\"token_ids\":[").count(), 3);
    assert_eq!(text.matches("\"prompt_token_ids\":[5,6,7,8]").count(), 1);
}

#[tokio::test]
async fn a_clients_request_id_names_its_completion() {
    let (exchange, replica) = (Exchange::read("chat-nonstream"), Server::V026.stand_in().await);
    let response = exchange.send_again(&replica).await;
    assert_eq!(response.headers()["x-request-id"], "my-req-1");
    assert!(response.text().await.unwrap().contains(r#""id":"chatcmpl-my-req-1""#));
    let response = Exchange::read("completions-reqid").send_again(&replica).await;
    assert!(response.text().await.unwrap().contains(r#""id":"cmpl-my-req-2""#));
}

/// A line of the metrics text without its value, and without the values of labels that tell of one server alone.
fn series(line: &str) -> String {
    if line.starts_with('#') {
        return line.to_owned();
    }
    let name_and_labels = line.rsplit_once(' ').unwrap().0;
    match name_and_labels.split_once('{') {
        Some(("vllm:cache_config_info", labels)) => {
            let names: Vec<_> = labels.split("\",").map(|label| label.split('=').next().unwrap()).collect();
            format!("vllm:cache_config_info{{{}}}", names.join(","))
        }
        _ => name_and_labels.to_owned(),
    }
}

async fn metrics(replica: &Replica) -> String {
    let response = reqwest::get(format!("{}/metrics", replica.url())).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=1.0.0; charset=utf-8");
    response.text().await.unwrap()
}

#[tokio::test]
async fn metrics_have_the_recorded_names_types_help_and_labels_in_order() {
    for (server, recorded) in [
        (Server::V026, include_str!("../testdata/metrics-0.26.0.txt")),
        (Server::V032, include_str!("../testdata/metrics-0.32.0.txt")),
    ] {
        let text = metrics(&server.stand_in().await).await;
        let (ours, theirs): (Vec<_>, Vec<_>) = (text.lines().map(series).collect(), recorded.lines().map(series).collect());
        assert_eq!(ours, theirs);
    }
}

/// The lines of each family, in any order: with several ranks vLLM's is another.
fn families(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut families: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let mut family = String::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split(' ').next().unwrap().to_owned();
        }
        families.entry(family.clone()).or_default().insert(series(line));
    }
    families
}

#[tokio::test]
async fn two_ranks_have_the_recorded_series_and_their_gauges_once_they_have_stepped() {
    let replica = Server::V026TwoRanks.stand_in().await;
    assert_eq!(families(&metrics(&replica).await), families(include_str!("../testdata/metrics-0.26.0-dp2-start.txt")));
    for rank in ["0", "1"] {
        let request = reqwest::Client::new().post(format!("{}/v1/completions", replica.url()));
        let answer = request.header("x-data-parallel-rank", rank).body(r#"{"prompt":"hello"}"#).send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
    assert_eq!(families(&metrics(&replica).await), families(include_str!("../testdata/metrics-0.26.0-dp2.txt")));
}
