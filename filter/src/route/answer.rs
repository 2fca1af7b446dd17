//! What a response tells: where its request was served.

use homing_routing::metric::ErrorKind;
use homing_routing::router::{Answer, Ticket};

use super::verdict::REPLICA;
use super::{RouteStream, Routes};
use crate::envoy::{Envoy, Map};

const OUTCOME: &str = "x-homing-outcome";
const SOURCE: &str = "x-homing-source";
const CONVERSATION: &str = "x-homing-conversation";
const HELD_MS: &str = "x-homing-held-ms";

const UPSTREAM_ADDRESS: &str = "upstream\0address";
const CODE_DETAILS: &str = "response\0code_details";
const ATTEMPTS: &str = "upstream\0request_attempt_count";

/// Learns from Envoy where the request is served.
pub(super) fn learn(routes: &Routes, ticket: &mut Ticket<Envoy>) {
    let Ok(mut router) = routes.router.try_borrow_mut() else { return };
    let status = Envoy.header(Map::Response, ":status").ok().flatten().unwrap_or_default();
    let answer = Answer::of(&status, ticket.planned());
    let from_replica =
        || answer == Answer::Served || Envoy.property(CODE_DETAILS).ok().flatten().as_deref() == Some(b"via_upstream");
    let address = Envoy.property(UPSTREAM_ADDRESS).ok().flatten().and_then(|bytes| String::from_utf8(bytes).ok());
    let Some(address) = address.filter(|_| from_replica()) else {
        if answer == Answer::Failed {
            router.not_served(ticket);
        }
        return;
    };
    router.served(ticket, &address, answer);
    let moved = ticket.served().is_some_and(|served| served.moved);
    if moved && Envoy.property(ATTEMPTS).ok().flatten().as_deref() == Some(&1_u64.to_le_bytes()[..]) {
        router.count_error(ErrorKind::Mismatch, 1);
    }
}

/// Tells the client where its request was served, and why.
pub(super) fn add_debug_headers(stream: &RouteStream, ticket: &Ticket<Envoy>) {
    let Some(served) = ticket.served() else { return };
    let set = |name, value: &str| {
        // A response whose headers cannot be changed is still right.
        let _ = Envoy.set_header(Map::Response, name, value);
    };
    set(OUTCOME, served.outcome.as_str());
    if let Some(replica) = &served.replica {
        set(REPLICA, &replica.name.to_string());
    }
    if let Some(source) = &stream.source {
        set(SOURCE, source);
    }
    if let Some(conversation) = ticket.conversation() {
        let digest = conversation.to_string();
        set(CONVERSATION, digest.get(..16).unwrap_or_default());
    }
    if let Some(held_ms) = stream.held_ms {
        set(HELD_MS, &held_ms.to_string());
    }
}
