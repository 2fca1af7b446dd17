//! What the route role tells the control role, besides each pool's policy: how the affinity table is laid out and how conversations are
//! named.

use core::hash::Hasher;

use siphasher::sip::SipHasher24;

use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::router::Settings;
use crate::table::Table;

const KEY: &str = "homing/settings";
const LAYOUT: u8 = 1;

/// What holds for every pool of this Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    max_conversations: u32,
    /// After how many seconds without a turn a conversation is no longer held.
    pub(crate) idle_s: u32,
    /// The same on two Envoys if they name conversations with the same key; it does not tell the key.
    pub(crate) key_check: u64,
}

impl Shared {
    pub(crate) fn of(settings: &Settings) -> Self {
        let mut hasher = SipHasher24::new_with_key(&settings.hash_key);
        hasher.write(b"homing/key-check");
        Self { max_conversations: settings.max_conversations, idle_s: settings.idle_s, key_check: hasher.finish() }
    }

    pub(crate) fn table(&self) -> Table {
        Table::new(self.max_conversations, self.idle_s)
    }

    /// Tells the control role.
    pub(crate) fn publish(&self, host: &impl Host) -> Result<(), HostError> {
        let mut bytes = [0; 1 + 4 + 4 + 8];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u32(self.max_conversations);
        writer.u32(self.idle_s);
        writer.u64(self.key_check);
        host.write(KEY, &bytes, Expected::Anything).map(drop)
    }

    /// What the route role told; `None` if it told nothing yet.
    pub(crate) fn published(host: &impl Host) -> Result<Option<Self>, HostError> {
        let read = |bytes: &[u8]| {
            let mut reader = Reader::open(bytes, LAYOUT)?;
            Some(Self { max_conversations: reader.u32()?, idle_s: reader.u32()?, key_check: reader.u64()? })
        };
        Ok(host.read(KEY)?.and_then(|stored| read(&stored.bytes)))
    }
}
