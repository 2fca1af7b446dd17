//! How a pool admits work, as it is written.

use core::ops::RangeInclusive;
use core::time::Duration;

use homing_routing::admission::{Admission, MAX_WAITING, Overflow};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

use super::values::{Span, Whole};

/// How long a request may be held at most: longer than any client waits, and shorter than Envoy's timers as they are shipped.
const MAX_WAIT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(590);

/// How long a place may outlast its conversation's last turn: longer, and it stands empty for good while others wait.
const GRACE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(300);

/// The keys of `admission`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AdmissionFile {
    #[serde(default)]
    mode: Mode,
    #[serde(default)]
    max_held: Option<Whole>,
    #[serde(default)]
    max_wait: Option<Span>,
    #[serde(default)]
    overflow: Option<OverflowName>,
    #[serde(default)]
    turns: Option<Whole>,
    #[serde(default)]
    min_grace: Option<Span>,
    #[serde(default)]
    max_grace: Option<Span>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Mode {
    #[default]
    Off,
    WorkingSet,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OverflowName {
    Send,
    Reject,
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            // YAML 1.1 reads a bare `off` as false.
            Flag(bool),
        }
        match Written::deserialize(deserializer) {
            Ok(Written::Text(text)) if text == "off" => Ok(Self::Off),
            Ok(Written::Flag(false)) => Ok(Self::Off),
            Ok(Written::Text(text)) if text == "working_set" => Ok(Self::WorkingSet),
            _ => Err(D::Error::custom("must be `off` or `working_set`")),
        }
    }
}

impl AdmissionFile {
    /// What it says; `None` if nothing is held. The keys are checked either way.
    ///
    /// # Errors
    /// A key and what it may be.
    pub(super) fn read(&self) -> Result<Option<Admission>, (&'static str, String)> {
        let mut admission = Admission::default();
        if let Some(Whole(max_held)) = self.max_held {
            if !(1..=MAX_WAITING).contains(&(max_held as usize)) {
                return Err(("max_held", format!("must be from 1 to {MAX_WAITING}")));
            }
            admission.max_held = max_held;
        }
        if let Some(Span(max_wait)) = self.max_wait {
            if !MAX_WAIT.contains(&max_wait) {
                let (least, most) = (MAX_WAIT.start().as_secs(), MAX_WAIT.end().as_secs());
                return Err(("max_wait", format!("must be from {least}s to {most}s")));
            }
            admission.max_wait_ms = u64::try_from(max_wait.as_millis()).unwrap_or(u64::MAX);
        }
        if let Some(Whole(turns)) = self.turns {
            admission.turns = u16::try_from(turns).map_err(|_| ("turns", format!("must be from 0 to {}", u16::MAX)))?;
        }
        for (key, span, grace_ms) in [
            ("min_grace", &self.min_grace, &mut admission.min_grace_ms),
            ("max_grace", &self.max_grace, &mut admission.max_grace_ms),
        ] {
            let Some(Span(span)) = span else { continue };
            if !GRACE.contains(span) {
                return Err((key, format!("must be from {}ms to {}s", GRACE.start().as_millis(), GRACE.end().as_secs())));
            }
            *grace_ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        }
        if admission.min_grace_ms > admission.max_grace_ms {
            let most_ms = admission.max_grace_ms;
            return Err(("min_grace", format!("must be at most `max_grace`, which is {most_ms}ms: set both")));
        }
        admission.overflow = match self.overflow {
            Some(OverflowName::Send) => Overflow::Send,
            Some(OverflowName::Reject) => Overflow::Reject,
            None => admission.overflow,
        };
        Ok((self.mode == Mode::WorkingSet).then_some(admission))
    }
}
