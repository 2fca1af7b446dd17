//! The clients: connections that stay open, each sending its next request when the last is answered.

use super::request::{IdPlace, Request};
use super::upstream;
use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use std::collections::{BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// An answer that takes longer than this fails the run.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes an answer may have.
const ANSWER_BYTES: usize = 64 << 10;

/// Connections to one address, and the conversations that are sent over them.
#[derive(Debug)]
pub struct Driver {
    connections: Vec<Connection>,
}

/// What came of some requests.
#[derive(Clone, Debug)]
pub struct Load {
    /// Microseconds from the first byte sent to the last byte received.
    pub latencies_us: Histogram<u64>,
    /// From the first request's start to the last one's end.
    pub elapsed: Duration,
}

impl Load {
    /// How many requests were answered.
    pub fn requests(&self) -> u64 {
        self.latencies_us.len()
    }
}

/// Which upstreams answered, and whether conversations stayed there. A conversation named in headers and one named in bodies are two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    /// Conversations that had a request.
    pub conversations: u64,
    /// Requests that another upstream answered than their conversation's first.
    pub away: u64,
    /// The upstreams that conversations had their first request at.
    pub upstreams: BTreeSet<usize>,
}

impl Homes {
    /// Fails if a conversation moved, or if not all of this many upstreams were used.
    pub(super) fn ensure_kept(&self, upstreams: usize) -> Result<()> {
        ensure!(self.away == 0, "{} requests went to another upstream than their conversation's first", self.away);
        let used = self.upstreams.len();
        ensure!(used == upstreams, "{} conversations used {used} of {upstreams} upstreams", self.conversations);
        Ok(())
    }
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    answer: Vec<u8>,
    /// Its own conversations, which no other connection has, so that a conversation has one turn at a time.
    conversations: std::ops::Range<u32>,
    next: u32,
    /// The upstream that answered a conversation's first request.
    firsts: HashMap<(IdPlace, u32), usize>,
    /// Requests that another one answered.
    away: u64,
}

/// When a connection stops.
#[derive(Clone, Copy, Debug)]
enum Until {
    Time(Instant),
    EachConversationOnce,
}

impl Driver {
    /// Connects; the conversations are shared out evenly.
    ///
    /// # Errors
    /// If nobody listens there.
    pub fn connect(address: SocketAddr, connections: u32, conversations: u32) -> Result<Self> {
        ensure!(connections > 0 && conversations >= connections, "each connection needs a conversation");
        let connect = |number: u32| {
            let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            let first = |number: u32| (u64::from(conversations) * u64::from(number) / u64::from(connections)) as u32;
            let conversations = first(number)..first(number + 1);
            let (answer, next) = (vec![0; ANSWER_BYTES], conversations.start);
            Ok(Connection { stream, answer, conversations, next, firsts: HashMap::new(), away: 0 })
        };
        Ok(Self { connections: (0..connections).map(connect).collect::<Result<_>>()? })
    }

    /// Sends requests for some time.
    ///
    /// # Errors
    /// If an answer is not a 200, or none comes.
    pub fn run_for(&mut self, request: &Request, time: Duration) -> Result<Load> {
        self.run(request, Until::Time(Instant::now() + time))
    }

    /// Sends each conversation once.
    ///
    /// # Errors
    /// If an answer is not a 200, or none comes.
    pub fn run_once(&mut self, request: &Request) -> Result<Load> {
        self.run(request, Until::EachConversationOnce)
    }

    /// Where all requests so far were answered.
    pub fn homes(&self) -> Homes {
        let mut homes = Homes::default();
        for connection in &self.connections {
            homes.conversations += connection.firsts.len() as u64;
            homes.away += connection.away;
            homes.upstreams.extend(connection.firsts.values());
        }
        homes
    }

    fn run(&mut self, request: &Request, until: Until) -> Result<Load> {
        let started = Instant::now();
        let loads: Result<Vec<_>> = thread::scope(|scope| {
            let threads: Vec<_> = self
                .connections
                .iter_mut()
                .map(|connection| {
                    let mut request = request.clone();
                    scope.spawn(move || connection.run(&mut request, until))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a connection's thread does not panic")).collect()
        });
        let elapsed = started.elapsed();
        let mut latencies_us = histogram();
        for own in loads? {
            latencies_us.add(own).context("adding up latencies")?;
        }
        Ok(Load { latencies_us, elapsed })
    }
}

/// From 1 us to a minute, with three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("these bounds are valid")
}

impl Connection {
    fn run(&mut self, request: &mut Request, until: Until) -> Result<Histogram<u64>> {
        let mut latencies_us = histogram();
        if matches!(until, Until::EachConversationOnce) {
            self.next = self.conversations.start;
        }
        loop {
            let sent = Instant::now();
            if matches!(until, Until::Time(end) if sent >= end) {
                return Ok(latencies_us);
            }
            self.stream.write_all(request.of(self.next)).context("sending a request")?;
            let upstream = self.receive()?;
            latencies_us.saturating_record(u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX));
            let first = *self.firsts.entry((request.place(), self.next)).or_insert(upstream);
            self.away += u64::from(first != upstream);
            self.next += 1;
            if self.next == self.conversations.end {
                self.next = self.conversations.start;
                if matches!(until, Until::EachConversationOnce) {
                    return Ok(latencies_us);
                }
            }
        }
    }

