//! The address of an Envoy's control listener.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

/// The address of an Envoy's control listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ControlUrl {
    /// `http://ip:port`
    Tcp(SocketAddr),
    /// `https://ip:port`
    Tls(SocketAddr),
    /// `unix:/path/to.sock`
    Unix(PathBuf),
}

impl fmt::Display for ControlUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Tls(address) => write!(f, "https://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl std::str::FromStr for ControlUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = "write http://ip:port, https://ip:port or unix:/path/to.sock; a name goes under `dns`";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(format!("the socket's path must be absolute: {allowed}"))
            };
        }
        let (make, rest): (fn(SocketAddr) -> Self, _) = match text.strip_prefix("https://") {
            Some(rest) => (Self::Tls, Some(rest)),
            None => (Self::Tcp, text.strip_prefix("http://")),
        };
        let address = rest.map(|rest| rest.strip_suffix('/').unwrap_or(rest));
        match address.and_then(|address| address.parse::<SocketAddr>().ok()) {
            Some(address) if address.port() != 0 => Ok(make(address)),
            _ => Err(format!("`{text}` is not a control listener: {allowed}")),
        }
    }
}

impl<'de> Deserialize<'de> for ControlUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for ControlUrl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_an_address_that_reads_back_or_refused_with_what_is_allowed(
            text in mutated(["http://127.0.0.1:9901", "https://[fd00::1]:9901/", "unix:/run/envoy.sock"]),
        ) {
            match text.text().parse::<ControlUrl>() {
                Ok(url) => prop_assert_eq!(url.to_string().parse(), Ok(url)),
                Err(problem) => prop_assert!(problem.contains("write http://ip:port"), "{}", problem),
            }
        }
    }
}
