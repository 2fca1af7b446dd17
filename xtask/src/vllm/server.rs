//! Starts vLLM servers.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::sleep;

use super::{Vllm, install::folder};
use crate::process::Process;
use crate::stack::{MODEL, Replica};
use crate::tools::say;

/// How long servers have to start. One that fails ends and is noticed at once; this is for one that hangs, on a busy machine.
const START: Duration = Duration::from_secs(600);

/// Servers listen between these ports, below those that the kernel gives to whoever asks for any: a server takes ten seconds
/// until it listens, and nobody must get its port meanwhile.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

impl Vllm {
    /// Starts a server without waiting for it. Its log is `replica-<number>.log`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn launch(&self, number: usize, address: SocketAddr, more: &[String], dir: &Path) -> Result<Replica> {
        let path = |path: &Path| path.display().to_string();
        let mut args = vec![path(&folder().join("supervise.py")), path(&self.program()), "serve".into(), path(&self.model())];
        args.extend(["--host".into(), address.ip().to_string(), "--port".into(), address.port().to_string()]);
        args.extend(["--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32"].map(str::to_owned));
        // Compiling the model would take longer than all that is asked of it.
        args.push("--enforce-eager".to_owned());
        args.extend(["--max-num-seqs", "32", "--max-num-batched-tokens", "2048", "--max-model-len", "16384"].map(str::to_owned));
        // 131,072 tokens of this model: eight conversations of the longest kind.
        args.extend(["--block-size", "32", "--kv-cache-memory-bytes", "67108864"].map(str::to_owned));
        // Polls would drown what else the log says.
        args.extend(
            ["--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", "/health,/metrics"].map(str::to_owned),
        );
        args.extend_from_slice(more);
        let env = [
            // Nothing is asked of, or told to, anyone else.
            ("HF_HUB_OFFLINE", "1".to_owned()),
            ("VLLM_NO_USAGE_STATS", "1".to_owned()),
            // One core a server, wherever the kernel puts it: several servers share few.
            ("OMP_NUM_THREADS", "1".to_owned()),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind".to_owned()),
            ("TORCHDYNAMO_DISABLE", "1".to_owned()),
            // What it writes goes when the stack goes.
            ("TMPDIR", path(dir)),
            ("HF_HOME", path(&dir.join("huggingface"))),
            ("VLLM_CACHE_ROOT", path(&dir.join("vllm-cache"))),
            ("VLLM_CONFIG_ROOT", path(&dir.join("vllm-config"))),
        ];
        let process = Process::start_group(&format!("replica-{number}"), &self.python(), &args, &env, dir)?;
        Ok((process, address))
    }
}

/// Waits until every server says it is healthy.
///
/// # Errors
/// If one ends or takes too long; the message has its last words.
pub async fn wait_until_healthy(servers: &mut [Replica]) -> Result<()> {
    say(&format!("starting vLLM, servers: {}; half a minute, more if they are many or the machine is busy", servers.len()));
    let client = reqwest::Client::builder().timeout(Duration::from_secs(2)).build()?;
    let (started, mut told) = (Instant::now(), 0);
    loop {
        let mut healthy = 0;
        for (process, address) in &mut *servers {
            process.check()?;
            let answer = client.get(format!("http://{address}/health")).send().await;
            healthy += usize::from(answer.is_ok_and(|answer| answer.status().is_success()));
        }
        let seconds = started.elapsed().as_secs();
        if healthy == servers.len() {
            say(&format!("vLLM is up; it took {seconds} s"));
            return Ok(());
        }
        if started.elapsed() > START {
            let tails: Vec<_> = servers.iter().map(|(process, _)| process.tail()).collect();
            bail!("vLLM did not start within {START:?}.\n{}", tails.join("\n\n"));
        }
        if seconds / 10 > told {
            told = seconds / 10;
            say(&format!("  {healthy} of {} up, {seconds} s", servers.len()));
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// Loopback addresses that nobody listens on.
///
/// # Errors
/// If there are not as many.
pub fn free_addresses(count: usize) -> Result<Vec<SocketAddr>> {
    // Two stacks that start at the same time do not look at the same ports first.
    let first = usize::try_from(std::process::id())? * 16 % PORTS.len();
    // Nor do two of one process.
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    let first = first + TAKEN.fetch_add(count, Ordering::Relaxed);
    let ports = PORTS.cycle().skip(first % PORTS.len()).take(PORTS.len());
    let addresses = ports.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let free: Vec<_> = addresses.filter(|address| TcpListener::bind(address).is_ok()).take(count).collect();
    if free.len() < count {
        bail!("only {} free ports between {} and {}", free.len(), PORTS.start, PORTS.end);
    }
    Ok(free)
}
