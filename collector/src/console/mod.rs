//! The console: one page that shows what routing does, and the API it is made of.
//!
//! [`live`] is what is shown; [`api`] answers with it, [`events`] streams it, [`page`] is the page with its script and style, and
//! [`guard`] keeps other sites' scripts away from all of it.

mod api;
mod events;
mod guard;
mod live;
mod page;

use std::sync::Arc;

use axum::Router;
use axum::routing::get;

pub(crate) use self::guard::guarded;
pub use self::live::Live;
pub(crate) use self::live::publish;

/// The page and the API.
pub(crate) fn routes(live: Arc<Live>) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/assets/{name}", get(page::asset))
        .route("/api/v1/pools", get(api::pools))
        .route("/api/v1/pools/{cluster}", get(api::pool))
        .route("/api/v1/envoys", get(api::envoys))
        .route("/api/v1/history", get(api::history))
        .route("/api/v1/events", get(events::events))
        .with_state(live)
}
