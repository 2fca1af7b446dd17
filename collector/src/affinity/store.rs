//! Redis or Valkey as the place where bindings outlive collectors and reach other ones.
//!
//! - `<prefix>:b:<digest>` holds one binding, packed as in the exchange, and expires with the idle time.
//! - `<prefix>:changes` is a stream of what was written: each entry has the writer (`w`) and packed bindings (`b`).
//!
//! At every connection all keys are read, then what is known and not there is written, and the stream is read on from where it stood. So
//! nothing has to be remembered over a connection that breaks, and a server that lost its data gets it again. Nobody waits for the store:
//! what it is told goes through the bounded outbox. It counts as up once it has taken what it did not have.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use homing_routing::binding::{BINDING_BYTES, Binding};
use homing_routing::identity::Digest;
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamMaxlen, StreamReadReply};
use redis::{AsyncCommands as _, AsyncConnectionConfig, Client, RedisError, TlsCertificates};
use tokio::time::Instant;

use super::{Affinity, MAX_KNOWN, Teller};
use crate::config::AffinityConfig;
use crate::fleet::{lock, now_ms};
use crate::status::StoreStatus;

/// How long a command may take.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long the server waits for an entry of the stream before it says that there is none.
const BLOCK: Duration = Duration::from_secs(1);

/// The pause before the next attempt at a store that failed. Every one that fails within the longest pause doubles it: at each, all keys are
/// read.
const RETRY: Duration = Duration::from_millis(500);
const MAX_RETRY: Duration = Duration::from_secs(30);

/// Bindings that are written at once, and keys that are read at once.
const WRITTEN: usize = 256;
const READ: usize = 2_000;

/// Entries the stream keeps, about; a reader that is further behind has lost its connection, and reads all keys when it is back.
const STREAM_LENGTH: usize = 2_048;

/// The state of the store, for the console and the metrics.
#[derive(Debug)]
pub struct StoreLink {
    config: AffinityConfig,
    up: AtomicBool,
    problem: Mutex<Option<String>>,
    read: AtomicU64,
    written: AtomicU64,
}

/// Why the store is not used now.
#[derive(Debug, thiserror::Error)]
enum StoreError {
    #[error("the store cannot be used ({0}); is affinity.store right, does the server run, and does it take writes?")]
    Redis(#[from] RedisError),
    #[error("{0}")]
    Config(String),
}

// === impl StoreLink ===

impl StoreLink {
    /// A store that has not been reached yet.
    pub fn new(config: &AffinityConfig) -> Self {
        let (up, problem) = (AtomicBool::new(false), Mutex::new(None));
        Self { config: config.clone(), up, problem, read: AtomicU64::new(0), written: AtomicU64::new(0) }
    }

    /// What is shown of it.
    pub(crate) fn status(&self, dropped: u64) -> StoreStatus {
        StoreStatus {
            url: self.config.to_string(),
            up: self.up.load(Ordering::Relaxed),
            problem: lock(&self.problem).clone(),
            read: self.read.load(Ordering::Relaxed),
            written: self.written.load(Ordering::Relaxed),
            dropped,
        }
    }

    fn is_up(&self) {
        if self.up.swap(true, Ordering::Relaxed) {
            return;
        }
        *lock(&self.problem) = None;
        tracing::info!("conversations' homes are kept in {}", self.config);
    }

    fn is_down(&self, error: &StoreError) {
        self.up.store(false, Ordering::Relaxed);
        let text = error.to_string();
        let mut problem = lock(&self.problem);
        if problem.is_none() {
            tracing::warn!("{}: {text}", self.config);
        }
        *problem = Some(text);
    }

    fn client(&self) -> Result<Client, StoreError> {
        let info = self.config.connection().map_err(StoreError::Config)?;
        let Some(path) = &self.config.ca_file else { return Ok(Client::open(info)?) };
        let root_cert = std::fs::read(path)
            .map_err(|error| StoreError::Config(format!("affinity.ca_file {} cannot be read: {error}", path.display())))?;
        Ok(Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert: Some(root_cert) })?)
    }

    fn key(&self, conversation: Digest) -> String {
        format!("{}:b:{conversation}", self.config.prefix)
    }

    fn stream(&self) -> String {
        format!("{}:changes", self.config.prefix)
    }
}

/// Keeps the store and what is known alike, for ever. `writer` tells this collector from others.
pub(crate) async fn run(affinity: Arc<Affinity>, link: Arc<StoreLink>, writer: u64) {
    let mut pause = RETRY;
    loop {
        let started = Instant::now();
        let Err(error) = session(&affinity, &link, writer).await;
        link.is_down(&error);
        if started.elapsed() > MAX_RETRY {
            pause = RETRY;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY);
    }
}

