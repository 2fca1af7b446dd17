//! Pushing snapshots, end to end: what a fake control listener gets, and what the API shows of its answers.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::fakes::{
    Behaviour, EnvoyState, FakeEnvoy, FakeReplica, IDLE, Metrics, binding, config, envoys, free_address, run, says, serve_unix,
};
use homing_routing::sync::{Peers, ReplicaState, SYNC_VERSION, SyncRequest};

async fn replica() -> FakeReplica {
    FakeReplica::start(Metrics::Text(IDLE.to_owned())).await
}

#[tokio::test]
async fn an_envoy_gets_snapshots_and_what_it_answers_is_shown() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    let seen = collector.until_envoy(0, "five answers", |envoy| envoy["answered"].as_u64() >= Some(5)).await;
    let answered = &seen["pools"][0]["replicas"][0];
    assert_eq!((&answered["in_flight"], &answered["spill_threshold"]), (&3.into(), &8.into()));
    assert!(seen["problem"].is_null() && seen["standby"] == false);

    collector.until_replica(0, "ready").await;
    let before = envoy.state.taken().len();
    collector.until_envoy(0, "a later answer", |envoy| envoy["answered"].as_u64() > Some(before as u64 + 1)).await;
    let taken = envoy.state.taken();
    let sequences: Vec<_> = taken.iter().map(|request| request.sequence).collect();
    assert_eq!(sequences, (1..=taken.len() as u64).collect::<Vec<_>>());
    let last = taken.last().expect("a snapshot");
    assert_eq!(last.version, SYNC_VERSION);
    assert!(taken.iter().all(|request| request.generation == last.generation && request.generation > 1_700_000_000_000));
    let report = &last.pools[0].replicas[0];
    assert_eq!((last.pools[0].cluster.as_str(), report.state, report.max_num_seqs), ("pool", ReplicaState::Ready, 32));
    assert_eq!(report.replica.address, replica.address());
}

#[tokio::test]
async fn a_connection_is_kept_for_a_second_so_that_the_process_of_a_hot_restart_is_found() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    let connections = || envoy.server.connections.load(Ordering::SeqCst);
    collector.until("a third connection", |_| connections() >= 3).await;
    // One for each exchange would be as many.
    assert!(envoy.state.taken().len() > 2 * connections(), "{} exchanges", envoy.state.taken().len());
}

#[tokio::test]
async fn the_first_snapshot_calls_no_replica_down_that_was_only_not_asked_yet() {
    let (first, second) = (replica().await, replica().await);
    let silent = FakeReplica::start(Metrics::Silence).await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    let addresses = [first.address(), silent.address(), second.address()];
    let text = config(&addresses, &envoys(&[&format!("url: '{}'", envoy.url())]));
    let collector = run(&text.replace("interval: 50ms", "interval: 500ms")).await;
    collector.until("a snapshot", |_| !envoy.state.taken().is_empty()).await;
    let states: Vec<_> = envoy.state.taken()[0].pools[0].replicas.iter().map(|report| report.state).collect();
    assert_eq!(states, [ReplicaState::Ready, ReplicaState::Down, ReplicaState::Ready]);
}

#[tokio::test]
async fn envoys_that_are_away_or_silent_hold_up_no_other() {
    let replica = replica().await;
    let away = free_address().await;
    let silent = FakeEnvoy::start(Behaviour::Silence).await;
    let good = FakeEnvoy::start(Behaviour::Obey).await;
    let urls = [format!("url: 'http://{away}'"), format!("url: '{}'", silent.url()), format!("url: '{}'", good.url())];
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    // The silent one is given up after a second; the good one gets a snapshot every 50 ms meanwhile.
    let status = collector.until("a timeout", |status| says(&status["envoys"][1]["problem"], "no answer within 1 s")).await;
    assert!(says(&status["envoys"][0]["problem"], "cannot be reached"), "{status:#}");
    assert!(status["envoys"][2]["answered"].as_u64() >= Some(5), "{status:#}");
}

#[tokio::test]
async fn an_envoy_that_comes_late_or_restarts_gets_the_next_snapshot() {
    let replica = replica().await;
    let address = free_address().await;
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: 'http://{address}'")]))).await;
    collector.until_envoy(0, "away", |envoy| says(&envoy["problem"], "cannot be reached")).await;
    let first = FakeEnvoy::start_at(address, Behaviour::Obey).await;
    collector.until_envoy(0, "taken", |envoy| envoy["problem"].is_null() && envoy["answered"].as_u64() >= Some(1)).await;
    let last = first.state.taken().last().expect("a snapshot").sequence;
    first.server.stop().await;
    let second = FakeEnvoy::start_at(address, Behaviour::Obey).await;
    collector.until("a snapshot for the second", |_| !second.state.taken().is_empty()).await;
    assert!(second.state.taken()[0].sequence > last);
}

