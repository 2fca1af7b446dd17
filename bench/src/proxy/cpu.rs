//! How much CPU a process has used.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::time::Duration;

/// The time that all threads of a process have spent on a CPU, in user space and in the kernel.
///
/// # Errors
/// If there is no such process, or the kernel does not account for it.
pub fn time(pid: u32) -> Result<Duration> {
    let threads = format!("/proc/{pid}/task");
    let mut total = 0;
    for thread in fs::read_dir(&threads).with_context(|| format!("there is no process {pid}"))? {
        // Nanoseconds, where the `stat` file has hundredths of a second.
        let path = thread?.path().join("schedstat");
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let spent = text.split_whitespace().next().and_then(|field| field.parse::<u64>().ok());
        total += spent.with_context(|| format!("{} has `{text}` where a time was expected", path.display()))?;
    }
    ensure!(total > 0, "the kernel has no CPU times in {threads}/*/schedstat: CONFIG_SCHED_INFO is needed");
    Ok(Duration::from_nanos(total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn work_on_any_thread_counts_and_sleep_does_not() {
        let (pid, worked) = (std::process::id(), Duration::from_millis(200));
        let own = || fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        let before = time(pid).unwrap();
        let thread = thread::spawn(move || {
            let nanos = || own().split_whitespace().next().unwrap().parse::<u64>().unwrap();
            while nanos() < 200_000_000 {
                black_box((0..10_000).map(black_box).sum::<u64>());
            }
            // It stays until it has been counted.
            thread::park_timeout(Duration::from_secs(30));
        });
        let waited = Instant::now();
        while time(pid).unwrap() - before < worked {
            assert!(waited.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(5));
        }
        thread.thread().unpark();
        thread.join().unwrap();

        let mut child = std::process::Command::new("sleep").arg("5").spawn().unwrap();
        thread::sleep(Duration::from_millis(300));
        let idle = time(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(idle.unwrap() < Duration::from_millis(200));
    }
}
