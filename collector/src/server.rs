//! Serving the collector's own HTTP: HTTP/1.1, to whoever reaches it, so that a client which is slow or says nothing costs little.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How long a connection may take to bring the head of a request, the first or the next: longer than proxies usually keep one that is idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// The most connections; further ones wait until one of these ends.
pub(crate) const MAX_CONNECTIONS: usize = 512;

/// One part in so many of them may be one address's; what it opens beyond that is closed, so that it locks nobody out.
const PEERS: usize = 4;

/// Answers what comes, over at most `most` connections at a time, for ever; they end with it.
pub(crate) async fn serve(mut listener: TcpListener, router: Router, most: usize) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let mut connections = JoinSet::new();
    // Each connection of an address has a clone, so that they count themselves.
    let mut peers: HashMap<IpAddr, Arc<()>> = HashMap::new();
    loop {
        tokio::select! {
            // It waits by itself where none can be accepted for want of files.
            (stream, peer) = Listener::accept(&mut listener), if connections.len() < most => {
                let of_peer = Arc::clone(peers.entry(peer.ip()).or_default());
                // The map has one, and this is one.
                if Arc::strong_count(&of_peer) - 2 >= most.div_ceil(PEERS) {
                    continue;
                }
                let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
                connections.spawn(async move {
                    let _counted = of_peer;
                    if let Err(error) = connection.await {
                        tracing::debug!("a connection to the collector's HTTP broke: {error}");
                    }
                });
            }
            Some(_) = connections.join_next() => peers.retain(|_, of_peer| Arc::strong_count(of_peer) > 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpSocket, TcpStream};
    use tokio::time::{Instant, timeout};

    use super::*;

    /// A server that answers `/` and never answers `/silence`.
    async fn start(most: usize) -> (SocketAddr, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().route("/", get(async || "here")).route("/silence", get(std::future::pending::<()>));
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, router, most));
        (address, tasks)
    }

    const ASK: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    const SILENCE: &str = "GET /silence HTTP/1.1\r\nhost: a\r\n\r\n";

    /// From 127.0.0.`peer`.
    async fn send_from(peer: u8, address: SocketAddr, text: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from(([127, 0, 0, peer], 0))).expect("an address");
        let mut stream = socket.connect(address).await.expect("a connection");
        // One that is closed at once may be closed by now.
        let _ = stream.write_all(text.as_bytes()).await;
        stream
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_brings_no_request_is_closed_in_time() {
        let (address, _tasks) = start(1).await;
        // Nothing, half a head, and nothing after a request that was answered.
        for said in ["", "GET / HTTP/1.1\r\nhost: a\r\n", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"] {
            let started = Instant::now();
            let mut stream = send_from(2, address, said).await;
            let mut answer = String::new();
            timeout(HEAD_TIMEOUT * 10, stream.read_to_string(&mut answer)).await.expect("closed").expect("text");
            assert_eq!(answer.contains("here"), said.ends_with("\r\n\r\n"), "{said:?}: {answer}");
            assert!(started.elapsed() <= HEAD_TIMEOUT * 2, "{said:?}: {:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_connection_too_many_waits_until_another_ends() {
        let (address, _tasks) = start(2).await;
        let (first, _second) = (send_from(2, address, SILENCE).await, send_from(3, address, SILENCE).await);
        let mut third = send_from(4, address, ASK).await;
        let mut answer = [0; 12];
        assert!(timeout(HEAD_TIMEOUT, third.read_exact(&mut answer)).await.is_err(), "there are two already");
        drop(first);
        third.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200");
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_cannot_lock_the_others_out() {
        let (address, _tasks) = start(2 * PEERS).await;
        let held = [send_from(2, address, SILENCE).await, send_from(2, address, SILENCE).await];
        let mut answer = [0; 12];
        let mut refused = send_from(2, address, ASK).await;
        assert!(timeout(HEAD_TIMEOUT, refused.read_exact(&mut answer)).await.expect("closed").is_err());
        send_from(3, address, ASK).await.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200");
        drop(held);
        let mut again = Err(std::io::Error::other("not asked"));
        while again.is_err() {
            again = send_from(2, address, ASK).await.read_exact(&mut answer).await;
        }
    }
}
