//! Serving the collector's own HTTP: HTTP/1.1, to whoever reaches it, so that a client which is slow or says nothing costs little.

use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How long a connection may take to bring the head of a request, the first or the next.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The most connections; further ones wait until one of these ends.
pub(crate) const MAX_CONNECTIONS: usize = 512;

/// Answers what comes, over at most `most` connections at a time, for ever; they end with it.
pub(crate) async fn serve(mut listener: TcpListener, router: Router, most: usize) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            // It waits by itself where none can be accepted for want of files.
            (stream, _) = Listener::accept(&mut listener), if connections.len() < most => {
                let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
                connections.spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!("a connection to the collector's HTTP broke: {error}");
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
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

    async fn send(address: SocketAddr, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(text.as_bytes()).await.expect("sent");
        stream
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_brings_no_request_is_closed_in_time() {
        let (address, _tasks) = start(1).await;
        // Nothing, half a head, and nothing after a request that was answered.
        for said in ["", "GET / HTTP/1.1\r\nhost: a\r\n", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"] {
            let started = Instant::now();
            let mut stream = send(address, said).await;
            let mut answer = String::new();
            timeout(HEAD_TIMEOUT * 10, stream.read_to_string(&mut answer)).await.expect("closed").expect("text");
            assert_eq!(answer.contains("here"), said.ends_with("\r\n\r\n"), "{said:?}: {answer}");
            assert!(started.elapsed() <= HEAD_TIMEOUT * 2, "{said:?}: {:?}", started.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_connection_too_many_waits_until_another_ends() {
        let (address, _tasks) = start(2).await;
        let silence = "GET /silence HTTP/1.1\r\nhost: a\r\n\r\n";
        let (first, _second) = (send(address, silence).await, send(address, silence).await);
        let mut third = send(address, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let mut answer = [0; 12];
        assert!(timeout(HEAD_TIMEOUT, third.read_exact(&mut answer)).await.is_err(), "there are two already");
        drop(first);
        third.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200");
    }
}
