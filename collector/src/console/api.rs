//! The API: what the page shows, as JSON. docs/api.md describes it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::Live;
use crate::history::PoolHistory;
use crate::http::Refusal;
use crate::status::{EnvoyStatus, PoolStatus, Status};

#[derive(Deserialize)]
pub(super) struct HistoryQuery {
    pool: Option<String>,
    #[serde(default)]
    since: u64,
}

pub(super) async fn pools(State(live): State<Arc<Live>>) -> Json<Status> {
    Json(live.status())
}

pub(super) async fn pool(State(live): State<Arc<Live>>, Path(cluster): Path<String>) -> Result<Json<PoolStatus>, Refusal> {
    let Status { pools, .. } = live.status();
    let names = names(&pools);
    pools.into_iter().find(|pool| pool.cluster == cluster).map(Json).ok_or_else(|| unknown(&cluster, &names))
}

pub(super) async fn envoys(State(live): State<Arc<Live>>) -> Json<Vec<EnvoyStatus>> {
    Json(live.status().envoys)
}

pub(super) async fn history(
    State(live): State<Arc<Live>>,
    query: Result<Query<HistoryQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Json<PoolHistory>, Refusal> {
    let Query(query) = query.map_err(|error| Refusal(StatusCode::BAD_REQUEST, format!("{error}; `since` is a step's number")))?;
    let Some(cluster) = query.pool else {
        let names = names(&live.status().pools);
        return Err(Refusal(StatusCode::BAD_REQUEST, format!("name a pool, as in ?pool=NAME; there is {names}")));
    };
    live.history().pool(&cluster, query.since).map(Json).ok_or_else(|| unknown(&cluster, &names(&live.status().pools)))
}

fn unknown(cluster: &str, names: &str) -> Refusal {
    Refusal(StatusCode::NOT_FOUND, format!("no pool is called `{cluster}`; there is {names}"))
}

fn names(pools: &[PoolStatus]) -> String {
    let names: Vec<_> = pools.iter().map(|pool| format!("`{}`", pool.cluster)).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
