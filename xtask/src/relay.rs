//! A slow way to a server: what goes through it arrives later.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Relays connections until it is dropped.
#[derive(Debug)]
pub struct Relay {
    /// Where it listens.
    pub address: SocketAddr,
    listener: Option<TcpListener>,
    delay: watch::Sender<Duration>,
    tasks: JoinSet<()>,
}

impl Relay {
    /// Listens; it relays once it knows where to.
    ///
    /// # Errors
    /// If it cannot listen.
    pub async fn listen() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        Ok(Self { address, listener: Some(listener), delay: watch::Sender::new(Duration::ZERO), tasks: JoinSet::new() })
    }

    /// Relays to this server.
    pub fn lead_to(&mut self, server: SocketAddr) {
        let (Some(listener), delay) = (self.listener.take(), self.delay.subscribe()) else { return };
        self.tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let delay = delay.clone();
                connections.spawn(async move {
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
                    // Either end's closing ends both ways.
                    tokio::select! {
                        () = copy(from_client, to_server, delay.clone()) => {}
                        () = copy(from_server, to_client, delay) => {}
                    }
                });
            }
        });
    }

    /// From now on everything takes so much longer, each way.
    pub fn set_delay(&self, delay: Duration) {
        self.delay.send_replace(delay);
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, delay: watch::Receiver<Duration>) {
    let mut buffer = vec![0; 65_536];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let delay = *delay.borrow();
        if !delay.is_zero() {
            sleep(delay).await;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
