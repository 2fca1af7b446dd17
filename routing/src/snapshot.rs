//! A pool's snapshot as it lies in shared data, laid out so that reading it is a copy.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::admission::Texts;
use crate::codec::{Reader, Writer};
use crate::replica::ReplicaName;
use crate::sync::{MAX_REPLICAS, ReplicaState};

const LAYOUT: u8 = 3;
const HEADER_BYTES: usize = 1 + 8 + 8 + 1 + 4 + 4 + 4;
const RECORD_BYTES: usize = 19 + 4 + 1 + 5 * 4 + 8 + 8 + 2 * 8;

/// Figures of one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Whether it takes turns.
    pub state: ReplicaState,
    /// Requests the engine runs.
    pub running: u32,
    /// Requests that wait inside the engine.
    pub waiting: u32,
    /// Requests that other Envoys and clients have there.
    pub others: u32,
    /// The share of the KV cache that running requests hold, 0 to 1.
    pub kv_usage: f32,
    /// The size of the KV cache in tokens; 0 when unknown.
    pub cache_tokens: u64,
    /// The most sequences the engine runs at once; 0 when unknown.
    pub max_num_seqs: u32,
    /// How old the figures were when the snapshot came, in milliseconds; `u64::MAX` when there are none.
    pub age_ms: u64,
    /// Requests this Envoy had sent there that had ended when the snapshot came, and when the one before it came.
    pub ended: [u64; 2],
}

impl Default for Figures {
    /// A replica nothing is known of takes turns.
    fn default() -> Self {
        Self {
            state: ReplicaState::Ready,
            running: 0,
            waiting: 0,
            others: 0,
            kv_usage: 0.0,
            cache_tokens: 0,
            max_num_seqs: 0,
            age_ms: u64::MAX,
            ended: [0; 2],
        }
    }
}

/// What the collector last saw of one pool, and when this Envoy heard of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// When it came, by this Envoy's clock, in milliseconds since 1970.
    pub received_ms: u64,
    /// How far the fleet's clock, which is the collector's, was ahead of this Envoy's then, in milliseconds.
    pub clock_ahead_ms: i64,
    /// Whether other Envoys send requests to the pool too.
    pub has_peers: bool,
    /// What is known of the pool's texts.
    pub texts: Texts,
    /// Every replica of the pool.
    pub replicas: Vec<(ReplicaName, Figures)>,
}

impl Snapshot {
    /// Reads a stored snapshot. `None` if the bytes are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::open(bytes, LAYOUT)?;
        let received_ms = reader.u64()?;
        let clock_ahead_ms = reader.u64()?.cast_signed();
        let has_peers = reader.u8()? != 0;
        let texts = Texts { bytes_per_token: reader.f32()?, shared_tokens: reader.u32()? };
        let count = usize::try_from(reader.u32()?).ok().filter(|count| *count <= MAX_REPLICAS)?;
        let replicas = (0..count).map(|_| read_record(&mut reader)).collect::<Option<_>>()?;
        reader.is_empty().then_some(Self { received_ms, clock_ahead_ms, has_peers, texts, replicas })
    }

    /// The bytes to store.
    pub fn encode(&self) -> Vec<u8> {
        let count = self.replicas.len().min(MAX_REPLICAS);
        let mut bytes = vec![0; count.saturating_mul(RECORD_BYTES).saturating_add(HEADER_BYTES)];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u64(self.received_ms);
        writer.u64(self.clock_ahead_ms.cast_unsigned());
        writer.u8(u8::from(self.has_peers));
        writer.f32(self.texts.bytes_per_token);
        writer.u32(self.texts.shared_tokens);
        writer.u32(u32::try_from(count).unwrap_or(0));
        for (name, figures) in self.replicas.iter().take(count) {
            write_record(&mut writer, name, figures);
        }
        bytes
    }
}