#[tokio::test]
async fn a_token_is_sent_and_a_changed_token_file_is_read_again() {
    for refusal in [401, 403] {
        let replica = replica().await;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("token");
        std::fs::write(&file, "first\n").expect("a file");
        let envoy = FakeEnvoy::start(Behaviour::Want("first", refusal)).await;
        let entry = format!("url: '{}', token_file: '{}'", envoy.url(), file.display());
        let collector = run(&config(&[replica.address()], &envoys(&[&entry]))).await;
        collector.until_envoy(0, "taken", |envoy| envoy["answered"].as_u64() >= Some(1)).await;

        envoy.set(Behaviour::Want("second", refusal));
        let refused = collector.until_envoy(0, "refused", |envoy| says(&envoy["problem"], &refusal.to_string())).await;
        assert!(says(&refused["problem"], "token_file"), "{refused:#}");
        std::fs::write(&file, "second\n").expect("a file");
        collector.until_envoy(0, "taken again", |envoy| envoy["problem"].is_null()).await;
    }
}

#[tokio::test]
async fn a_token_in_the_configuration_is_sent() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Want("abc", 401)).await;
    let entry = format!("url: '{}', token: abc", envoy.url());
    let collector = run(&config(&[replica.address()], &envoys(&[&entry]))).await;
    collector.until_envoy(0, "taken", |envoy| envoy["answered"].as_u64() >= Some(1)).await;
}

#[tokio::test]
async fn what_an_envoy_refuses_is_shown_with_what_to_do_and_it_is_asked_less_often() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Refuse(404, "no\nsuch <path>")).await;
    let began = Instant::now();
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    let seen = collector.until_envoy(0, "refused", |envoy| says(&envoy["problem"], "404 (no such <path>)")).await;
    assert!(says(&seen["problem"], "`role: control`"), "{seen:#}");
    assert_eq!(seen["answered"], 0);
    collector.until("thirty polls", |_| replica.asked() >= 30).await;
    // Both begin with every 50 ms; here the pause doubles up to half a second, at 0, 100, 300, 700 ms and then every 500 ms.
    let asked = envoy.state.asked.load(Ordering::SeqCst);
    let most = 4 + began.elapsed().as_millis() / 500;
    assert!(asked as u128 <= most, "{asked} times instead of {most} at most");
}

#[tokio::test]
async fn an_answer_that_is_none_is_shown_and_so_is_a_later_collector() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Say("<html>")).await;
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    collector.until_envoy(0, "not an answer", |envoy| says(&envoy["problem"], "its answer is not one of")).await;
    envoy.set(Behaviour::Say(r#"{"version":9,"generation":0,"sequence":0,"pools":[],"bindings":[],"bindings_dropped":0}"#));
    collector.until_envoy(0, "another version", |envoy| says(&envoy["problem"], "version 9 instead of 2")).await;
}

#[tokio::test]
async fn a_collector_that_stands_by_shows_what_it_is_answered_and_sends_no_homes() {
    let replica = replica().await;
    let envoys_ = [FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Standby).await];
    let urls = envoys_.each_ref().map(|envoy| format!("url: '{}'", envoy.url()));
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    let seen = collector.until_envoy(1, "standby", |envoy| envoy["standby"] == true).await;
    assert!(seen["problem"].is_null() && seen["connected"] == true, "{seen:#}");
    let told = binding(1, replica.address());
    envoys_[0].state.tell(&[told]);
    collector.until("the home", |status| status["affinity"]["conversations"] == 1).await;
    collector
        .until_envoy(1, "five more answers", |now| now["answered"].as_u64() >= Some(seen["answered"].as_u64().unwrap_or(0) + 5))
        .await;
    assert_eq!(envoys_[1].state.got(), []);
    // The other collector is gone: this one tells what it knows.
    envoys_[1].set(Behaviour::Obey);
    collector.until("the home at the second", |_| !envoys_[1].state.got().is_empty()).await;
    assert_eq!(envoys_[1].state.got()[0], told);
}

