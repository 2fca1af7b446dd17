//! Several models behind one address: the body's model chooses the route, and with it the pool.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use homing_tests::{Turn, eventually, received, tools};
use reqwest::{Body, Client, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use xtask::envoy::{Envoy, EnvoyConfig};
use xtask::process::Process;
use xtask::tools::root;

use crate::bodies::{chunked, hex, large_body};

const MODELS: [&str; 2] = ["qwen3-4b", "qwen3-coder"];

/// `envoy/models.yaml` in front of two stand-ins a model.
struct Models {
    envoy: Envoy,
    replicas: [Vec<(Process, SocketAddr)>; 2],
    client: Client,
    _dir: TempDir,
}

impl Models {
    async fn start() -> Result<Self> {
        Self::start_reading(32 << 20).await
    }

    /// Starts it with a model filter that reads bodies up to this size.
    async fn start_reading(max_body_bytes: u32) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("homing-").tempdir()?;
        let mut config = EnvoyConfig::read(&root().join("envoy/models.yaml"))?;
        config.use_free_ports();
        config.set_filter(&tools().filter);
        config.filter_config("model").context("the model filter")?["max_body_bytes"] = json!(max_body_bytes);
        let mut replicas = [Vec::new(), Vec::new()];
        for (index, (model, own)) in MODELS.iter().zip(&mut replicas).enumerate() {
            for number in 1..=2 {
                let args = ["replica", "--ready-json", "--listen", "127.0.0.1:0", "--speed", "100", "--model", model];
                let name = format!("{model}-{number}");
                let (process, ready) = Process::start_ready(&name, &tools().bench, &args.map(str::to_owned), dir.path()).await?;
                let address: SocketAddr = ready["address"].as_str().context("an address")?.parse()?;
                own.push((process, address));
            }
            let addresses: Vec<_> = own.iter().map(|(_, address)| *address).collect();
            config.set_endpoints(model, &addresses);
            let route = config.filter_config("route").context("the route filter")?;
            route["debug_headers"] = json!(true);
            route["pools"][index]["replicas"] = json!(addresses.iter().map(ToString::to_string).collect::<Vec<_>>());
        }
        let envoy = Envoy::start(&tools().envoy, &config, 2, dir.path()).await?;
        Ok(Self { envoy, replicas, client: Client::new(), _dir: dir })
    }

    async fn ask(&self, body: impl Into<Body>, headers: &[(&str, &str)]) -> Result<Response> {
        let url = format!("http://{}/v1/chat/completions", self.envoy.listener("proxy")?);
        let mut request = self.client.post(url).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(body).send().await.context("an answer")
    }

    /// Which model's replica this is.
    fn model_of(&self, replica: &str) -> Option<&'static str> {
        let has = |own: &[(Process, SocketAddr)]| own.iter().any(|(_, address)| address.to_string() == replica);
        MODELS.iter().zip(&self.replicas).find(|(_, own)| has(own)).map(|(model, _)| *model)
    }

    /// The clients' requests that replicas have received; Envoy asks for their health besides.
    async fn received(&self) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for (_, address) in self.replicas.iter().flatten() {
            all.extend(received(*address).await?.into_iter().filter(|request| request["path"] != "/health"));
        }
        Ok(all)
    }
}

