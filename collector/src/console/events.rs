//! The state as server-sent events: the whole of it once a second, and sooner when something comes or goes.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;

use super::Live;

pub(super) async fn events(State(live): State<Arc<Live>>) -> Response {
    // A stream that ends gives its place back with the permit.
    let Ok(place) = Arc::clone(&live.streams).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "all streams are taken; close another page, or read /api/v1/pools\n")
            .into_response();
    };
    let first = serde_json::to_string(&live.status()).unwrap_or_default();
    let states = live.watch();
    let events = stream::unfold((Some(first), states, place), async |(first, mut states, place)| {
        let state: Arc<str> = match first {
            Some(first) => first.into(),
            None => {
                states.changed().await.ok()?;
                Arc::clone(&states.borrow_and_update())
            }
        };
        Some((Ok::<_, Infallible>(Event::default().event("state").data(&*state)), (None, states, place)))
    });
    Sse::new(events).into_response()
}
