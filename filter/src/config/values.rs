//! Values as people write them in a configuration.

use core::fmt;
use core::time::Duration;

use homing_routing::policy::Limit;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};

/// A whole number. Envoy writes every number of a `Struct` as a double.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole(pub(super) u32);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = f64::deserialize(deserializer)?;
        whole(number).map(Self).ok_or_else(|| D::Error::custom(format!("{number} is not a whole number from 0 to {}", u32::MAX)))
    }
}

fn whole(number: f64) -> Option<u32> {
    (number >= 0.0 && number <= f64::from(u32::MAX) && number.trunc() == number).then_some(number as u32)
}

/// A duration as people write it: `600s`, `10m`, `250ms`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span(pub(super) Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text)
            .map(Self)
            .map_err(|error| D::Error::custom(format!("`{text}` is not a duration such as 600s: {error}")))
    }
}

/// 16 bytes as hex digits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HashKey(pub(super) [u8; 16]);

impl<'de> Deserialize<'de> for HashKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            "" => Ok(Self::default()),
            text if text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
                u128::from_str_radix(text, 16).map(|key| Self(key.to_be_bytes())).map_err(D::Error::custom)
            }
            _ => Err(D::Error::custom("a hash key is 32 hex digits (16 bytes), the same on every Envoy of a fleet, or empty")),
        }
    }
}

/// `auto` or a whole number.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitFile(pub(super) Limit);

impl Default for LimitFile {
    fn default() -> Self {
        Self(Limit::Auto)
    }
}

impl<'de> Deserialize<'de> for LimitFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = Limit;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto` or a whole number")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Limit, E> {
                if text == "auto" { Ok(Limit::Auto) } else { Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)) }
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Limit, E> {
                u32::try_from(number)
                    .map(Limit::Fixed)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self))
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<Limit, E> {
                whole(number).map(Limit::Fixed).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Float(number), &self))
            }
        }
        deserializer.deserialize_any(Written).map(Self)
    }
}
