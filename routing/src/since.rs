//! When this Envoy began to count.

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};

const KEY: &str = "homing/since";
const LAYOUT: u8 = 1;

/// Notes the time now, unless a thread has before: counters live as long as Envoy's process, and so does shared data.
///
/// # Errors
/// When the host refuses.
pub(crate) fn note(host: &impl Host) -> Result<(), HostError> {
    let mut bytes = [0; 9];
    let mut writer = Writer::over(&mut bytes);
    writer.u8(LAYOUT);
    writer.u64(host.now_ms());
    host.write(KEY, &bytes, Expected::Absent).map(drop)
}

/// When the first thread noted it, in milliseconds since 1970; `None` if none has.
///
/// # Errors
/// When the host refuses.
pub(crate) fn noted(host: &impl Host) -> Result<Option<u64>, HostError> {
    Ok(host.read(KEY)?.and_then(|stored| Reader::open(&stored.bytes, LAYOUT)?.u64()))
}
