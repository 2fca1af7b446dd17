//! vLLM's own balancer of the data-parallel ranks behind one port: which engine an API server gives a request to.
//!
//! An API server knows its engines by counts that a coordinator publishes every [`REFRESH`], and by what it has sent since. Each API
//! server chooses for itself, and by default there are as many of them as ranks: it takes its own choices as often as there are servers,
//! supposing that the others do as it does.
//!
//! Source: `DPLBAsyncMPClient.get_core_engine_for_request`, `vllm/v1/engine/core_client.py`, 0.26.0 and 0.32.0.

use std::time::Duration;

use crate::engine::Gauges;

/// How often the coordinator publishes the engines' counts.
pub const REFRESH: Duration = Duration::from_millis(100);

/// Which vLLM's rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalancerKind {
    /// 0.11 to 0.26: the least `4 * waiting + running`; each choice adds the number of API servers to that engine's waiting until the
    /// next refresh.
    Vllm026,
    /// 0.27 and later: the least `max(servers * in flight, waiting + running)`, and with a queue `6 * waiting * max(0, KV use - 0.5)`
    /// more. In flight are the server's own requests.
    Vllm027,
}

/// One API server's choice of ranks.
#[derive(Clone, Debug)]
pub struct Balancer {
    kind: BalancerKind,
    servers: usize,
    /// Where the search begins, so that ties go round.
    start: usize,
    /// As last published, for [`BalancerKind::Vllm026`] with what was sent since.
    counts: Vec<Gauges>,
    /// Own requests that have not ended, by rank.
    in_flight: Vec<usize>,
}

impl Balancer {
    /// The balancer of a lone API server with this many ranks, at least one. Until the first refresh all are idle.
    pub fn new(kind: BalancerKind, ranks: usize) -> Self {
        Self { kind, servers: 1, start: 0, counts: vec![Gauges::default(); ranks], in_flight: vec![0; ranks] }
    }

    /// The balancer of server number `server` of `servers`: each begins its search elsewhere.
    pub fn of_server(kind: BalancerKind, ranks: usize, server: usize, servers: usize) -> Self {
        Self { servers, start: ranks * server / servers.max(1), ..Self::new(kind, ranks) }
    }

    /// Takes the engines' counts, one for each rank; forgets what was added to the last ones.
    pub fn refresh(&mut self, engines: &[Gauges]) {
        self.counts.copy_from_slice(engines);
    }

    /// The rank of the next request, which is in flight there until [`ended`](Self::ended).
    pub fn choose(&mut self) -> usize {
        let ranks = self.counts.len();
        let from = self.start;
        self.start = (from + 1) % ranks;
        let order = (0..ranks).map(|offset| (from + offset) % ranks);
        // Of equals the first.
        let chosen = order.min_by(|one, two| self.score(*one).total_cmp(&self.score(*two))).unwrap_or(0);
        self.in_flight[chosen] += 1;
        if self.kind == BalancerKind::Vllm026 {
            self.counts[chosen].waiting += self.servers;
        }
        chosen
    }

    /// A request that this server sent to the rank has ended, however it ended.
    pub fn ended(&mut self, rank: usize) {
        self.in_flight[rank] = self.in_flight[rank].saturating_sub(1);
    }