#[tokio::test]
async fn what_one_envoy_tells_reaches_the_others_between_snapshots() {
    let replica = replica().await;
    let all = [FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Obey).await];
    let urls = all.each_ref().map(|envoy| format!("url: '{}'", envoy.url()));
    let text = config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)));
    // Snapshots so seldom that homes must travel without them.
    let collector = run(&text.replace("interval: 50ms", "interval: 2s")).await;
    collector.until("snapshots", |status| (0..2).all(|n| status["envoys"][n]["answered"].as_u64() >= Some(2))).await;
    let told = binding(1, replica.address());
    all[0].state.tell(&[told]);
    collector.until("the home at the second", |_| !all[1].state.got().is_empty()).await;
    assert_eq!((all[0].state.got(), all[1].state.got()), (vec![], vec![told]));
    let with_homes = all[1].state.taken().into_iter().filter(|request| !request.bindings.is_empty());
    assert!(with_homes.into_iter().all(|request| request.pools.is_empty()));
    let status = collector.status().await;
    assert_eq!(status["envoys"][1]["pools"][0]["replicas"].as_array().map(Vec::len), Some(1), "it is still shown");
}

#[tokio::test]
async fn an_envoy_that_restarts_is_handed_over_what_the_others_told() {
    let replica = replica().await;
    let all = [FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Obey).await];
    let urls = all.each_ref().map(|envoy| format!("url: '{}'", envoy.url()));
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    collector.until("the first hand-over", |_| all[1].state.taken().iter().any(|request| request.handed_over.is_some())).await;
    let told: Vec<_> = (0..5_000).map(|n| binding(n, replica.address())).collect();
    // What it told itself before it restarted is what it needs most.
    all[1].state.tell(&told);
    collector.until("the homes", |status| status["affinity"]["conversations"] == 5_000).await;
    assert!(all[1].state.got().is_empty());
    all[1].state.since_ms.store(1_700_000_000_001, Ordering::SeqCst);
    let handed = |request: &SyncRequest| request.handed_over == Some(1_700_000_000_001);
    collector.until("a hand-over", |_| all[1].state.taken().iter().any(handed)).await;
    let taken = all[1].state.taken();
    let until = taken.iter().position(handed).expect("a hand-over");
    let mut got: Vec<_> = taken[..=until].iter().flat_map(|request| request.bindings.0.iter().copied()).collect();
    got.sort_unstable_by_key(|binding| binding.conversation);
    assert_eq!(got.len(), told.len());
    assert!(got == told);
}

#[tokio::test]
async fn an_envoy_is_ready_only_with_what_the_collector_read_of_others_meanwhile() {
    let replica = replica().await;
    let all = [FakeEnvoy::start(Behaviour::Obey).await, FakeEnvoy::start(Behaviour::Obey).await];
    // More than one exchange carries, and told with the first answer: the hand-over of what was known before is empty.
    let told: Vec<_> = (0..10_000).map(|n| binding(n, replica.address())).collect();
    all[0].state.tell(&told);
    let urls = all.each_ref().map(|envoy| format!("url: '{}'", envoy.url()));
    let collector = run(&config(&[replica.address()], &envoys(&urls.each_ref().map(String::as_str)))).await;
    let hands_over = |request: &SyncRequest| request.handed_over.is_some();
    collector.until("a hand-over", |_| all[1].state.taken().iter().any(hands_over)).await;
    let taken = all[1].state.taken();
    let until = taken.iter().position(hands_over).expect("a hand-over");
    let mut got: Vec<_> = taken[..=until].iter().flat_map(|request| &request.bindings.0).map(|told| told.conversation).collect();
    got.sort_unstable();
    got.dedup();
    assert_eq!(got.len(), told.len());
}

#[tokio::test]
async fn each_envoy_learns_what_the_others_have_in_flight() {
    let replica = replica().await;
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(FakeEnvoy::start(Behaviour::Obey).await);
    }
    let urls: Vec<_> = all.iter().map(|envoy| format!("url: '{}'", envoy.url())).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let collector = run(&config(&[replica.address()], &envoys(&urls))).await;
    let peers =
        |envoy: &FakeEnvoy| envoy.state.taken().last().map(|request| request.pools.first()?.replicas.first().map(|r| r.peers));
    // Each answers that it has three in flight, and takes four for its own.
    let both = Peers { in_flight: 6, own: 8 };
    collector.until("both others'", |_| all.iter().all(|envoy| peers(envoy).flatten() == Some(both))).await;
    // One is away: its requests are found in the engine's figures from now on.
    all[2].set(Behaviour::Silence);
    let one = Peers { in_flight: 3, own: 4 };
    collector.until("the other's", |_| peers(&all[0]).flatten() == Some(one)).await;
}

