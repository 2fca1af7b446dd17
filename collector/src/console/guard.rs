//! What keeps other sites away: no `Host` but our own, and headers that let the page load nothing from elsewhere.
//!
//! The collector asks for no password, so a page of another site could read it by letting its own name point here (DNS rebinding).
//! Then the browser sends that name as `Host`. IP addresses, `localhost` and configured names are answered; others are not.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::uri::Authority;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};

/// Only what this server has; nothing inline, no frames, no forms.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// These routes, answered only under names of our own.
pub(crate) fn guarded(router: Router, allowed_hosts: Vec<String>) -> Router {
    router.layer(from_fn_with_state(Arc::<[String]>::from(allowed_hosts), guard))
}

async fn guard(State(allowed): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let header = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    // A request's target may have the host.
    let host = request.uri().authority().map(Authority::as_str).or(header).unwrap_or_default();
    let mut response = if is_allowed(host, &allowed) {
        next.run(request).await
    } else {
        let text = "this name is not one of the collector's: open it by its IP address or as localhost, or add the name to \
                    `allowed_hosts` in its configuration\n";
        (StatusCode::MISDIRECTED_REQUEST, text).into_response()
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Whether a `Host` header's value is a name of ours, whatever its port.
fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    // Nothing but a port may follow the name, and nothing stand before it: the parser takes `[::1].evil` for [::1].
    let Some(port) = authority.as_str().strip_prefix(name) else { return false };
    if !port.is_empty() && !port.strip_prefix(':').is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit())) {
        return false;
    }
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let name = name.to_ascii_lowercase();
    address.parse::<IpAddr>().is_ok() || name == "localhost" || allowed.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    fn allowed(host: &str) -> bool {
        is_allowed(host, &["homing.internal".to_owned()])
    }

    #[test]
    fn addresses_localhost_and_configured_names_are_ours_with_and_without_a_port() {
        for host in ["127.0.0.1:9900", "10.1.2.3", "[::1]:9900", "localhost:9900", "LOCALHOST", "Homing.Internal:80"] {
            assert!(allowed(host), "{host}");
        }
    }

    #[test]
    fn every_other_name_is_not() {
        for host in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
            "[::1].evil.example",
            "a b",
            "/",
            "[::1",
        ] {
            assert!(!allowed(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn any_host_that_is_ours_is_an_address_or_one_of_our_names(host in mutated(seeds("hosts"))) {
            let host = host.text();
            if allowed(&host) {
                // Judged anew, from the text: what stands behind a user's name and before the port.
                let host = host.rsplit_once('@').map_or(&*host, |(_, host)| host);
                let name = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
                    Some((name, _)) => name,
                    None => host.split_once(':').map_or(host, |(name, _)| name),
                };
                let is_ours = ["localhost", "homing.internal"].iter().any(|own| name.eq_ignore_ascii_case(own));
                prop_assert!(is_ours || name.parse::<IpAddr>().is_ok(), "{}", host);
            }
        }

        #[test]
        fn any_name_that_ends_in_a_foreign_domain_is_refused(name in "[a-z0-9.@:\\[\\]]{0,20}") {
            let host = format!("{name}.evil");
            prop_assert!(!allowed(&host), "{}", host);
        }
    }
}
