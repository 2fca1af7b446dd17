//! The external processor over gRPC: messages are written here byte by byte, as Envoy's protocol has them.

use futures_util::{StreamExt, stream};
use homing_bench::proxy::ext_proc::ExternalProcessor;
use reqwest::{Body, Client, Response};
use std::net::SocketAddr;

const METHOD: &str = "envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// A field of a protobuf message that holds bytes, a text or another message.
fn field(tag: u8, value: &[u8]) -> Vec<u8> {
    let size = u8::try_from(value.len()).ok().filter(|size| *size < 128).expect("sizes of one byte");
    [&[tag << 3 | 2, size], value].concat()
}

/// A gRPC message: not compressed, four bytes of size.
fn frame(message: &[u8]) -> Vec<u8> {
    let size = u32::try_from(message.len()).expect("a small message").to_be_bytes();
    [&[0], &size[..], message].concat()
}

/// `ProcessingRequest.request_headers.headers.headers[]`: key, and the value where Envoy puts it.
fn request_headers(name: &str, value_tag: u8, value: &str) -> Vec<u8> {
    let other = field(1, &[field(1, b":path"), field(value_tag, b"/v1/messages")].concat());
    let header = field(1, &[field(1, name.as_bytes()), field(value_tag, value.as_bytes())].concat());
    field(2, &field(1, &[other, header].concat()))
}

/// `ProcessingResponse.request_headers.response`: with `header_mutation.set_headers[]`, to overwrite what is there.
fn choice(upstream: SocketAddr) -> Vec<u8> {
    let header = [field(1, b"x-target"), field(3, upstream.to_string().as_bytes())].concat();
    let option = [field(1, &header), vec![3 << 3, 2]].concat();
    field(1, &field(1, &field(2, &field(1, &option))))
}

struct Processor {
    client: Client,
    address: SocketAddr,
    upstreams: Vec<SocketAddr>,
}

impl Processor {
    async fn start() -> Self {
        let upstreams: Vec<SocketAddr> = (1..=4).map(|port| SocketAddr::from(([10, 0, 0, 1], port))).collect();
        let processor = ExternalProcessor::bind(&upstreams, "x-target").unwrap();
        let address = processor.address().unwrap();
        tokio::spawn(processor.serve());
        let client = Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
        Self { client, address, upstreams }
    }

    /// Calls a method with a message, and leaves the stream open, as Envoy does until the request ends.
    async fn call(&self, method: &str, message: &[u8]) -> Response {
        let sent = stream::iter([Ok::<_, std::io::Error>(frame(message))]).chain(stream::pending());
        let request = self.client.post(format!("http://{}/{method}", self.address)).body(Body::wrap_stream(sent));
        let response = request.header("content-type", "application/grpc").header("te", "trailers").send().await.unwrap();
        assert_eq!(response.status(), 200);
        response
    }

    /// The first answer.
    async fn answer(&self, message: &[u8]) -> Vec<u8> {
        let mut response = self.call(METHOD, message).await;
        let (mut answer, mut size) = (Vec::new(), usize::MAX);
        while answer.len() < size {
            answer.extend_from_slice(&response.chunk().await.unwrap().expect("an answer while the stream is open"));
            if let Some(bytes) = answer.get(1..5) {
                size = 5 + u32::from_be_bytes(bytes.try_into().unwrap()) as usize;
            }
        }
        assert_eq!(frame(&answer[5..]), answer, "one message that is not compressed");
        answer.split_off(5)
    }
}

#[tokio::test]
async fn a_session_gets_the_same_upstream_every_time_and_sessions_use_all_of_them() {
    const RAW_VALUE: u8 = 3;
    const VALUE: u8 = 2;
    let processor = Processor::start().await;
    let mut sessions = [0; 4];
    for session in 0..64 {
        let id = format!("session-{session:04}");
        let answer = processor.answer(&request_headers("x-session-id", RAW_VALUE, &id)).await;
        let upstream =
            processor.upstreams.iter().position(|&upstream| answer == choice(upstream)).expect("an upstream as the choice");
        sessions[upstream] += 1;
        assert_eq!(processor.answer(&request_headers("x-session-id", VALUE, &id)).await, answer);
    }
    assert!(sessions.iter().all(|&count| count >= 8), "{sessions:?}");
}

#[tokio::test]
async fn a_request_without_a_session_goes_on_unchanged() {
    let processor = Processor::start().await;
    assert_eq!(processor.answer(&request_headers("x-other", 3, "7")).await, field(1, &field(1, &[])));
}

#[tokio::test]
async fn what_is_not_processed_is_refused() {
    const UNIMPLEMENTED: &str = "12";
    let processor = Processor::start().await;
    let status = |response: &Response| response.headers().get("grpc-status").map(|code| code.to_str().unwrap().to_owned());

    let other_method = processor.call("envoy.service.ext_proc.v3.ExternalProcessor/Other", &[]).await;
    assert_eq!(status(&other_method).as_deref(), Some(UNIMPLEMENTED));

    // `response_headers`: the stream ends without an answer, though its other side is open.
    let other_phase = processor.call(METHOD, &field(3, &[])).await;
    assert!(other_phase.bytes().await.unwrap().is_empty());
}
