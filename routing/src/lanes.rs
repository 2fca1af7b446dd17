//! Lanes: which thread holds how much of what is in flight, so that a thread that dies can be settled by another.
//!
//! A VM that traps never gives back what it had reserved. So each thread that routes takes a lane of its own, counts what it
//! reserves in its lane's gauges besides the totals, and signs in on every tick. A lane whose thread has not signed in for
//! [`DEAD_MS`] is taken from it: what its gauges show goes off the totals, and only then is the lane free for another thread.
//! All threads of an Envoy share the lanes, whatever pools they route, since the gauges' names are the same. A thread that
//! routes the same pools settles a lane; one that routes others does so only when nobody else has done it for long: the
//! listener whose lane it was is gone.
//!
//! A thread that was only held up finds its lane gone when it ticks again, takes a new one and adds what it still holds. Until
//! then the totals may stand below zero; they are read as signed numbers, so that this does no harm.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError, TRIES};

/// Threads that can route at the same time; more of them go without a lane, and leak if they trap.
pub(crate) const LANES: usize = 254;

/// How long a thread may be silent before its lane is taken from it. A tick comes twice a second.
pub(crate) const DEAD_MS: u64 = 4_000;

/// How long a lane is left to the threads that route the same pools.
const ORPHANED_MS: u64 = 30_000;

const KEY: &str = "homing/lanes";
const LAYOUT: u8 = 2;
const BYTES: usize = 1 + LANES * 24;

/// Stands for a list of pools: threads that route the same ones have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolList(pub(crate) u64);

/// A thread's hold on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    /// Which one.
    pub(crate) number: usize,
    /// When it was taken, in milliseconds since 1970: tells this hold from an earlier and a later one.
    taken_ms: u64,
}

/// One lane as it is stored: free if it is not seen, in which case `taken_ms` is when it was freed; being settled since it was seen
/// if it is not taken; else a thread's.
#[derive(Clone, Copy, Default)]
struct Sign {
    /// Of the thread that took it.
    list: u64,
    taken_ms: u64,
    seen_ms: u64,
}

impl Sign {
    fn is_free(&self) -> bool {
        self.seen_ms == 0
    }

    fn is_settled_by_another(&self) -> bool {
        self.taken_ms == 0 && !self.is_free()
    }

    /// Whether its thread, or the one that settles it, is gone. A time to come was written by a clock that has been set back.
    fn is_dead(&self, now_ms: u64, after_ms: u64) -> bool {
        !self.is_free() && self.seen_ms.abs_diff(now_ms) > after_ms
    }
}

/// What a thread finds when it signs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The lane is its own.
    Mine,
    /// Another thread is taking what it holds off the totals.
    BeingSettled,
    /// It has been settled.
    Gone,
}

impl Lane {
    /// Takes a free lane, of those the one that has been free the longest: what its last thread left in its gauges is read until
    /// that thread comes back. `None` if there is none, or if other threads take lanes all the time.
    pub(crate) fn take(host: &impl Host, list: PoolList) -> Result<Option<Self>, HostError> {
        let now_ms = host.now_ms().max(1);
        change(host, |signs| {
            let free = signs.iter_mut().enumerate().filter(|(_, sign)| sign.is_free());
            let (number, sign) = free.min_by_key(|(number, sign)| (sign.taken_ms, *number))?;
            *sign = Sign { list: list.0, taken_ms: now_ms, seen_ms: now_ms };
            Some(Self { number, taken_ms: now_ms })
        })
    }

    /// Signs in. A lost race counts as signed in: the next tick comes soon.
    pub(crate) fn sign_in(self, host: &impl Host) -> Result<Presence, HostError> {
        let now_ms = host.now_ms().max(1);
        let mut presence = Presence::Mine;
        change(host, |signs| {
            let sign = signs.get_mut(self.number)?;
            presence = if !sign.is_free() && sign.taken_ms == self.taken_ms {
                Presence::Mine
            } else if sign.is_settled_by_another() {
                Presence::BeingSettled
            } else {
                Presence::Gone
            };
            (presence == Presence::Mine).then(|| sign.seen_ms = now_ms)
        })?;
        Ok(presence)
    }
}

/// Takes one lane, to settle it, from a thread that has not signed in for too long; returns its number. Only one thread gets it.
pub(crate) fn take_dead(host: &impl Host, list: PoolList) -> Result<Option<usize>, HostError> {
    let now_ms = host.now_ms().max(1);
    change(host, |signs| {
        let after_ms = |sign: &Sign| if sign.list == list.0 { DEAD_MS } else { ORPHANED_MS };
        let (number, sign) = signs.iter_mut().enumerate().find(|(_, sign)| sign.is_dead(now_ms, after_ms(sign)))?;
        *sign = Sign { taken_ms: 0, seen_ms: now_ms, ..*sign };
        Some(number)
    })
}

/// Frees a lane that has been settled.
pub(crate) fn free(host: &impl Host, number: usize) -> Result<(), HostError> {
    let now_ms = host.now_ms().max(1);
    change(host, |signs| {
        let sign = signs.get_mut(number).filter(|sign| sign.is_settled_by_another())?;
        *sign = Sign { taken_ms: now_ms, seen_ms: 0, ..*sign };
        Some(())
    })
    .map(drop)
}

/// Changes the stored lanes, unless `with` answers `None` or other threads win at every try.
fn change<T>(host: &impl Host, mut with: impl FnMut(&mut Vec<Sign>) -> Option<T>) -> Result<Option<T>, HostError> {
    for _ in 0..TRIES {
        let stored = host.read(KEY)?;
        let mut signs = stored.as_ref().and_then(|stored| decode(&stored.bytes)).unwrap_or_else(|| vec![Sign::default(); LANES]);
        let Some(result) = with(&mut signs) else { return Ok(None) };
        if host.write(KEY, &encode(&signs), Expected::unchanged(stored.as_ref()))? {
            return Ok(Some(result));
        }
    }
    Ok(None)
}

fn decode(bytes: &[u8]) -> Option<Vec<Sign>> {
    let mut reader = Reader::open(bytes, LAYOUT)?;
    let sign = |_| Some(Sign { list: reader.u64()?, taken_ms: reader.u64()?, seen_ms: reader.u64()? });
    let signs = (0..LANES).map(sign).collect::<Option<_>>()?;
    reader.is_empty().then_some(signs)
}

fn encode(signs: &[Sign]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let mut writer = Writer::over(&mut bytes);
    writer.u8(LAYOUT);
    for sign in signs {
        writer.u64(sign.list);
        writer.u64(sign.taken_ms);
        writer.u64(sign.seen_ms);
    }
    bytes
}
