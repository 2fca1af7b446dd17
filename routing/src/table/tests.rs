use hashbrown::HashMap;
use homing_corpus::mutated;
use proptest::prelude::*;

use super::*;
use crate::host::MemoryHost;
use crate::identity::{Namer, Naming};

fn entry(digest: u128, home: u64, last_turn: u32) -> Entry {
    Entry {
        digest: Digest(digest),
        home: ReplicaId(home),
        second: None,
        home_bytes: 0,
        second_bytes: 0,
        last_turn,
        turns_away: 0,
        bound_at_ms: 0,
    }
}

fn remember(host: &MemoryHost, table: Table, entry: Entry) -> bool {
    let bucket = table.open(host, entry.digest).expect("a bucket");
    table.store(host, bucket, &entry).expect("a write")
}

fn recall(host: &MemoryHost, table: Table, digest: u128, now_s: u32) -> Option<Entry> {
    let bucket = table.open(host, Digest(digest)).expect("a bucket");
    table.entry(&bucket, now_s)
}

/// A bucket without a free slot.
fn full() -> Vec<u8> {
    let (host, table) = (MemoryHost::default(), Table::new(1, 600));
    for digest in 1..=WAYS as u32 {
        assert!(remember(&host, table, entry(digest.into(), digest.into(), digest)));
    }
    host.shared().remove(&key(0)).expect("a bucket")
}

#[test]
fn a_conversation_is_found_until_it_has_been_idle_too_long() {
    let (host, table) = (MemoryHost::default(), Table::new(64, 600));
    let stored =
        Entry { second: Some(ReplicaId(9)), home_bytes: 5, second_bytes: 6, turns_away: 1, bound_at_ms: 8, ..entry(7, 3, 1000) };
    assert!(remember(&host, table, stored));
    assert_eq!(recall(&host, table, 7, 1600), Some(stored));
    assert_eq!(recall(&host, table, 7, 1601), None);
    assert_eq!(recall(&host, table, 8, 1000), None);
}

#[test]
fn a_write_that_lost_a_race_is_refused() {
    let (host, table) = (MemoryHost::default(), Table::new(1, 600));
    table.prepare(&host).expect("room");
    let (one, two) = (table.open(&host, Digest(1)).expect("a bucket"), table.open(&host, Digest(2)).expect("a bucket"));
    assert!(table.store(&host, one, &entry(1, 1, 0)).expect("a write"));
    assert!(!table.store(&host, two, &entry(2, 2, 0)).expect("a write"));
    assert_eq!(recall(&host, table, 2, 0), None);
}

#[test]
fn memory_is_taken_at_start_and_never_grows() {
    let (host, table) = (MemoryHost::default(), Table::new(65_536, 600));
    table.prepare(&host).expect("room");
    let at_start = host.shared_bytes();
    assert_eq!(at_start, table.bytes());
    for n in 0..100_000_u128 {
        remember(&host, table, entry(n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835), 1, 0));
    }
    assert_eq!(host.shared_bytes(), at_start);
}

#[test]
fn a_table_holds_the_number_it_was_made_for() {
    let (host, table) = (MemoryHost::default(), Table::new(4096, 600));
    let digest = |n: u128| n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    for n in 1..=4096 {
        remember(&host, table, entry(digest(n), 1, u32::try_from(n).expect("small")));
    }
    let kept = (1..=4096).filter(|n| recall(&host, table, digest(*n), 600).is_some()).count();
    assert!(kept >= 4090, "{kept} of 4096");
}

fn told(digest: u128, home: u64, bound_at_ms: u64, last_turn_s: u32) -> Binding {
    Binding { conversation: Digest(digest), home: ReplicaId(home), bound_at_ms, last_turn_s, bytes: 7 }
}

fn merge(host: &MemoryHost, table: Table, told: &[Binding], now_s: u32) {
    assert_eq!(table.merge(host, &mut told.to_vec(), now_s).expect("a merge"), 0);
}

#[test]
fn what_another_envoy_tells_is_remembered_and_the_later_home_wins() {
    let (host, table) = (MemoryHost::default(), Table::new(64, 600));
    merge(&host, table, &[told(7, 3, 50, 1000)], 1000);
    assert_eq!(recall(&host, table, 7, 1000), Some(Entry { home_bytes: 7, bound_at_ms: 50, ..entry(7, 3, 1000) }));
    // An earlier home changes nothing but the last turn; a later one leaves the first as the second home.
    merge(&host, table, &[told(7, 9, 49, 1010)], 1010);
    let kept = recall(&host, table, 7, 1010).expect("an entry");
    assert_eq!((kept.home, kept.last_turn), (ReplicaId(3), 1010));
    merge(&host, table, &[told(7, 4, 51, 1005)], 1010);
    let moved = recall(&host, table, 7, 1010).expect("an entry");
    assert_eq!((moved.home, moved.second, moved.last_turn), (ReplicaId(4), Some(ReplicaId(3)), 1010));
}

