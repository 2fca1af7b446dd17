//! What the operator decides for one pool.

use crate::admission::Admission;
use crate::codec::{Reader, Writer};
use crate::host::{Expected, Host, HostError};
use crate::identity::Naming;
use crate::replica::ReplicaName;
use crate::snapshot::Figures;

/// `max_num_seqs` of an engine that nobody configured or reported: vLLM's own default.
pub const DEFAULT_MAX_NUM_SEQS: u32 = 256;

/// One pool's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The Envoy cluster whose endpoints are the pool's replicas.
    pub cluster: String,
    /// Whether conversations keep their homes. If not, every choice is Envoy's.
    pub affinity: bool,
    /// The load above which a home is full.
    pub spill_threshold: Limit,
    /// How much lower another replica's load must be before a turn spills there.
    pub spill_margin: Limit,
    /// `max_num_seqs` of the engines; a snapshot that brings it wins.
    pub max_num_seqs: Option<u32>,
    /// Whether a client may name the replica itself.
    pub client_pin: bool,
    /// Whether only as many conversations are admitted as the caches hold.
    pub admission: Option<Admission>,
    /// What names a conversation.
    pub naming: Naming,
    /// The replicas until a snapshot names them, and for good without a collector.
    pub replicas: Vec<ReplicaName>,
}

/// A number, or what Homing makes of the engine's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Follows the engine.
    Auto,
    /// As configured.
    Fixed(u32),
}

impl Policy {
    /// A pool with every default.
    pub fn new(cluster: impl Into<String>) -> Self {
        Self {
            cluster: cluster.into(),
            affinity: true,
            spill_threshold: Limit::Auto,
            spill_margin: Limit::Auto,
            max_num_seqs: None,
            client_pin: true,
            admission: None,
            naming: Naming::default(),
            replicas: Vec::new(),
        }
    }

    /// The load above which a replica is full: automatic is a quarter of the engine's `max_num_seqs`, at least 1.
    pub fn threshold(&self, figures: &Figures) -> u32 {
        Terms::of(self).threshold(figures)
    }

    /// How much lower another replica's load must be: automatic is the threshold itself. Less moves turns whose wait elsewhere
    /// would not have been shorter by what reading the conversation again costs.
    pub fn margin(&self, figures: &Figures) -> u32 {
        Terms::of(self).margin(figures)
    }
}

/// The part of a policy that the control role reports to the collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) affinity: bool,
    threshold: Limit,
    margin: Limit,
    max_num_seqs: u32,
    /// Whether only as many conversations are admitted as the caches hold.
    pub(crate) admits: bool,
}

const LAYOUT: u8 = 3;

impl Terms {
    pub(crate) fn of(policy: &Policy) -> Self {
        Self {
            affinity: policy.affinity,
            threshold: policy.spill_threshold,
            margin: policy.spill_margin,
            max_num_seqs: policy.max_num_seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS),
            admits: policy.admission.is_some(),
        }
    }

    /// Whether the threshold follows the engine.
    pub(crate) fn threshold_is_auto(&self) -> bool {
        self.threshold == Limit::Auto
    }

    /// Whether the margin follows the threshold.
    pub(crate) fn margin_is_auto(&self) -> bool {
        self.margin == Limit::Auto
    }

    pub(crate) fn threshold(&self, figures: &Figures) -> u32 {
        let max_num_seqs = if figures.max_num_seqs == 0 { self.max_num_seqs } else { figures.max_num_seqs };
        match self.threshold {
            Limit::Fixed(threshold) => threshold,
            Limit::Auto => (max_num_seqs / 4).max(1),
        }
    }

    pub(crate) fn margin(&self, figures: &Figures) -> u32 {
        match self.margin {
            Limit::Fixed(margin) => margin,
            Limit::Auto => self.threshold(figures).max(1),
        }
    }

    /// Tells the control role of this pool.
    pub(crate) fn publish(&self, host: &impl Host, cluster: &str) -> Result<(), HostError> {
        let mut bytes = [0; 17];
        let mut writer = Writer::over(&mut bytes);
        writer.u8(LAYOUT);
        writer.u8(u8::from(self.affinity));
        for limit in [self.threshold, self.margin] {
            let (fixed, value) = match limit {
                Limit::Auto => (0, 0),
                Limit::Fixed(value) => (1, value),
            };
            writer.u8(fixed);
            writer.u32(value);
        }
        writer.u32(self.max_num_seqs);
        writer.u8(u8::from(self.admits));
        host.write(&key(cluster), &bytes, Expected::Anything).map(drop)
    }

    /// What the route role told of a pool; `None` if it serves no such pool.
    pub(crate) fn published(host: &impl Host, cluster: &str) -> Result<Option<Self>, HostError> {
        Ok(host.read(&key(cluster))?.and_then(|stored| Self::decode(&stored.bytes)))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::open(bytes, LAYOUT)?;
        let affinity = reader.u8()? != 0;
        let mut limit = || {
            let (fixed, value) = (reader.u8()? != 0, reader.u32()?);
            Some(if fixed { Limit::Fixed(value) } else { Limit::Auto })
        };
        let (threshold, margin) = (limit()?, limit()?);
        let max_num_seqs = reader.u32()?;
        Some(Self { affinity, threshold, margin, max_num_seqs, admits: reader.u8()? != 0 })
    }
}

fn key(cluster: &str) -> String {
    format!("homing/pool/{cluster}/policy")
}
