//! The page and what belongs to it, compiled into the binary.

use askama::Template;
use axum::extract::Path;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Html, IntoResponse, Response};
use rust_embed::RustEmbed;

/// The page without its figures, which the script fills in.
#[derive(Template)]
#[template(path = "console.html")]
struct Page {
    version: &'static str,
}

#[derive(RustEmbed)]
#[folder = "assets/"]
struct Assets;

pub(super) async fn page() -> Response {
    match (Page { version: env!("CARGO_PKG_VERSION") }).render() {
        Ok(html) => Html(html).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// A script, style or icon. A browser asks again each time and mostly hears that nothing changed, so that a page never runs
/// with the script of another version.
pub(super) async fn asset(Path(name): Path<String>, headers: HeaderMap) -> Response {
    let Some((file, kind)) = Assets::get(&name).zip(kind(&name)) else { return StatusCode::NOT_FOUND.into_response() };
    let hash = file.metadata.sha256_hash();
    let tag = format!("\"{}\"", hash[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let cached = [(CACHE_CONTROL, "no-cache".to_owned()), (ETAG, tag.clone())];
    if headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes()) {
        return (StatusCode::NOT_MODIFIED, cached).into_response();
    }
    (cached, [(CONTENT_TYPE, kind)], file.data).into_response()
}

fn kind(name: &str) -> Option<&'static str> {
    Some(match name.rsplit_once('.')?.1 {
        "css" => "text/css; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "svg" => "image/svg+xml",
        _ => return None,
    })
}