    /// Reads one answer to its end, and says which upstream gave it.
    fn receive(&mut self) -> Result<usize> {
        let (mut filled, mut head) = (0, None);
        while head.as_ref().is_none_or(|head: &Head| filled < head.answer_bytes) {
            ensure!(filled < self.answer.len(), "an answer has more than {ANSWER_BYTES} bytes");
            let read = self.stream.read(&mut self.answer[filled..]).context("waiting for an answer")?;
            ensure!(read > 0, "the proxy closed a connection in place of an answer");
            filled += read;
            if head.is_none() {
                head = Head::read(&self.answer[..filled])?;
            }
        }
        let head = head.filter(|head| head.answer_bytes == filled).context("an answer is longer than it says")?;
        Ok(head.upstream)
    }
}

/// What is read of an answer's head.
struct Head {
    /// The size of the answer, head and body.
    answer_bytes: usize,
    upstream: usize,
}

impl Head {
    /// `None` if the head is not complete.
    fn read(bytes: &[u8]) -> Result<Option<Self>> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(head) = response.parse(bytes).context("an answer is not HTTP/1.1")? else { return Ok(None) };
        if response.code != Some(200) {
            let body = String::from_utf8_lossy(&bytes[head..]);
            bail!("an answer has the status {}: {}", response.code.unwrap_or(0), body.trim());
        }
        let number = |name| super::number(response.headers, name);
        let body = number("content-length").context("an answer does not say how long it is")?;
        let upstream = number(upstream::HEADER).context("an answer does not say which upstream gave it")?;
        Ok(Some(Self { answer_bytes: head + body, upstream }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::upstream::Answer;
    use super::*;

    fn drive(answer: Answer, connections: u32, time: Duration) -> Result<Load> {
        let address = upstream::start(1, answer)?[0];
        Driver::connect(address, connections, 100)?.run_for(&Request::new(10_000, IdPlace::Body), time)
    }

    #[test]
    fn a_known_delay_is_what_is_measured() {
        let delay = Duration::from_millis(20);
        let load = drive(Answer { delay, ..Answer::default() }, 4, Duration::from_secs(1)).unwrap();
        let p50 = Duration::from_micros(load.latencies_us.value_at_quantile(0.5));
        assert!(load.latencies_us.min() >= 20_000, "nothing is faster than the delay: {} us", load.latencies_us.min());
        assert!(p50 < delay * 2, "{p50:?}");
        // Four at a time, each as long as the delay or longer, and at least half as many on a busy machine.
        let most = 4.0 * load.elapsed.as_secs_f64() / delay.as_secs_f64();
        assert!((most / 2.0..=most).contains(&(load.requests() as f64)), "{} of {most}", load.requests());
        assert!(load.elapsed >= Duration::from_secs(1));
    }

    #[test]
    fn every_conversation_is_sent_once() {
        let address = upstream::start(1, Answer::default()).unwrap()[0];
        let mut driver = Driver::connect(address, 3, 100).unwrap();
        for _ in 0..2 {
            assert_eq!(driver.run_once(&Request::new(1000, IdPlace::Header)).unwrap().requests(), 100);
        }
    }

    #[test]
    fn where_conversations_are_answered_is_kept_by_where_they_are_named() {
        let servers = upstream::start(2, Answer::default()).unwrap();
        let mut driver = Driver::connect(servers[0], 2, 10).unwrap();
        for place in [IdPlace::Header, IdPlace::Header, IdPlace::Body] {
            driver.run_once(&Request::new(1000, place)).unwrap();
        }
        let first_alone = Homes { conversations: 20, away: 0, upstreams: BTreeSet::from([0]) };
        assert_eq!(driver.homes(), first_alone);
        assert!(first_alone.ensure_kept(1).is_ok() && first_alone.ensure_kept(2).is_err());

        // The proxy has another idea of one connection's conversations.
        driver.connections[0].stream = TcpStream::connect(servers[1]).unwrap();
        driver.run_once(&Request::new(1000, IdPlace::Header)).unwrap();
        assert_eq!(driver.homes().away, 5);
        assert!(driver.homes().ensure_kept(1).unwrap_err().to_string().starts_with("5 requests went to another upstream"));
    }

    #[test]
    fn an_answer_that_is_no_200_fails_the_run() {
        let error = drive(Answer { status: 503, ..Answer::default() }, 2, Duration::from_secs(30)).unwrap_err();
        assert!(error.to_string().starts_with("an answer has the status 503: {"), "{error}");
    }

    #[test]
    fn a_closed_connection_fails_the_run() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut driver = Driver::connect(listener.local_addr().unwrap(), 1, 1).unwrap();
        drop(listener);
        assert!(driver.run_for(&Request::new(1000, IdPlace::Body), Duration::from_secs(30)).is_err());
    }
}
