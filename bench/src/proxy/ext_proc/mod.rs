//! An external processor for Envoy that does the least of what Homing does: from a request's session id it computes an upstream, and
//! has Envoy set the header that `override_host` goes by. It knows no loads and keeps no state; what it costs is what any external
//! processor costs, and little more.

mod messages;

use anyhow::{Context, Result, ensure};
use futures_util::future::{BoxFuture, Ready, ready};
use futures_util::stream::{BoxStream, StreamExt};
use hyper::{Request as HttpRequest, Response as HttpResponse};
use messages::{
    CommonResponse, Decision, HeaderAppendAction, HeaderMutation, HeaderValue, HeaderValueOption, HeadersResponse, HttpHeaders,
    Phase, ProcessingRequest, ProcessingResponse,
};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::server::{Server, TcpIncoming};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::Service;

/// The method that Envoy calls.
const PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// The header whose value names a conversation.
const SESSION_HEADER: &str = "x-session-id";

/// A processor that listens and does not serve yet.
#[derive(Debug)]
pub struct ExternalProcessor {
    incoming: TcpIncoming,
    process: Process,
}

impl ExternalProcessor {
    /// Listens on a free port of the loopback interface. Requests are to go to these upstreams; the choice is put into this header.
    ///
    /// # Errors
    /// If there are no upstreams or there is no port.
    pub fn bind(upstreams: &[SocketAddr], target_header: &str) -> Result<Self> {
        ensure!(!upstreams.is_empty(), "give at least one upstream to choose from");
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).context("cannot listen on the loopback interface")?;
        let upstreams = upstreams.iter().map(SocketAddr::to_string).collect();
        Ok(Self {
            incoming: incoming.with_nodelay(Some(true)),
            process: Process { upstreams, target_header: target_header.into() },
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.incoming.local_addr()?)
    }

    /// Serves.
    ///
    /// # Errors
    /// If it can no longer accept connections.
    pub async fn serve(self) -> Result<()> {
        Server::builder().serve_with_incoming(self.process, self.incoming).await.context("the external processor stopped")
    }
}

/// The upstream for a conversation, of `count`. The Lua stand-in computes the same.
fn upstream_for(session: &[u8], count: usize) -> usize {
    let hash = session.iter().fold(0_u32, |hash, &byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    hash as usize % count
}

/// The service, and its one method.
#[derive(Clone, Debug)]
struct Process {
    upstreams: Arc<[String]>,
    target_header: Arc<str>,
}

impl Process {
    fn answer(&self, request: &ProcessingRequest) -> Result<ProcessingResponse, Status> {
        let Some(Phase::RequestHeaders(HttpHeaders { headers })) = &request.phase else {
            return Err(Status::invalid_argument("only request headers are processed: set every other phase to SKIP or NONE"));
        };
        let mut headers = headers.iter().flat_map(|map| &map.headers);
        let session = headers.find(|header| header.key == SESSION_HEADER);
        let header_mutation = session.map(|HeaderValue { value, raw_value, .. }| {
            let session = if raw_value.is_empty() { value.as_bytes() } else { raw_value };
            let upstream = &self.upstreams[upstream_for(session, self.upstreams.len())];
            let header = HeaderValue {
                key: self.target_header.as_ref().to_owned(),
                value: String::new(),
                raw_value: upstream.clone().into_bytes(),
            };
            let append_action = HeaderAppendAction::OverwriteIfExistsOrAdd.into();
            HeaderMutation { set_headers: vec![HeaderValueOption { header: Some(header), append_action }] }
        });
        let response = HeadersResponse { response: Some(CommonResponse { header_mutation }) };
        Ok(ProcessingResponse { decision: Some(Decision::RequestHeaders(response)) })
    }
}

/// HTTP: one path, whose gRPC side is below.
impl Service<HttpRequest<Body>> for Process {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let process = self.clone();
        Box::pin(async move {
            if request.uri().path() != PATH {
                return Ok(Status::new(Code::Unimplemented, format!("only {PATH} is served")).into_http());
            }
            let codec: ProstCodec<ProcessingResponse, ProcessingRequest> = ProstCodec::default();
            Ok(Grpc::new(codec).streaming(process, request).await)
        })
    }
}

/// gRPC: Envoy has a stream for each request, with a message for each phase, and waits for an answer to each.
impl Service<Request<Streaming<ProcessingRequest>>> for Process {
    type Response = Response<BoxStream<'static, Result<ProcessingResponse, Status>>>;
    type Error = Status;
    type Future = Ready<Result<Self::Response, Status>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let process = self.clone();
        let answers = request.into_inner().map(move |message| process.answer(&message?));
        ready(Ok(Response::new(answers.boxed())))
    }
}
