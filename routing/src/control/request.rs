//! Reading what a collector sends, and why it may be refused.

use core::fmt;

use hashbrown::HashSet;

use crate::host::HostError;
use crate::sync::{MAX_BINDINGS, MAX_REPLICAS, MAX_SYNC_BYTES, SYNC_VERSION, SyncRequest, version_of};

/// Why an exchange was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq)]
pub enum SyncError {
    /// The body is longer than [`MAX_SYNC_BYTES`].
    TooLarge,
    /// The body is not the exchange's JSON.
    Malformed(String),
    /// The body is of another version of the exchange.
    Version(u32),
    /// A value is out of its range.
    Invalid(String),
    /// A newer snapshot has been taken already.
    Older {
        /// The generation and sequence number in force.
        newest: (u64, u64),
    },
    /// The host refused shared data or metrics.
    Host(HostError),
}

impl fmt::Display for SyncError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => {
                write!(f, "the snapshot is larger than {MAX_SYNC_BYTES} bytes: poll fewer replicas with one collector")
            }
            Self::Malformed(why) => write!(f, "the snapshot cannot be read: {why}"),
            Self::Version(version) => {
                write!(
                    f,
                    "the snapshot is of version {version}, this filter speaks {SYNC_VERSION}: run a collector of the same release"
                )
            }
            Self::Invalid(why) => write!(f, "the snapshot is not valid: {why}"),
            Self::Older { newest: (generation, sequence) } => {
                write!(f, "the snapshot is older than the last one, which has generation {generation} and sequence {sequence}")
            }
            Self::Host(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for SyncError {}

impl From<HostError> for SyncError {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

/// Reads and checks a request's body.
pub(super) fn read(body: &[u8]) -> Result<SyncRequest, SyncError> {
    if body.len() > MAX_SYNC_BYTES {
        return Err(SyncError::TooLarge);
    }
    let request: SyncRequest = serde_json::from_slice(body).map_err(|error| match version_of(body) {
        Some(version) if version != SYNC_VERSION => SyncError::Version(version),
        _ => SyncError::Malformed(error.to_string()),
    })?;
    if request.version != SYNC_VERSION {
        return Err(SyncError::Version(request.version));
    }
    check(&request)?;
    Ok(request)
}

fn check(request: &SyncRequest) -> Result<(), SyncError> {
    if request.bindings.0.len() > MAX_BINDINGS {
        return Err(SyncError::Invalid(format!("it has more than {MAX_BINDINGS} bindings")));
    }
    let mut clusters = HashSet::new();
    for pool in &request.pools {
        let cluster = &pool.cluster;
        if !clusters.insert(cluster) {
            return Err(SyncError::Invalid(format!("the pool `{cluster}` stands twice")));
        }
        if pool.replicas.len() > MAX_REPLICAS {
            return Err(SyncError::Invalid(format!("the pool `{cluster}` has more than {MAX_REPLICAS} replicas")));
        }
        if pool.bytes_per_token.is_some_and(|bytes| !(0.25..=64.0).contains(&bytes)) {
            return Err(SyncError::Invalid(format!("the bytes per token of the pool `{cluster}` are not between 0.25 and 64")));
        }
        let mut names = HashSet::new();
        for replica in &pool.replicas {
            let name = replica.replica;
            if !names.insert(name) {
                return Err(SyncError::Invalid(format!("the replica {name} stands twice in the pool `{cluster}`")));
            }
            if !(0.0..=1.0).contains(&replica.kv_usage) {
                return Err(SyncError::Invalid(format!("the KV usage of {name} is {}, not between 0 and 1", replica.kv_usage)));
            }
        }
    }
    Ok(())
}
