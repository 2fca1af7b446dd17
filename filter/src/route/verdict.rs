//! What a verdict does to its request.

use homing_routing::host::HostError;
use homing_routing::metric::ErrorKind;
use homing_routing::outcome::Outcome;
use homing_routing::router::{Held, Router, Ticket, Verdict};

use super::State;
use super::head::Head;
use super::refusal::{Refusal, body};
use crate::envoy::{Envoy, Map};
use crate::module::Action;

/// Carries the chosen addresses to `header_to_metadata`, which removes it.
const TARGETS: &str = "x-homing-targets";
/// Names a replica: in a request the one a client pins, in a response the one that served it.
pub(super) const REPLICA: &str = "x-homing-replica";
/// The data-parallel rank, as vLLM reads it.
const RANK: &str = "x-data-parallel-rank";

/// Sends a request on or answers it; says what its stream is from then on, and whether Envoy goes on with it.
///
/// # Errors
/// What a request in line is, if that is the verdict.
pub(super) fn carry_out(router: &mut Router<Envoy>, head: &Head, verdict: Verdict<Envoy>) -> Result<(State, Action), Held<Envoy>> {
    let refuse = |router: &mut Router<Envoy>, status, details, headers: &[(&str, &str)], why: &str| {
        let refusal = if status == 429 { Refusal::Busy } else { Refusal::Invalid };
        let state = State::Refused { cluster: head.cluster.clone() };
        if Envoy.respond(status, details, headers, &body(refusal, why, head.anthropic)).is_ok() {
            return (state, Action::Pause);
        }
        router.count_error(ErrorKind::Host, 1);
        (state, Action::Continue)
    };
    match verdict {
        Verdict::Hold(held) => Err(held),
        Verdict::Refuse(why) => Ok(refuse(router, 400, "homing_pin", &[], &why)),
        Verdict::Busy { after_s } => {
            let after = after_s.to_string();
            let why = format!("every replica's cache is taken by other conversations: try again in {after} s");
            Ok(refuse(router, 429, "homing_busy", &[("retry-after", &after)], &why))
        }
        Verdict::Go(ticket) => {
            if send(head, &ticket).is_err() {
                router.count_error(ErrorKind::Host, 1);
            }
            Ok((State::Routed(Box::new(ticket)), Action::Continue))
        }
    }
}

/// Writes the choice into the request's headers and takes the client's own routing headers out.
fn send(head: &Head, ticket: &Ticket<Envoy>) -> Result<(), HostError> {
    if head.pin.is_some() {
        Envoy.remove_header(Map::Request, REPLICA)?;
    }
    match ticket.chosen().and_then(|chosen| chosen.name.rank) {
        Some(rank) => Envoy.set_header(Map::Request, RANK, &rank.to_string())?,
        // Where Envoy chooses, the engine may still read it.
        None if head.has_rank && ticket.planned() != Outcome::Passed => Envoy.remove_header(Map::Request, RANK)?,
        None => {}
    }
    let mut addresses = String::with_capacity(64);
    for address in ticket.addresses() {
        if !addresses.is_empty() {
            addresses.push(',');
        }
        addresses.push_str(address);
    }
    if addresses.is_empty() { Ok(()) } else { Envoy.set_header(Map::Request, TARGETS, &addresses) }
}
