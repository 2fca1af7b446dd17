//! Waiting for a condition instead of for some time.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};

/// How long a condition may take to hold.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often it is looked whether it does.
const STEP: Duration = Duration::from_millis(20);

/// Waits until a condition holds.
///
/// # Errors
/// If it does not within half a minute, or cannot be told.
pub async fn eventually(what: &str, condition: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    within(PATIENCE, what, condition).await
}

/// Waits until a condition holds.
///
/// # Errors
/// If it does not in time, or cannot be told.
pub async fn within(patience: Duration, what: &str, mut condition: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + patience;
    while !condition().await? {
        ensure!(Instant::now() < deadline, "waited {patience:?} for {what}");
        sleep(STEP).await;
    }
    Ok(())
}