fn body(model: &str, text: &str) -> String {
    json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 2, "model": model }).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bodys_model_chooses_the_pool_and_turns_stay_at_home_there() -> Result<()> {
    let models = Models::start().await?;
    for model in MODELS {
        for conversation in ["a", "b", "c"] {
            let mut homes = Vec::new();
            for turn in 0..3 {
                // The id in a header, and in the text alone: the second filter reads the same body again.
                let headers: &[_] = if conversation == "c" { &[] } else { &[("x-session-id", conversation)] };
                let response = models.ask(body(model, conversation), headers).await?;
                let seen = Turn::of(&response);
                let expected = if turn == 0 { "placed" } else { "sticky" };
                assert_eq!((seen.status, seen.outcome.as_str()), (200, expected), "{model} {conversation} {turn}");
                assert_eq!(models.model_of(&seen.replica), Some(model));
                homes.push(seen.replica);
                response.bytes().await?;
            }
            homes.dedup();
            assert_eq!(homes.len(), 1, "{model} {conversation}");
        }
    }
    // The header that Envoy's routes went by reaches no replica.
    let requests = models.received().await?;
    let named = |name: &str| requests.iter().filter(|request| request["headers"].to_string().contains(name)).count();
    assert_eq!((named("x-homing-model"), named("content-type")), (0, requests.len()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_choose_the_route_by_the_header() -> Result<()> {
    let models = Models::start().await?;
    let response = models.ask(body("qwen3-4b", "hello"), &[("x-homing-model", "qwen3-coder")]).await?;
    assert_eq!(models.model_of(&Turn::of(&response).replica), Some("qwen3-4b"));
    let response = models.ask("no JSON", &[("x-homing-model", "nothing"), ("x-homing-model", "qwen3-coder")]).await?;
    assert_eq!(models.model_of(&Turn::of(&response).replica), Some("qwen3-4b"), "the route of requests without a model");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_model_gets_envoys_own_answer_and_reaches_no_replica() -> Result<()> {
    let models = Models::start().await?;
    let response = models.ask(body("llama", "hello"), &[]).await?;
    assert_eq!(response.status(), 404);
    assert_eq!(response.json::<Value>().await?["error"]["code"], json!("model_not_found"));
    assert_eq!(models.received().await?.len(), 0);
    let list = format!("http://{}/v1/models", models.envoy.listener("proxy")?);
    assert_eq!(models.client.get(list).send().await?.json::<Value>().await?["data"][0]["id"], json!("qwen3-4b"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_megabytes_pass_both_filters_byte_for_byte() -> Result<()> {
    let models = Models::start().await?;
    let large = large_body();
    let sha256 = hex(&Sha256::digest(&large));
    for (name, sent) in [("with length", Body::from(large.clone())), ("chunked", chunked(&large))] {
        let response = models.ask(sent, &[]).await?;
        let turn = Turn::of(&response);
        // More than the stand-in's engine takes: its refusal comes from behind both filters.
        assert_eq!((turn.status, turn.source.as_str()), (400, "body:metadata.user_id"), "{name}");
        response.bytes().await?;
    }
    let requests = models.received().await?;
    assert_eq!(requests.len(), 2);
    assert!(requests.iter().all(|request| request["body_sha256"] == json!(sha256)), "{requests:?}");
    eventually("every in-flight to be given back", async || {
        let stats = format!("http://{}/stats?filter=homing_in_flight", models.envoy.admin);
        let text = reqwest::get(stats).await?.text().await?;
        Ok(text.lines().all(|line| line.ends_with(": 0")))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_too_large_to_be_read_takes_the_route_of_requests_without_a_model_and_is_counted() -> Result<()> {
    let models = Models::start_reading(1_000).await?;
    let response = models.ask(body("qwen3-coder", &"long ".repeat(1_000)), &[("x-session-id", "a")]).await?;
    assert_eq!(models.model_of(&Turn::of(&response).replica), Some("qwen3-4b"));
    let response = models.ask(body("qwen3-coder", "short"), &[("x-session-id", "a")]).await?;
    assert_eq!(models.model_of(&Turn::of(&response).replica), Some("qwen3-coder"));
    let stats = reqwest::get(format!("http://{}/stats?filter=homing_errors_total", models.envoy.admin)).await?.text().await?;
    let count = |kind: &str| stats.lines().find(|line| line.contains(kind)).and_then(|line| line.rsplit(' ').next()?.parse().ok());
    assert_eq!(count("kind=body_too_large"), Some(1), "{stats}");
    Ok(())
}
