//! What of Envoy's external processing protocol is used here, as in `envoy/service/ext_proc/v3/external_processor.proto`. Fields
//! that are not named are skipped when read, as protobuf has it.

use prost::{Message, Oneof};

/// What Envoy says about a request, one of these for each phase it is configured to send.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingRequest {
    #[prost(oneof = "Phase", tags = "2")]
    pub(super) phase: Option<Phase>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Phase {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub(super) headers: Option<HeaderMap>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub(super) headers: Vec<HeaderValue>,
}

/// Envoy fills in one of the two values, which one is a setting of its runtime; in an answer it takes either.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) raw_value: Vec<u8>,
}

/// What Envoy is to do in a phase.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingResponse {
    #[prost(oneof = "Decision", tags = "1")]
    pub(super) decision: Option<Decision>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Decision {
    #[prost(message, tag = "1")]
    RequestHeaders(HeadersResponse),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeadersResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub(super) header_mutation: Option<HeaderMutation>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub(super) set_headers: Vec<HeaderValueOption>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<HeaderValue>,
    #[prost(enumeration = "HeaderAppendAction", tag = "3")]
    pub(super) append_action: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum HeaderAppendAction {
    AppendIfExistsOrAdd = 0,
    OverwriteIfExistsOrAdd = 2,
}
