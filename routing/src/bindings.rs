//! The journal of bindings that the collector has not fetched yet.
//!
//! One value of bounded size for all pools; when nobody fetches, the oldest binding makes room and is counted as dropped.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::identity::Digest;
use crate::replica::ReplicaId;

const LAYOUT: u8 = 1;
const KEY: &str = "homing/bindings";
const RECORD_BYTES: usize = 16 + 8 + 4;

/// Bindings kept for the collector: four exchanges a second fetch a thousand new conversations a second.
pub(crate) const MAX_BINDINGS: usize = 256;

/// How often a write is tried when other threads write too.
const TRIES: usize = 3;

/// A conversation that got a home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bound {
    /// The conversation.
    pub(crate) digest: Digest,
    /// Where it lives.
    pub(crate) home: ReplicaId,
    /// When its last turn began, in seconds since 1970.
    pub(crate) last_turn: u32,
}

/// Appends one binding; says how many were dropped for it.
///
/// # Errors
/// When the host refuses.
pub(crate) fn append(host: &impl Host, bound: Bound) -> Result<u64, HostError> {
    for _ in 0..TRIES {
        let stored = host.read(KEY)?;
        let mut all = stored.as_ref().map(|stored| decode(&stored.bytes)).unwrap_or_default();
        let dropped = all.len().saturating_add(1).saturating_sub(MAX_BINDINGS);
        all.drain(..dropped.min(all.len()));
        all.push(bound);
        if host.write(KEY, &encode(&all), Expected::unchanged(stored.as_ref()))? {
            return Ok(u64::try_from(dropped).unwrap_or(u64::MAX));
        }
    }
    Ok(1)
}

/// Takes every binding, oldest first.
///
/// # Errors
/// When the host refuses.
pub(crate) fn take(host: &impl Host) -> Result<Vec<Bound>, HostError> {
    for _ in 0..TRIES {
        let Some(stored) = host.read(KEY)? else { return Ok(Vec::new()) };
        if host.write(KEY, &encode(&[]), Expected::Version(stored.version))? {
            return Ok(decode(&stored.bytes));
        }
    }
    // They stay for the next exchange.
    Ok(Vec::new())
}

fn decode(bytes: &[u8]) -> Vec<Bound> {
    let Some(mut reader) = Reader::open(bytes, LAYOUT) else { return Vec::new() };
    let next = || {
        Some(Bound {
            digest: Digest(u128::from_le_bytes(reader.array()?)),
            home: ReplicaId(reader.u64()?),
            last_turn: reader.u32()?,
        })
    };
    core::iter::from_fn(next).take(MAX_BINDINGS).collect()
}

fn encode(all: &[Bound]) -> Vec<u8> {
    let mut bytes = vec![0; all.len().saturating_mul(RECORD_BYTES).saturating_add(1)];
    let mut writer = Writer::over(&mut bytes);
    writer.u8(LAYOUT);
    for bound in all {
        writer.bytes(&bound.digest.0.to_le_bytes());
        writer.u64(bound.home.0);
        writer.u32(bound.last_turn);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::MemoryHost;
    use crate::testing::test;

    fn bound(n: u128) -> Bound {
        Bound { digest: Digest(n), home: ReplicaId(1), last_turn: 2 }
    }

    #[test]
    fn what_is_appended_is_taken_once_and_in_order() {
        let host = MemoryHost::default();
        assert_eq!(take(&host).expect("room"), []);
        for n in 1..=3 {
            assert_eq!(append(&host, bound(n)).expect("room"), 0);
        }
        assert_eq!(take(&host).expect("room"), [bound(1), bound(2), bound(3)]);
        assert_eq!(take(&host).expect("room"), []);
    }

    #[test]
    fn when_nobody_fetches_the_oldest_go_and_are_counted() {
        let host = MemoryHost::default();
        let dropped: u64 = (0..300).map(|n| append(&host, bound(n)).expect("room")).sum();
        assert_eq!(dropped, 44);
        let kept = take(&host).expect("room");
        assert_eq!((kept.first(), kept.len()), (Some(&bound(44)), MAX_BINDINGS));
    }

    proptest::proptest! {
        #[test]
        fn any_stored_bytes_are_a_journal(bytes: Vec<u8>) {
            let host = MemoryHost::default();
            host.write(KEY, &bytes, Expected::Anything).expect("room");
            append(&host, bound(7)).expect("room");
            let taken = take(&host).expect("room");
            proptest::prop_assert_eq!(taken.last(), Some(&bound(7)));
        }
    }
}