    fn score(&self, rank: usize) -> f64 {
        let Gauges { running, waiting, kv_cache_usage } = self.counts[rank];
        match self.kind {
            BalancerKind::Vllm026 => (4 * waiting + running) as f64,
            BalancerKind::Vllm027 => {
                let requests = (self.servers * self.in_flight[rank]).max(waiting + running);
                requests as f64 + 6.0 * waiting as f64 * (kv_cache_usage - 0.5).max(0.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [BalancerKind; 2] = [BalancerKind::Vllm026, BalancerKind::Vllm027];

    fn gauges(running: usize, waiting: usize, kv_cache_usage: f64) -> Gauges {
        Gauges { running, waiting, kv_cache_usage }
    }

    fn choices(balancer: &mut Balancer, count: usize) -> Vec<usize> {
        (0..count).map(|_| balancer.choose()).collect()
    }

    #[test]
    fn a_burst_on_idle_ranks_goes_round() {
        for kind in KINDS {
            assert_eq!(choices(&mut Balancer::new(kind, 4), 8), [0, 1, 2, 3, 0, 1, 2, 3]);
        }
    }

    #[test]
    fn servers_begin_their_search_at_different_ranks() {
        for kind in KINDS {
            let first = [0, 1, 2, 3].map(|server| Balancer::of_server(kind, 4, server, 4).choose());
            assert_eq!(first, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn a_waiting_request_weighs_as_four_running_up_to_0_26() {
        let mut balancer = Balancer::new(BalancerKind::Vllm026, 2);
        balancer.refresh(&[gauges(3, 0, 0.0), gauges(0, 1, 0.0)]);
        assert_eq!(balancer.choose(), 0, "3 against 4");
        balancer.refresh(&[gauges(5, 0, 0.0), gauges(0, 1, 0.0)]);
        assert_eq!(balancer.choose(), 1, "5 against 4");
    }

    #[test]
    fn between_refreshes_only_its_own_choices_count() {
        let mut balancer = Balancer::new(BalancerKind::Vllm026, 2);
        balancer.refresh(&[gauges(0, 0, 0.0), gauges(9, 0, 0.0)]);
        // Each choice is four more, whatever has ended since: 0, 4, 8, 12 against 9.
        assert_eq!(choices(&mut balancer, 3), [0, 0, 0]);
        balancer.ended(0);
        assert_eq!(balancer.choose(), 1);
        balancer.refresh(&[gauges(3, 0, 0.0), gauges(9, 0, 0.0)]);
        assert_eq!(balancer.choose(), 0, "a refresh forgets them");
    }

    #[test]
    fn with_several_servers_a_choice_counts_for_all_of_them() {
        let mut balancer = Balancer::of_server(BalancerKind::Vllm026, 2, 0, 4);
        balancer.refresh(&[gauges(0, 0, 0.0), gauges(9, 0, 0.0)]);
        assert_eq!(choices(&mut balancer, 2), [0, 1], "16 against 9");
        let mut balancer = Balancer::of_server(BalancerKind::Vllm027, 2, 0, 4);
        balancer.refresh(&[gauges(0, 0, 0.0), gauges(3, 0, 0.0)]);
        assert_eq!(choices(&mut balancer, 2), [0, 1], "4 against 3");
    }

    #[test]
    fn since_0_27_its_own_requests_count_until_they_end() {
        let mut balancer = Balancer::new(BalancerKind::Vllm027, 2);
        balancer.refresh(&[gauges(0, 0, 0.0), gauges(2, 0, 0.0)]);
        assert_eq!(choices(&mut balancer, 2), [0, 0]);
        balancer.refresh(&[gauges(0, 0, 0.0), gauges(2, 0, 0.0)]);
        balancer.ended(0);
        assert_eq!(balancer.choose(), 0, "1 against 2");
    }

    #[test]
    fn since_0_27_a_queue_weighs_by_how_full_the_cache_is() {
        let mut balancer = Balancer::new(BalancerKind::Vllm027, 2);
        balancer.refresh(&[gauges(1, 2, 1.0), gauges(8, 0, 1.0)]);
        assert_eq!(balancer.choose(), 1, "3 + 2 * 6 * 0.5 against 8");
        balancer.refresh(&[gauges(1, 2, 0.5), gauges(8, 0, 1.0)]);
        assert_eq!(balancer.choose(), 0, "3 against 8");
    }

    proptest! {
        #[test]
        fn a_rank_that_is_idle_among_busy_ones_is_chosen(
            busy in prop::collection::vec((1usize..40, 0usize..40, 0.0..1.0f64), 1..8), idle in 0usize..8, kind in 0usize..2
        ) {
            let mut engines: Vec<_> = busy.iter().map(|&(running, waiting, usage)| gauges(running, waiting, usage)).collect();
            let idle = idle.min(engines.len());
            engines.insert(idle, Gauges::default());
            let mut balancer = Balancer::new(KINDS[kind], engines.len());
            balancer.refresh(&engines);
            prop_assert_eq!(balancer.choose(), idle);
        }
    }
}
