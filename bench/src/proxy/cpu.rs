//! How much CPU a process has used.

use anyhow::{Context, Result};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use std::time::Duration;

/// The time that all threads of a process, those that have ended too, have spent on a CPU, in user space and in the kernel. It never falls.
///
/// # Errors
/// If there is no such process.
pub fn time(pid: u32) -> Result<Duration> {
    let process = Pid::from_raw(i32::try_from(pid)?);
    let clock = clock_getcpuclockid(process).with_context(|| format!("there is no process {pid}"))?;
    Ok(clock.now().with_context(|| format!("process {pid} has ended"))?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::process::{Child, Command, Stdio};
    use std::thread;
    use std::time::Instant;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn work_counts_and_waiting_does_not() {
        let (busy, idle) = (shell("while :; do :; done"), shell("read line"));
        let waited = Instant::now();
        while time(busy.id()).unwrap() < Duration::from_millis(200) {
            assert!(waited.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(5));
        }
        let spent = time(idle.id());
        end(busy);
        end(idle);
        assert!(spent.unwrap() < Duration::from_millis(100));
    }

    #[test]
    fn the_work_of_a_thread_that_has_ended_still_counts() {
        let before = time(std::process::id()).unwrap();
        let worked = thread::spawn(|| {
            let started = time(std::process::id()).unwrap();
            while time(std::process::id()).unwrap() - started < Duration::from_millis(50) {
                black_box((0..10_000).map(black_box).sum::<u64>());
            }
        });
        worked.join().unwrap();
        assert!(time(std::process::id()).unwrap() - before >= Duration::from_millis(50));
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        let ended = shell("exit");
        let pid = ended.id();
        ended.wait_with_output().unwrap();
        assert!(time(pid).is_err());
    }
}