/// One connection, until it breaks.
async fn session(affinity: &Affinity, link: &StoreLink, writer: u64) -> Result<Infallible, StoreError> {
    let client = link.client()?;
    let config = |timeout| AsyncConnectionConfig::new().set_connection_timeout(Some(TIMEOUT)).set_response_timeout(Some(timeout));
    let mut connection = client.get_multiplexed_async_connection_with_config(&config(TIMEOUT)).await?;
    let waiting = client.get_multiplexed_async_connection_with_config(&config(BLOCK + TIMEOUT)).await?;
    let from = newest_entry(&mut connection, link).await?;
    let stored = load(&mut connection, affinity, link).await?;
    affinity.set_loaded();
    affinity.store_has_only(&stored);
    drop(stored);
    affinity.tell_store();
    let (_, never) = tokio::try_join!(write(connection, affinity, link, writer), follow(waiting, affinity, link, writer, from))?;
    Ok(never)
}

/// The stream's newest entry, from which on it is read.
async fn newest_entry(connection: &mut MultiplexedConnection, link: &StoreLink) -> Result<String, RedisError> {
    let newest: redis::streams::StreamRangeReply = connection.xrevrange_count(link.stream(), "+", "-", 1).await?;
    Ok(newest.ids.into_iter().next().map_or_else(|| "0-0".to_owned(), |entry| entry.id))
}

/// Reads every key, and takes in what is there.
async fn load(
    connection: &mut MultiplexedConnection,
    affinity: &Affinity,
    link: &StoreLink,
) -> Result<HashMap<Digest, Binding>, RedisError> {
    let mut stored = HashMap::new();
    let mut cursor = 0_u64;
    let pattern = format!("{}:b:*", link.config.prefix);
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(READ);
        let (next, keys): (u64, Vec<String>) = scan.query_async(connection).await?;
        if !keys.is_empty() {
            let values: Vec<Option<Vec<u8>>> = connection.mget(&keys).await?;
            let bindings: Vec<_> = values.iter().flatten().filter_map(|bytes| Binding::unpack(bytes)).collect();
            take(affinity, link, &bindings);
            stored.extend(bindings.into_iter().map(|binding| (binding.conversation, binding)));
        }
        cursor = next;
        // Whoever can write to the store can fill it; this collector keeps no more anyway.
        if cursor == 0 || stored.len() >= MAX_KNOWN {
            return Ok(stored);
        }
    }
}

/// Writes what the store does not have, and what the outbox brings.
async fn write(
    mut connection: MultiplexedConnection,
    affinity: &Affinity,
    link: &StoreLink,
    writer: u64,
) -> Result<Infallible, StoreError> {
    let Some(outbox) = &affinity.outbox else { return Ok(std::future::pending().await) };
    loop {
        let bindings = if outbox.take_behind() { affinity.unstored() } else { outbox.take(WRITTEN) };
        for chunk in bindings.chunks(WRITTEN) {
            let expires_s = affinity.idle_s();
            let () = changes(link, writer, chunk, expires_s).query_async(&mut connection).await?;
            affinity.were_written(chunk);
            link.written.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        // It has everything. One that only answers reads is found out at the next change.
        link.is_up();
        if bindings.is_empty() {
            outbox.arrived().await;
        }
    }
}

/// What writes these bindings: in one transaction, so that the stream has changes in the order in which keys got them.
fn changes(link: &StoreLink, writer: u64, bindings: &[Binding], expires_s: u32) -> redis::Pipeline {
    let packed: Vec<u8> = bindings.iter().flat_map(Binding::pack).collect();
    let mut changes = redis::pipe();
    changes.atomic();
    for binding in bindings {
        changes.set_ex(link.key(binding.conversation), &binding.pack()[..], expires_s.into()).ignore();
    }
    let entry = [("w", writer.to_string().into_bytes()), ("b", packed)];
    changes.xadd_maxlen(link.stream(), StreamMaxlen::Approx(STREAM_LENGTH), "*", &entry).ignore();
    changes.expire(link.stream(), i64::from(expires_s).max(3_600)).ignore();
    changes
}

/// Takes in what other collectors write.
async fn follow(
    mut connection: MultiplexedConnection,
    affinity: &Affinity,
    link: &StoreLink,
    writer: u64,
    mut from: String,
) -> Result<Infallible, StoreError> {
    let own = writer.to_string().into_bytes();
    loop {
        let mut read = redis::cmd("XREAD");
        read.arg("COUNT").arg(64).arg("BLOCK").arg(BLOCK.as_millis() as u64).arg("STREAMS").arg(link.stream()).arg(&from);
        let reply: Option<StreamReadReply> = read.query_async(&mut connection).await?;
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            if entry.get::<Vec<u8>>("w").as_deref() != Some(&own) {
                let packed: Vec<u8> = entry.get("b").unwrap_or_default();
                take(affinity, link, &unpacked(&packed));
            }
            from = entry.id;
        }
    }
}

/// The bindings of an entry of the stream; what is none among them is left out.
fn unpacked(entry: &[u8]) -> Vec<Binding> {
    entry.chunks(BINDING_BYTES).filter_map(Binding::unpack).collect()
}

fn take(affinity: &Affinity, link: &StoreLink, bindings: &[Binding]) {
    affinity.learn(Teller::Store, bindings, now_ms(), true);
    link.read.fetch_add(bindings.len() as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests;