fn read_record(reader: &mut Reader<'_>) -> Option<(ReplicaName, Figures)> {
    let ip = IpAddr::V6(Ipv6Addr::from(reader.array::<16>()?));
    let ip = if reader.u8()? == 4 { ip.to_canonical() } else { ip };
    let address = SocketAddr::new(ip, reader.u16()?);
    let rank = u16::try_from(reader.u32()?).ok();
    let state = match reader.u8()? {
        0 => ReplicaState::Ready,
        1 => ReplicaState::Down,
        2 => ReplicaState::Draining,
        3 => ReplicaState::Asleep,
        _ => return None,
    };
    let figures = Figures {
        state,
        running: reader.u32()?,
        waiting: reader.u32()?,
        others: reader.u32()?,
        kv_usage: reader.f32()?,
        max_num_seqs: reader.u32()?,
        cache_tokens: reader.u64()?,
        age_ms: reader.u64()?,
        ended: [reader.u64()?, reader.u64()?],
    };
    Some((ReplicaName { address, rank }, figures))
}

fn write_record(writer: &mut Writer<'_>, name: &ReplicaName, figures: &Figures) {
    let (ip, family) = match name.address.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), 4),
        IpAddr::V6(ip) => (ip, 6),
    };
    writer.bytes(&ip.octets());
    writer.u8(family);
    writer.u16(name.address.port());
    writer.u32(name.rank.map_or(u32::MAX, u32::from));
    writer.u8(match figures.state {
        ReplicaState::Ready => 0,
        ReplicaState::Down => 1,
        ReplicaState::Draining => 2,
        ReplicaState::Asleep => 3,
    });
    writer.u32(figures.running);
    writer.u32(figures.waiting);
    writer.u32(figures.others);
    writer.f32(figures.kv_usage);
    writer.u32(figures.max_num_seqs);
    writer.u64(figures.cache_tokens);
    writer.u64(figures.age_ms);
    let [ended, before] = figures.ended;
    writer.u64(ended);
    writer.u64(before);
}

#[cfg(test)]
mod tests {
    use homing_corpus::mutated;
    use proptest::prelude::*;

    use super::*;

    fn two_replicas() -> Snapshot {
        let name = |text: &str| text.parse().expect("a name");
        let figures = Figures { running: 3, kv_usage: 0.5, cache_tokens: 36_000, age_ms: 12, ..Figures::default() };
        let replicas = vec![(name("10.0.0.1:8000"), figures), (name("[fd00::1]:8000#1"), Figures::default())];
        Snapshot { received_ms: 1_796_000_000_000, replicas, ..Snapshot::default() }
    }

    fn any_name() -> impl Strategy<Value = ReplicaName> {
        (any::<std::net::IpAddr>(), any::<u16>(), any::<Option<u16>>())
            .prop_map(|(ip, port, rank)| ReplicaName { address: SocketAddr::new(ip, port), rank })
    }

    fn any_figures() -> impl Strategy<Value = Figures> {
        let state =
            prop::sample::select(vec![ReplicaState::Ready, ReplicaState::Down, ReplicaState::Draining, ReplicaState::Asleep]);
        (state, any::<[u32; 4]>(), 0.0_f32..=1.0, any::<[u64; 4]>()).prop_map(
            |(state, [running, waiting, others, max_num_seqs], kv_usage, [cache_tokens, age_ms, ended, before])| Figures {
                state,
                running,
                waiting,
                others,
                kv_usage,
                cache_tokens,
                max_num_seqs,
                age_ms,
                ended: [ended, before],
            },
        )
    }

    proptest! {
        #[test]
        fn a_snapshot_reads_back_as_it_was_written(
            received_ms: u64,
            clock_ahead_ms: i64,
            has_peers: bool,
            bytes_per_token in 0.5_f32..16.0,
            shared_tokens: u32,
            replicas in prop::collection::vec((any_name(), any_figures()), 0..20),
        ) {
            let texts = Texts { bytes_per_token, shared_tokens };
            let snapshot = Snapshot { received_ms, clock_ahead_ms, has_peers, texts, replicas };
            prop_assert_eq!(Snapshot::decode(&snapshot.encode()), Some(snapshot));
        }

        #[test]
        fn any_bytes_are_a_snapshot_or_none(bytes in mutated([Snapshot::default().encode(), two_replicas().encode()])) {
            if let Some(snapshot) = Snapshot::decode(&bytes) {
                let written = snapshot.encode();
                prop_assert_eq!(written.len(), bytes.len());
                // Compared as bytes, since a NaN is not equal to itself.
                prop_assert_eq!(Snapshot::decode(&written).expect("a snapshot").encode(), written);
            }
        }
    }
}