#[test]
fn what_is_idle_elsewhere_puts_nothing_out_that_is_active_here() {
    let (host, table) = (MemoryHost::default(), Table::new(16, 600));
    let here: Vec<_> = (1..=64).map(|n| told(n << 90, 1, 1, 1000)).collect();
    merge(&host, table, &here, 1000);
    let before: Vec<_> = (1..=64).map(|n| recall(&host, table, n << 90, 1000)).collect();
    merge(&host, table, &[told(99, 2, 9, 999), told(98, 2, 9, 300)], 1000);
    assert_eq!(before, (1..=64).map(|n| recall(&host, table, n << 90, 1000)).collect::<Vec<_>>());
    assert_eq!(recall(&host, table, 99, 1000), None);
}

/// What is found out under one key is of no use where another is set.
#[test]
fn ids_that_crowd_one_bucket_under_one_key_are_spread_under_another() {
    let table = Table::new(4_096, 600);
    let bucket = |key: u8, id: u32| {
        let namer = Namer::new(Naming::default(), &[key; 16], "pool");
        let id = id.to_string();
        let named = namer.from_headers([(&b"x-session-id"[..], id.as_bytes())].into_iter()).expect("a conversation");
        table.index(named.digest)
    };
    // As many as a bucket holds, found by trying.
    let crowd: Vec<u32> = (0..).filter(|id| bucket(1, *id) == 7).take(WAYS).collect();
    let mut spread: Vec<u32> = crowd.iter().map(|id| bucket(2, *id)).collect();
    spread.sort_unstable();
    spread.dedup();
    // 32 drawn of 256 at random are in 30 different ones on average.
    assert!(spread.len() >= 24, "{WAYS} ids in {} of {} buckets", spread.len(), table.buckets());
}

proptest! {
    /// Two Envoys that hear the same, each in its own order, have the same homes.
    #[test]
    fn tables_agree_whatever_the_order(
        told in prop::collection::vec((0_u128..6, 1_u64..4, 0_u64..5, 90_u32..100), 1..30),
        cut in 0_usize..30,
    ) {
        let told: Vec<_> = told.into_iter().map(|(digest, home, at, last)| super::tests::told(digest, home, at, last)).collect();
        let table = Table::new(64, 600);
        let (one, other) = (MemoryHost::default(), MemoryHost::default());
        for binding in &told {
            merge(&one, table, &[*binding], 100);
        }
        let (first, second) = told.split_at(cut.min(told.len()));
        merge(&other, table, second, 100);
        merge(&other, table, first, 100);
        merge(&other, table, second, 100);
        for digest in 0..6 {
            let home = |host| recall(host, table, digest, 100).map(|entry| (entry.home, entry.bound_at_ms, entry.last_turn));
            prop_assert_eq!(home(&one), home(&other));
        }
    }

    #[test]
    fn any_bytes_of_another_length_read_as_an_empty_bucket(bytes in mutated([full()])) {
        prop_assume!(bytes.len() != BUCKET_BYTES);
        let (host, table) = (MemoryHost::default(), Table::new(1, 600));
        host.write(&key(0), &bytes, Expected::Anything).expect("a write");
        prop_assert_eq!(recall(&host, table, 1, 0), None);
        prop_assert!(remember(&host, table, entry(1, 1, 0)));
        prop_assert_eq!(recall(&host, table, 1, 0), Some(entry(1, 1, 0)));
    }

    #[test]
    fn any_bytes_of_the_right_length_are_a_usable_bucket(bytes in mutated([full()])) {
        let (host, table) = (MemoryHost::default(), Table::new(1, 600));
        let mut bucket = bytes.to_vec();
        bucket.resize(BUCKET_BYTES, 0xff);
        host.write(&key(0), &bucket, Expected::Anything).expect("a write");
        remember(&host, table, entry(1, 1, u32::MAX));
        prop_assert_eq!(recall(&host, table, 1, u32::MAX), Some(entry(1, 1, u32::MAX)));
    }

    /// Whatever comes, a conversation's entry is its own, and the ones that are active outlive the ones that are idle.
    #[test]
    fn it_never_returns_another_conversations_home(turns in proptest::collection::vec((0_u128..200, 0_u32..5), 1..400)) {
        let (host, table) = (MemoryHost::default(), Table::new(16, 10));
        let mut now = 100;
        let mut expected = HashMap::new();
        for (digest, wait) in turns {
            now += wait;
            if let Some(found) = recall(&host, table, digest, now) {
                prop_assert_eq!(found, expected[&digest]);
            }
            let turn = entry(digest, u64::try_from(digest).expect("small") + 1, now);
            prop_assert!(remember(&host, table, turn));
            expected.insert(digest, turn);
            // The 32 conversations of one bucket that were active last are all there.
            let mut last: Vec<_> = expected.values().copied().collect();
            last.sort_by_key(|turn| core::cmp::Reverse(turn.last_turn));
            let cut = last.get(WAYS - 1).map_or(0, |turn| turn.last_turn);
            for turn in last.into_iter().filter(|turn| turn.last_turn > cut && now - turn.last_turn <= 10) {
                prop_assert_eq!(recall(&host, table, u128::from(turn.home.0 - 1), now), Some(turn));
            }
        }
        prop_assert!(host.shared_bytes() <= table.bytes());
    }
}
