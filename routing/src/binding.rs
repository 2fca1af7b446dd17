//! A binding: a conversation's home as the Envoys of a fleet tell it each other.
//!
//! A binding is a last-writer-wins register: the later [`Binding::bound_at_ms`] wins, and [`Binding::merged`] is commutative, associative
//! and idempotent. So every Envoy and every collector comes to the same home, in whatever order, however often and by whichever way
//! bindings reach it.
//!
//! Times are the fleet's: the collector's clock, which every Envoy learns with each exchange. They say which binding is the later one
//! although the machines' clocks differ.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::codec::{Reader, Writer};
use crate::identity::Digest;
use crate::replica::ReplicaId;

/// The bytes of [`Binding::pack`]: digest, home, `bound_at_ms`, `last_turn_s` and `bytes`, little-endian.
pub const BINDING_BYTES: usize = 16 + 8 + 8 + 4 + 4;

/// How far ahead of the fleet's clock a binding's times may be; what is further ahead is cut to it, or a clock that is wrong would win
/// until its time comes.
pub const AHEAD_MS: u64 = 5_000;

/// A conversation and its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The conversation.
    pub conversation: Digest,
    /// Where it lives; never 0.
    pub home: ReplicaId,
    /// When it got this home, in milliseconds since 1970 by the fleet's clock.
    pub bound_at_ms: u64,
    /// When its last turn began, in seconds since 1970 by the fleet's clock.
    pub last_turn_s: u32,
    /// What its home has read of it: bytes of a request served there.
    pub bytes: u32,
}

impl Binding {
    /// This binding and another of the same conversation. Two homes of the same moment are settled by their identities.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        let order = |binding: &Self| (binding.bound_at_ms, binding.home, binding.bytes);
        let later = if order(&other) > order(&self) { other } else { self };
        Self { last_turn_s: self.last_turn_s.max(other.last_turn_s), ..later }
    }

    /// With no time that is further ahead of the fleet's clock than [`AHEAD_MS`].
    #[must_use]
    pub fn clamped(self, now_ms: u64) -> Self {
        let latest_ms = now_ms.saturating_add(AHEAD_MS);
        let latest_s = u32::try_from(latest_ms / 1000).unwrap_or(u32::MAX);
        Self { bound_at_ms: self.bound_at_ms.min(latest_ms), last_turn_s: self.last_turn_s.min(latest_s), ..self }
    }

    /// The binding as it is stored and sent, [`Bindings`]' format for one.
    pub fn pack(&self) -> [u8; BINDING_BYTES] {
        let mut bytes = [0; BINDING_BYTES];
        let mut writer = Writer::over(&mut bytes);
        writer.bytes(&self.conversation.0.to_le_bytes());
        writer.u64(self.home.0);
        writer.u64(self.bound_at_ms);
        writer.u32(self.last_turn_s);
        writer.u32(self.bytes);
        bytes
    }

    /// Reads [`Binding::pack`]'s bytes; `None` if they are none, or name no home.
    pub fn unpack(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let binding = Self {
            conversation: Digest(u128::from_le_bytes(reader.array()?)),
            home: ReplicaId(reader.u64()?),
            bound_at_ms: reader.u64()?,
            last_turn_s: reader.u32()?,
            bytes: reader.u32()?,
        };
        (reader.is_empty() && binding.home.0 != 0).then_some(binding)
    }
}

/// Bindings as the exchange carries them: packed one behind the other, in base64 without padding, 54 characters each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bindings(pub Vec<Binding>);

impl Bindings {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Bindings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let packed: Vec<u8> = self.0.iter().flat_map(Binding::pack).collect();
        serializer.serialize_str(&BASE64.encode(packed))
    }
}

