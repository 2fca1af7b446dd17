//! Bearer tokens: where they come from, and how they stay hidden.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Where a bearer token comes from.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSource {
    /// It stands in the configuration.
    #[serde(rename = "token", serialize_with = "hidden")]
    Inline(String),
    /// It is the content of a file, without the white space around it.
    #[serde(rename = "token_file")]
    File(PathBuf),
}

impl TokenSource {
    /// Reads the token.
    pub fn read(&self) -> Result<String, String> {
        let token = match self {
            Self::Inline(token) => token.clone(),
            Self::File(path) => std::fs::read_to_string(path)
                .map_err(|error| format!("the token file {} cannot be read: {error}", path.display()))?
                .trim()
                .to_owned(),
        };
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token is one or more visible ASCII characters without spaces".to_owned());
        }
        Ok(token)
    }
}

/// Tells people where the token comes from and never the token.
impl fmt::Display for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("a token from this file"),
            Self::File(path) => write!(f, "a token from {}", path.display()),
        }
    }
}

/// Shows where a token comes from and never the token.
impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

fn hidden<S: serde::Serializer>(_: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str("(hidden)")
}