#[tokio::test]
async fn an_envoy_that_is_set_up_otherwise_than_most_is_named_with_what_to_do() {
    let replica = replica().await;
    let mut all = Vec::new();
    for (check, idle_s) in [("1", 600), ("2", 600), ("1", 600), ("1", 3_600)] {
        let envoy = FakeEnvoy::start(Behaviour::Obey).await;
        envoy.state.set_up_with(check, idle_s);
        all.push(envoy);
    }
    let urls: Vec<_> = all.iter().map(|envoy| format!("url: '{}'", envoy.url())).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let collector = run(&config(&[replica.address()], &envoys(&urls))).await;
    let seen = collector.until_envoy(1, "another key", |envoy| says(&envoy["problem"], "give every Envoy the same hash_key")).await;
    assert_eq!(seen["connected"], true);
    collector.until_envoy(3, "another time", |envoy| says(&envoy["problem"], "give every Envoy the same idle_timeout")).await;
    let status = collector.status().await;
    assert!(status["envoys"][0]["problem"].is_null() && status["envoys"][2]["problem"].is_null(), "{status:#}");
}

#[tokio::test]
async fn an_envoy_that_routes_nothing_of_what_it_is_told_is_named_with_what_to_do() {
    let replica = replica().await;
    let [alone, named] = [FakeEnvoy::start(Behaviour::RouteNothing).await, FakeEnvoy::start(Behaviour::RouteNothing).await];
    named.state.set_up_with("1", 600);
    let (alone, named) = (format!("url: '{}'", alone.url()), format!("url: '{}'", named.url()));
    let collector = run(&config(&[replica.address()], &envoys(&[&alone, &named]))).await;
    let seen = collector.until_envoy(0, "no route filter", |envoy| says(&envoy["problem"], "give that filter the vm_id")).await;
    assert_eq!(seen["connected"], true);
    collector.until_envoy(1, "other names", |envoy| says(&envoy["problem"], "the filter's pools[].cluster")).await;
}

#[tokio::test]
async fn an_envoy_whose_cluster_lacks_an_address_is_named_while_requests_go_elsewhere() {
    let replica = replica().await;
    let envoy = FakeEnvoy::start(Behaviour::Obey).await;
    // Some that are long past.
    envoy.state.mismatches.store(3, Ordering::SeqCst);
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: '{}'", envoy.url())]))).await;
    collector.until_envoy(0, "some answers", |seen| seen["answered"].as_u64() > Some(3) && seen["problem"].is_null()).await;
    let growing = async {
        loop {
            envoy.state.mismatches.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        () = growing => {}
        _ = collector.until_envoy(0, "mismatches that go on", |seen| says(&seen["problem"], "Its cluster lacks an address")) => {}
    }
}

#[tokio::test]
async fn a_control_listener_may_be_a_unix_socket() {
    let replica = replica().await;
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("control.sock");
    let state = EnvoyState::new(Behaviour::Obey);
    let collector = run(&config(&[replica.address()], &envoys(&[&format!("url: 'unix:{}'", socket.display())]))).await;
    collector.until_envoy(0, "away", |envoy| says(&envoy["problem"], "cannot be reached")).await;
    let server = serve_unix(&socket, &state);
    let seen = collector.until_envoy(0, "taken", |envoy| envoy["answered"].as_u64() >= Some(2)).await;
    assert_eq!(seen["url"], format!("unix:{}", socket.display()));
    server.abort();
}

#[tokio::test]
async fn of_many_envoys_each_goes_at_its_own_pace() {
    let replica = replica().await;
    let mut all = Vec::new();
    for _ in 0..7 {
        all.push(FakeEnvoy::start(Behaviour::Obey).await);
    }
    all.insert(3, FakeEnvoy::start(Behaviour::Silence).await);
    let urls: Vec<_> = all.iter().map(|envoy| format!("url: '{}'", envoy.url())).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let collector = run(&config(&[replica.address()], &envoys(&urls))).await;
    // The one that hangs is given up after a second; meanwhile each of the others gets a snapshot every 50 ms.
    let status = collector.until("a timeout", |status| says(&status["envoys"][3]["problem"], "no answer within 1 s")).await;
    for (index, envoy) in all.iter().enumerate().filter(|(index, _)| *index != 3) {
        assert!(envoy.state.taken().len() >= 5, "envoy {index} got {}", envoy.state.taken().len());
        assert!(status["envoys"][index]["problem"].is_null());
        let sequences: Vec<_> = envoy.state.taken().iter().map(|snapshot| snapshot.sequence).collect();
        assert!(sequences.is_sorted_by(|a, b| a < b), "envoy {index}: {sequences:?}");
    }
    all[3].set(Behaviour::Obey);
    collector.until_envoy(3, "an answer", |envoy| envoy["answered"].as_u64() > Some(0)).await;
}