impl<'de> Deserialize<'de> for Bindings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let packed = BASE64.decode(text).map_err(|_| serde::de::Error::custom("bindings are not base64 without padding"))?;
        let (each, rest) = packed.as_chunks::<BINDING_BYTES>();
        if !rest.is_empty() {
            return Err(serde::de::Error::custom(format!("bindings are no multiple of {BINDING_BYTES} bytes")));
        }
        let each = each.iter().map(|bytes| Binding::unpack(bytes)).collect::<Option<_>>();
        each.map(Self).ok_or_else(|| serde::de::Error::custom("a binding names no home"))
    }
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;

    /// Few values for each, so that they meet.
    fn binding() -> impl Strategy<Value = Binding> {
        (1_u64..4, 0_u64..4, 0_u32..4, 0_u32..4).prop_map(|(home, bound_at_ms, last_turn_s, bytes)| Binding {
            conversation: Digest(7),
            home: ReplicaId(home),
            bound_at_ms,
            last_turn_s,
            bytes,
        })
    }

    fn all(bindings: &[Binding]) -> Option<Binding> {
        bindings.iter().copied().reduce(Binding::merged)
    }

    /// Some bindings as they are stored.
    fn packed(count: u64) -> Vec<u8> {
        let bindings = (1..=count).map(|n| Binding {
            conversation: Digest(u128::from(n) << 64 | 7),
            home: ReplicaId(n),
            bound_at_ms: 1_796_000_000_000,
            last_turn_s: 1_796_000_000,
            bytes: 5_000,
        });
        bindings.flat_map(|binding| binding.pack()).collect()
    }

    #[test]
    fn the_later_home_wins_and_the_last_turn_is_anyones() {
        let first = Binding { conversation: Digest(7), home: ReplicaId(2), bound_at_ms: 1_000, last_turn_s: 9, bytes: 50 };
        let second = Binding { home: ReplicaId(1), bound_at_ms: 1_001, last_turn_s: 3, bytes: 10, ..first };
        assert_eq!(first.merged(second), Binding { last_turn_s: 9, ..second });
    }

    #[test]
    fn a_clock_far_ahead_wins_for_seconds_only() {
        let ahead =
            Binding { conversation: Digest(7), home: ReplicaId(2), bound_at_ms: 3_600_000, last_turn_s: u32::MAX, bytes: 0 };
        let cut = ahead.clamped(1_000);
        assert_eq!((cut.bound_at_ms, cut.last_turn_s), (6_000, 6));
        let right = Binding { home: ReplicaId(1), bound_at_ms: 6_001, ..cut };
        assert_eq!(cut.merged(right).home, ReplicaId(1));
    }

    proptest! {
        /// What is lost on the way to one and comes later, or twice, changes nothing in the end.
        #[test]
        fn whoever_has_heard_the_same_has_the_same(
            bindings in prop::collection::vec(binding(), 1..8),
            order in Just((0..16_usize).collect::<Vec<_>>()).prop_shuffle(),
            parted in 0_usize..8,
        ) {
            // Each twice, in any order.
            let shuffled: Vec<_> = order.iter().filter_map(|n| bindings.get(n % bindings.len().max(8))).copied().collect();
            prop_assert_eq!(all(&bindings), all(&shuffled));
            // Parts that were merged before make no difference either.
            let (one, two) = bindings.split_at(parted.min(bindings.len()));
            let parts: Vec<_> = all(two).into_iter().chain(all(one)).collect();
            prop_assert_eq!(all(&bindings), all(&parts));
        }

        #[test]
        fn a_binding_reads_back_as_it_is_sent(
            each in prop::collection::vec((any::<u128>(), 1..u64::MAX, any::<u64>(), any::<[u32; 2]>()), 0..20)
        ) {
            let bindings = Bindings(each.into_iter().map(|(digest, home, bound_at_ms, [last_turn_s, bytes])| Binding {
                conversation: Digest(digest), home: ReplicaId(home), bound_at_ms, last_turn_s, bytes,
            }).collect());
            let text = serde_json::to_string(&bindings).expect("JSON");
            prop_assert_eq!(text.len(), 2 + (bindings.0.len() * BINDING_BYTES * 4).div_ceil(3));
            prop_assert_eq!(serde_json::from_str::<Bindings>(&text).expect("bindings"), bindings);
        }

        #[test]
        fn any_text_is_bindings_that_read_as_it_or_refused(text in mutated([BASE64.encode(packed(3)), BASE64.encode(packed(1)), String::new()])) {
            if let Ok(bindings) = serde_json::from_value::<Bindings>(text.text().into()) {
                prop_assert!(bindings.0.iter().all(|binding| binding.home.0 != 0));
                prop_assert_eq!(serde_json::to_value(bindings).expect("JSON"), serde_json::Value::from(text.text()));
            }
        }

        #[test]
        fn any_packed_bytes_are_a_binding_that_packs_to_them_or_none(bytes in mutated([packed(1)])) {
            if let Some(binding) = Binding::unpack(&bytes) {
                prop_assert_eq!(&binding.pack()[..], &bytes[..]);
            }
        }
    }
}
