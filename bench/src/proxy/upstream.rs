//! Servers that answer at once and cost next to nothing, so that the proxy in front of them is what is measured.

use anyhow::{Context, Result};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// The most bytes a request's headers may have.
const HEAD_BYTES: usize = 16 << 10;

const ANSWER: &str = r#"{"id":"msg_1","type":"message","role":"assistant","model":"qwen3-4b","content":[{"type":"text","text":"Done."}],"stop_reason":"end_turn","usage":{"input_tokens":9,"output_tokens":3}}"#;

/// The header that says which server answered, counted from 0.
pub(super) const HEADER: &str = "x-upstream";

/// How the servers answer.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The status of every answer.
    pub status: u16,
    /// How long an answer takes.
    pub delay: Duration,
}

impl Default for Answer {
    fn default() -> Self {
        Self { status: 200, delay: Duration::ZERO }
    }
}

/// Starts `count` servers on free ports of the loopback interface. They run, each connection on a thread of its own, until the
/// process ends.
///
/// # Errors
/// If there is no port or no thread for them.
pub fn start(count: usize, answer: Answer) -> Result<Vec<SocketAddr>> {
    let server = |number: usize| {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on the loopback interface")?;
        let address = listener.local_addr()?;
        let accept = move || {
            for stream in listener.incoming().flatten() {
                // A connection that gets no thread is closed, which its client sees.
                let _ = thread::Builder::new().spawn(move || serve(stream, number, answer));
            }
        };
        thread::Builder::new().spawn(accept).context("cannot start a thread")?;
        Ok(address)
    };
    (0..count).map(server).collect()
}

/// Answers one request after the other until the client closes.
fn serve(mut stream: TcpStream, number: usize, answer: Answer) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let response = format!(
        "HTTP/1.1 {} -\r\ncontent-type: application/json\r\n{HEADER}: {number}\r\ncontent-length: {}\r\n\r\n{ANSWER}",
        answer.status,
        ANSWER.len()
    );
    let mut buffer = vec![0; 256 << 10];
    let mut filled = 0;
    loop {
        let (head, body) = loop {
            if let Some(sizes) = request_sizes(&buffer[..filled])? {
                break sizes;
            }
            let read = stream.read(&mut buffer[filled..])?;
            if read == 0 {
                return Ok(());
            }
            filled += read;
        };
        // What follows the head is read over and over into the same buffer; a client waits for its answer, so nothing follows it.
        let mut missing = (head + body).saturating_sub(filled);
        while missing > 0 {
            let read = stream.read(&mut buffer)?;
            if read == 0 {
                return Ok(());
            }
            missing = missing.saturating_sub(read);
        }
        filled = 0;
        if !answer.delay.is_zero() {
            thread::sleep(answer.delay);
        }
        stream.write_all(response.as_bytes())?;
    }
}

/// The sizes of a request's head and body; `None` if the head is not complete.
fn request_sizes(bytes: &[u8]) -> io::Result<Option<(usize, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes).map_err(io::Error::other)? {
        httparse::Status::Complete(head) => Ok(Some((head, super::number(request.headers, "content-length").unwrap_or(0)))),
        httparse::Status::Partial if bytes.len() < HEAD_BYTES => Ok(None),
        httparse::Status::Partial => Err(io::Error::other("the headers are too large")),
    }
}
