//! What is read of a store, and what becomes of one that takes no writes or has lost its data.

use std::collections::BTreeSet;

use homing_corpus::mutated;
use homing_routing::replica::ReplicaId;
use homing_routing::sync::MAX_BINDINGS;
use proptest::prelude::*;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::*;

const NOW_MS: u64 = 1_796_000_000_000;

/// An entry as another collector writes it.
fn entry(count: u64) -> Vec<u8> {
    let bindings = (1..=count).map(|n| Binding {
        conversation: Digest(n.into()),
        home: ReplicaId(n),
        bound_at_ms: NOW_MS - n,
        last_turn_s: (NOW_MS / 1000) as u32,
        bytes: 5_000,
    });
    bindings.flat_map(|binding| binding.pack()).collect()
}

proptest! {
    #[test]
    fn any_entry_is_bindings_that_were_in_it_and_none_that_wins_for_ever(bytes in mutated([entry(1), entry(5), Vec::new()])) {
        let bindings = unpacked(&bytes);
        prop_assert!(bindings.iter().all(|binding| bytes.chunks(BINDING_BYTES).any(|packed| packed == binding.pack())));
        let affinity = Affinity::new(true);
        affinity.learn(Teller::Store, &bindings, NOW_MS, true);
        let batch = affinity.batch(0, affinity.from_start());
        prop_assert!(batch.bindings.len() <= bindings.len().min(MAX_BINDINGS));
        // A later home that an Envoy tells wins over each of them, seconds after.
        for binding in &batch.bindings {
            let later = Binding { home: ReplicaId(99), bound_at_ms: NOW_MS + 60_000, ..*binding };
            affinity.learn(Teller::Envoy(0), &[later], NOW_MS + 60_000, true);
        }
        prop_assert!(affinity.all().iter().all(|binding| binding.home == ReplicaId(99)));
    }
}

/// A server that has nothing, speaks as much of Redis' protocol as is needed, and remembers which keys it was told.
#[derive(Default)]
struct FakeStore {
    /// Whether it refuses writes, as a replica of Redis does.
    reads_only: bool,
    /// When all its keys were read.
    loads: Mutex<Vec<Instant>>,
    keys: Mutex<BTreeSet<Vec<u8>>>,
}

impl FakeStore {
    /// Serves until the test ends; returns the way to it.
    async fn serve(self: &Arc<Self>) -> Arc<StoreLink> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let store = format!("redis://{}", listener.local_addr().expect("an address"));
        let this = Arc::clone(self);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let this = Arc::clone(&this);
                // It ends with the connection.
                tokio::spawn(async move { this.answer(stream).await.unwrap_or_default() });
            }
        });
        let config = AffinityConfig { store, password_file: None, ca_file: None, prefix: "homing".to_owned() };
        Arc::new(StoreLink::new(&config))
    }

    async fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut queued = None;
        let mut answers = String::new();
        loop {
            let command = command(&mut stream).await?;
            let name = String::from_utf8_lossy(&command[0]).to_uppercase();
            let answer = match name.as_str() {
                "XREVRANGE" => "*0\r\n".to_owned(),
                "SCAN" => {
                    lock(&self.loads).push(Instant::now());
                    "*2\r\n$1\r\n0\r\n*0\r\n".to_owned()
                }
                // Others write nothing.
                "XREAD" => {
                    tokio::time::sleep(BLOCK).await;
                    "*-1\r\n".to_owned()
                }
                "MULTI" => {
                    queued = Some(0);
                    "+OK\r\n".to_owned()
                }
                "EXEC" => match queued.take() {
                    Some(count) if !self.reads_only => format!("*{count}\r\n{}", "+OK\r\n".repeat(count)),
                    _ => "-EXECABORT Transaction discarded because of previous errors.\r\n".to_owned(),
                },
                "SETEX" | "XADD" | "EXPIRE" if self.reads_only => {
                    "-READONLY You can't write against a read only replica.\r\n".to_owned()
                }
                "SETEX" | "XADD" | "EXPIRE" => {
                    queued = queued.map(|count: usize| count + 1);
                    if name == "SETEX" {
                        lock(&self.keys).insert(command[1].clone());
                    }
                    "+QUEUED\r\n".to_owned()
                }
                _ => "+OK\r\n".to_owned(),
            };
            answers += &answer;
            if stream.buffer().is_empty() {
                stream.get_mut().write_all(answers.as_bytes()).await?;
                answers.clear();
            }
        }
    }
}

/// The next command: an array of strings, each with its length.
async fn command(stream: &mut BufReader<TcpStream>) -> std::io::Result<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    for _ in 0..length(stream).await? {
        let mut part = vec![0; length(stream).await? + 2];
        stream.read_exact(&mut part).await?;
        part.truncate(part.len() - 2);
        parts.push(part);
    }
    Ok(parts)
}

/// A line such as `*3` or `$12`.
async fn length(stream: &mut BufReader<TcpStream>) -> std::io::Result<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let length = line.trim_end().get(1..).and_then(|digits| digits.parse().ok());
    length.ok_or_else(|| std::io::Error::other("no command"))
}

/// An affinity that knows this many bindings, which the store was told.
fn knows(count: u64) -> Arc<Affinity> {
    let affinity = Affinity::new(true);
    affinity.learn(Teller::Envoy(0), &unpacked(&entry(count)), NOW_MS, true);
    Arc::new(affinity)
}

/// Waits until it is so; the store's time-outs are a second.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap_or_else(|_| panic!("never seen: {what}"));
}

#[tokio::test]
async fn a_store_that_can_be_read_and_not_written_is_never_up_and_is_asked_less_and_less() {
    let store = Arc::new(FakeStore { reads_only: true, ..FakeStore::default() });
    let link = store.serve().await;
    let task = tokio::spawn(run(knows(1), Arc::clone(&link), 1));
    until("three attempts", || {
        assert!(!link.status(0).up, "it takes no writes");
        lock(&store.loads).len() >= 3
    })
    .await;
    task.abort();
    assert!(link.status(0).problem.is_some_and(|problem| problem.contains("the store cannot be used")));
    let loads = lock(&store.loads);
    assert!(loads[2] - loads[1] >= RETRY * 2, "{loads:?}");
}

#[tokio::test]
async fn a_store_that_lost_its_data_gets_more_than_can_wait_for_it() {
    const COUNT: u64 = 70_000;
    let store = Arc::new(FakeStore::default());
    let link = store.serve().await;
    let affinity = knows(COUNT);
    assert!(affinity.dropped() > 0, "more than the outbox holds");
    let task = tokio::spawn(run(Arc::clone(&affinity), Arc::clone(&link), 1));
    until("all of them there", || link.status(0).written >= COUNT).await;
    task.abort();
    assert_eq!(lock(&store.keys).len() as u64, COUNT);
    assert!(link.status(0).up && affinity.unstored().is_empty());
}
