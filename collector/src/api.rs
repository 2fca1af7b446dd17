//! The part of the API that changes something: draining. Reading needs no token, changing does.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use homing_routing::replica::ReplicaName;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;

use crate::config::TokenSource;
use crate::drain::DrainedBy;
use crate::fleet::Fleet;
use crate::http::Refusal;

/// Whether a replica drains, as the API tells it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DrainStatus {
    /// The replica, as the caller named it.
    pub replica: ReplicaName,
    /// Who drains it; nobody if it is empty.
    pub drained_by: Vec<DrainedBy>,
    /// Requests in flight there, of the Envoys that are connected.
    pub in_flight: u64,
}

/// Proof that the caller may change something.
struct MayChange;

/// What is changed, and what a caller must show to change it; nobody may without a token.
#[derive(Clone, Debug)]
pub struct Changes {
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// The token.
    pub token: Option<TokenSource>,
}

/// `/api/v1/replicas/{name}/drain`: `POST` drains, `DELETE` ends that, `GET` tells.
pub(crate) fn routes(changes: Changes) -> Router {
    Router::new().route("/api/v1/replicas/{name}/drain", get(tell).post(drain).delete(undo)).with_state(changes)
}

async fn tell(State(shared): State<Changes>, Replica(name): Replica) -> Result<impl IntoResponse, Refusal> {
    known(&shared.fleet, name)?;
    Ok(([(CACHE_CONTROL, "no-store")], Json(DrainStatus::of(&shared.fleet, name))))
}

async fn drain(_: MayChange, State(shared): State<Changes>, Replica(name): Replica) -> Result<Json<DrainStatus>, Refusal> {
    known(&shared.fleet, name)?;
    heard(&shared.fleet)?;
    if shared.fleet.drains.update(|drained| drained.api.insert(name)) {
        tracing::info!("the API drains {name}");
    }
    Ok(Json(DrainStatus::of(&shared.fleet, name)))
}

/// Ends what the API said. A replica that is gone may be named too, as long as the API drains it.
async fn undo(_: MayChange, State(shared): State<Changes>, Replica(name): Replica) -> Result<Json<DrainStatus>, Refusal> {
    if shared.fleet.drains.update(|drained| drained.api.remove(&name)) {
        tracing::info!("the API drains {name} no more");
    } else {
        known(&shared.fleet, name)?;
        heard(&shared.fleet)?;
    }
    Ok(Json(DrainStatus::of(&shared.fleet, name)))
}

fn known(fleet: &Fleet, name: ReplicaName) -> Result<(), Refusal> {
    if fleet.has_replica(name) {
        return Ok(());
    }
    Err(Refusal(StatusCode::NOT_FOUND, format!("no pool has a replica {name}; GET /api/v1/pools lists them")))
}

/// Refuses where nothing would come of it: every Envoy that answers takes what another collector says. What this one's API was told
/// stays with it.
fn heard(fleet: &Fleet) -> Result<(), Refusal> {
    if !fleet.stands_by(Instant::now()) {
        return Ok(());
    }
    let message = "this collector stands by: the Envoys take what another one says, which does not know of drains made here. Ask that \
                   one; where both are behind one Service, name its pod, or use the drain_file, which both read";
    Err(Refusal(StatusCode::CONFLICT, message.to_owned()))
}

// === impl DrainStatus ===

impl DrainStatus {
    pub(crate) fn of(fleet: &Fleet, name: ReplicaName) -> Self {
        let matches = |other: ReplicaName| other == name || (name.rank.is_none() && other.address == name.address);
        let now = Instant::now();
        let mut in_flight = 0_u64;
        for envoy in fleet.envoys() {
            let exchanges = envoy.exchanges();
            let answer = exchanges.answer.iter().filter(|_| exchanges.is_connected(now));
            for answer in answer.flat_map(|answer| &answer.pools).flat_map(|pool| &pool.replicas) {
                in_flight = in_flight.saturating_add(if matches(answer.replica) { answer.in_flight } else { 0 });
            }
        }
        Self { replica: name, drained_by: fleet.drained_by(name), in_flight }
    }
}

// === extractors ===

/// The replica in the path; its `#` is written `%23`.
struct Replica(ReplicaName);

impl FromRequestParts<Changes> for Replica {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &Changes) -> Result<Self, Refusal> {
        let refuse = |error: String| Refusal(StatusCode::BAD_REQUEST, error);
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| refuse(error.to_string()))?;
        name.parse().map(Self).map_err(|error| refuse(format!("{error}; write # as %23")))
    }
}

impl FromRequestParts<Changes> for MayChange {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, shared: &Changes) -> Result<Self, Refusal> {
        let Some(source) = &shared.token else {
            let message = "this collector's API only reads; set api.token_file in its configuration to change something";
            return Err(Refusal(StatusCode::FORBIDDEN, message.to_owned()));
        };
        // Read at every call: a file that was changed counts at once.
        let token = source.read().map_err(|error| {
            tracing::warn!("api: {error}");
            Refusal(StatusCode::INTERNAL_SERVER_ERROR, "the collector cannot read api.token_file; see its log".to_owned())
        })?;
        if bearer(&parts.headers).is_some_and(|given| bool::from(given.ct_eq(token.as_bytes()))) {
            Ok(Self)
        } else {
            Err(Refusal(StatusCode::UNAUTHORIZED, "send the collector's api token as `Authorization: Bearer`".to_owned()))
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
}
