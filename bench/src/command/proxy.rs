//! `homing-bench proxy`, and the servers for it: `upstreams` and `ext-proc`.

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use homing_bench::proxy::ext_proc::ExternalProcessor;
use homing_bench::proxy::{self, Case, IdPlace, ProxyConfig, Subject, upstream};

use crate::say;

/// Sends the same requests through several listeners of one proxy, side by side, and reports what each costs beside the first.
///
/// A request is a chat request that names one of many conversations, in a header or at the end of its body alone.
#[derive(Args)]
pub(crate) struct ProxyArgs {
    /// A listener of the proxy and its name; the first one is what the others are compared with. Behind it, after commas: `keeps-homes`
    /// fails the run if a conversation does not stay with its upstream; `header-only` leaves out requests that name their conversation
    /// in the body; `helper=PID` adds the CPU time of another process.
    #[arg(long = "subject", value_name = "NAME=IP:PORT", required = true)]
    subjects: Vec<Subject>,
    /// Process id of the proxy, whose CPU time is measured.
    #[arg(long)]
    pid: u32,
    /// The proxy's workers, to be named in the report.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// How many `homing-bench upstreams` are behind each listener.
    #[arg(long, default_value_t = 4)]
    upstreams: usize,
    /// Sizes of the requests' bodies in KB.
    #[arg(long, value_delimiter = ',', default_value = "1,64,256,1024")]
    body_kb: Vec<usize>,
    /// How often each kind of request goes to each subject.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// How long each time.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Connections at once.
    #[arg(long, default_value_t = 8)]
    connections: u32,
    /// Conversations the requests belong to.
    #[arg(long, default_value_t = 4096)]
    conversations: u32,
    /// Print the report as one line of JSON.
    #[arg(long)]
    json: bool,
    /// Show progress on stderr even if that is no terminal.
    #[arg(long)]
    progress: bool,
}

/// Servers for a proxy that is measured: they answer every request at once with the same small answer.
#[derive(Args)]
pub(crate) struct UpstreamsArgs {
    /// How many, each on a free port of the loopback interface.
    #[arg(long, default_value_t = 4)]
    count: usize,
    /// Once listening, print one line of JSON, {"addresses":["127.0.0.1:PORT",..]}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

/// An external processor for Envoy: puts an upstream that it computes from a request's x-session-id into a header.
///
/// Envoy is to send it request headers alone.
#[derive(Args)]
pub(crate) struct ExtProcArgs {
    /// Addresses to choose from.
    #[arg(long, value_delimiter = ',', required = true, value_name = "IP:PORT,..")]
    upstreams: Vec<SocketAddr>,
    /// The header that carries the choice.
    #[arg(long, default_value = "x-homing-targets")]
    header: String,
    /// Once listening, print one line of JSON, {"address":"127.0.0.1:PORT"}, instead of one for people.
    #[arg(long)]
    ready_json: bool,
}

pub(crate) fn measure_proxy(args: ProxyArgs) -> Result<()> {
    let both = |kb: &usize| [IdPlace::Header, IdPlace::Body].map(|id| Case { body_bytes: kb << 10, id });
    let config = ProxyConfig {
        subjects: args.subjects,
        pid: args.pid,
        workers: args.workers,
        upstreams: args.upstreams,
        cases: args.body_kb.iter().flat_map(both).collect(),
        rounds: args.rounds,
        time: Duration::try_from_secs_f64(args.seconds).context("--seconds")?,
        connections: args.connections,
        conversations: args.conversations,
        progress: args.progress || io::stderr().is_terminal(),
    };
    let report = proxy::run(&config)?;
    if args.json { say(&serde_json::to_string(&report)?) } else { say(report.to_string().trim_end()) }
}

pub(crate) async fn upstreams(args: &UpstreamsArgs) -> Result<()> {
    let addresses: Vec<_> = upstream::start(args.count, upstream::Answer::default())?.iter().map(SocketAddr::to_string).collect();
    if args.ready_json {
        say(&serde_json::json!({ "addresses": addresses }).to_string())?;
    } else {
        say(&format!("listening on {}; Ctrl-C ends it", addresses.join(" ")))?;
    }
    std::future::pending().await
}

pub(crate) async fn ext_proc(args: &ExtProcArgs) -> Result<()> {
    let processor = ExternalProcessor::bind(&args.upstreams, &args.header)?;
    let address = processor.address()?;
    if args.ready_json {
        say(&format!("{{\"address\":\"{address}\"}}"))?;
    } else {
        say(&format!("listening on {address}; Ctrl-C ends it"))?;
    }
    processor.serve().await
}
