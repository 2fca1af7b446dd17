//! The stand-in replica answers as vLLM did: each recorded exchange is sent again and the answers are compared.

use homing_bench::engine::EngineConfig;
use homing_bench::replica::{Replica, ReplicaConfig};
use std::collections::BTreeSet;
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

/// The server that was recorded.
async fn replica() -> Replica {
    let engine = EngineConfig { block_size: 128, ..EngineConfig::default() };
    let config = ReplicaConfig { model: "tiny".to_owned(), max_model_len: 4096, speed: 1000.0, engine, ..ReplicaConfig::default() };
    Replica::start(config).await.unwrap()
}

/// Sends it again and compares all but the body, which is returned.
async fn answer(name: &str, exchange: &Exchange) -> String {
    let replica = replica().await;
    let response = exchange.send_again(&replica).await;
    assert_eq!(response.status().as_u16(), exchange.status, "{name}");
    let headers: BTreeSet<_> = response.headers().keys().map(ToString::to_string).collect();
    assert_eq!(headers, exchange.answer_headers, "{name}");
    assert_eq!(response.headers()["server"], "uvicorn", "{name}");
    let content_type = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
    assert_eq!(content_type, exchange.content_type, "{name}");
    response.text().await.unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn answers_have_the_recorded_shape() {
    for name in [
        "chat-nonstream",
        "chat-stream",
        "chat-stream-nousage",
        "chat-stream-continuous",
        "messages-nonstream-cold",
        "messages-stream",
        "messages-count",
        "messages-400",
        "models",
    ] {
        let exchange = Exchange::read(name);
        assert_eq!(shape(&answer(name, &exchange).await), shape(&exchange.answer), "{name}");
    }
}

#[tokio::test]
async fn errors_and_fixed_answers_are_the_recorded_ones_to_the_byte() {
    for name in [
        "404-path",
        "chat-400-badjson",
        "chat-400-toolong",
        "chat-400-toolongprompt",
        "chat-400-validation",
        "chat-404-model",
        "chat-405",
        "chat-dprank5-dp1",
        "messages-404",
        "messages-toolong",
        "health",
        "ping",
        "version",
    ] {
        let exchange = Exchange::read(name);
        assert_eq!(answer(name, &exchange).await, exchange.answer, "{name}");
    }
}

#[tokio::test]
async fn a_clients_request_id_names_its_completion() {
    let (exchange, replica) = (Exchange::read("chat-nonstream"), replica().await);
    let response = exchange.send_again(&replica).await;
    assert_eq!(response.headers()["x-request-id"], "my-req-1");
    assert!(response.text().await.unwrap().contains(r#""id":"chatcmpl-my-req-1""#));
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

#[tokio::test]
async fn metrics_have_the_recorded_names_types_help_and_labels_in_order() {
    let replica = replica().await;
    let response = reqwest::get(format!("{}/metrics", replica.url())).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=1.0.0; charset=utf-8");
    let text = response.text().await.unwrap();
    let recorded = include_str!("../testdata/metrics.txt");
    let (ours, theirs): (Vec<_>, Vec<_>) = (text.lines().map(series).collect(), recorded.lines().map(series).collect());
    assert_eq!(ours, theirs);
}
