//! Work that does not fit the caches waits in line.

mod failures;
mod limits;
mod line;
mod stand_ins;
mod visible;

use anyhow::Result;
use homing_tests::chat_url;
use homing_tests::scripted::{Answer, Scripted, ask};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use xtask::stack::StackOptions;

/// Tokens of a prompt, and of a cache that holds one of them and not two.
const PROMPT: usize = 3_000;
const ONE_FITS: u64 = 4_500;

/// A pool that admits by working set, with these keys besides, and names no conversation but by header: a request that names none has its
/// place until it ends.
fn admitting(keys: &Value) -> StackOptions {
    let mut admission = json!({ "mode": "working_set" });
    if let (Some(admission), Some(keys)) = (admission.as_object_mut(), keys.as_object()) {
        admission.extend(keys.clone());
    }
    let pool = json!({ "admission": admission, "conversation": { "body": false, "fingerprint": false } });
    StackOptions { pool, ..StackOptions::default() }
}

/// Sends a request without a conversation that a cache of [`ONE_FITS`] holds alone.
fn send(scripted: &Scripted, name: &str) -> JoinHandle<Result<Answer>> {
    tokio::spawn(ask(chat_url(&scripted.stack), name.to_owned(), None, PROMPT))
}
