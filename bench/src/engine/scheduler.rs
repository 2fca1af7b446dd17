//! The engine itself: queue, batch and step.

use super::blocks::BlockPool;
use super::config::StepWork;
use super::request::Sequence;
use super::{Counters, EngineConfig, Event, FinishReason, Gauges, Rejected, Request, RequestId};
use std::collections::VecDeque;
use std::time::Duration;

/// One engine; see the [module](super) for how it is driven.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    pool: BlockPool,
    waiting: VecDeque<Sequence>,
    /// In the order of admission.
    running: Vec<Sequence>,
    /// How long the step in progress takes.
    step: Option<Duration>,
    counters: Counters,
    /// As of the end of the last step.
    metrics: Gauges,
}

impl Engine {
    /// An idle engine with an empty cache.
    ///
    /// # Panics
    /// If the block size, `max_num_seqs` or `max_num_batched_tokens` is 0.
    pub fn new(config: EngineConfig) -> Self {
        assert!(config.block_size > 0 && config.max_num_seqs > 0 && config.max_num_batched_tokens > 0, "0 in {config:?}");
        let pool = BlockPool::new(config.usable_blocks());
        Self {
            config,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            counters: Counters::default(),
            metrics: Gauges::default(),
        }
    }

    /// The settings it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// What it has counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Its state now. Finished requests leave the batch when their last step is finished.
    pub fn gauges(&self) -> Gauges {
        let total = self.pool.len();
        let used = total - self.pool.free_len();
        let kv_cache_usage = if total == 0 { 0.0 } else { used as f64 / total as f64 };
        Gauges { running: self.running.len(), waiting: self.waiting.len(), kv_cache_usage }
    }

    /// Its state as its metrics show it: as of the end of the last step, as vLLM writes them. During a long step they know neither of the
    /// request that it computes nor of those that came since.
    pub fn metrics(&self) -> Gauges {
        self.metrics
    }

    /// Puts a request at the end of the queue.
    ///
    /// # Errors
    /// A request that could never run, has nothing to compute, or has the name of one that is in the engine.
    pub fn submit(&mut self, request: &Request) -> Result<(), Rejected> {
        if request.prompt.is_empty() || request.output.is_empty() {
            return Err(Rejected::Empty);
        }
        let (tokens, limit) = (request.prompt.len() + request.output.len(), self.config.max_request_tokens());
        if tokens > limit {
            return Err(Rejected::TooLong { tokens, limit });
        }
        if self.waiting.iter().chain(&self.running).any(|sequence| sequence.id == request.id) {
            return Err(Rejected::DuplicateId(request.id));
        }
        self.waiting.push_back(Sequence::new(request, self.config.block_size));
        Ok(())
    }

    /// Removes a request at once, also in the middle of a step; no event will name it. False if it is not in the engine.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.pool.release(&sequence.blocks);
        } else if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            self.waiting.remove(at);
        } else {
            return false;
        }
        self.counters.aborted += 1;
        self.metrics = self.gauges();
        true
    }

    /// Schedules the next step and says how long it takes; None if there is nothing to do. While a step is in progress, its duration
    /// again.
    pub fn start_step(&mut self) -> Option<Duration> {
        if self.step.is_none() && !(self.running.is_empty() && self.waiting.is_empty()) {
            self.step = Some(self.schedule());
        }
        self.step
    }

    /// Ends the step in progress and appends what it brought to `events`. Does nothing if none is in progress.
    pub fn finish_step(&mut self, events: &mut Vec<Event>) {
        if self.step.take().is_none() {
            return;
        }
        for mut sequence in std::mem::take(&mut self.running) {
            if self.advance(&mut sequence, events) {
                self.pool.release(&sequence.blocks);
            } else {
                self.running.push(sequence);
            }
        }
        self.metrics = self.gauges();
    }

    /// Both halves of a step at once, for a caller to whom only the sum of time matters: its duration and its events. None if idle.
    pub fn step(&mut self) -> Option<(Duration, Vec<Event>)> {
        let duration = self.start_step()?;
        let mut events = Vec::new();
        self.finish_step(&mut events);
        Some((duration, events))
    }

    /// Decides what the next step computes: first what runs, in the order of admission, so decoding sequences come before the prompt that
    /// was admitted last; then, if nobody had to be preempted, the queue.
    fn schedule(&mut self) -> Duration {
        let mut budget = self.config.max_num_batched_tokens;
        let mut work = StepWork::default();
        let preempted = self.schedule_running(&mut budget, &mut work);
        if !preempted {
            self.schedule_waiting(&mut budget, &mut work);
        }
        self.config.cost.of(work)
    }

    fn schedule_running(&mut self, budget: &mut usize, work: &mut StepWork) -> bool {
        let mut preempted = false;
        let mut next = 0;
        while next < self.running.len() && *budget > 0 {
            let sequence = &self.running[next];
            let tokens = sequence.pending().min(*budget);
            let missing = (sequence.computed + tokens).div_ceil(self.config.block_size).saturating_sub(sequence.blocks.len());
            if missing > self.pool.free_len() {
                // Make room at the cost of the request that was admitted last, which may be this one.
                self.preempt_last();
                preempted = true;
                continue;
            }
            let sequence = &mut self.running[next];
            Self::compute(&self.config, &mut self.pool, sequence, tokens, work);
            *budget -= tokens;
            next += 1;
        }
        preempted
    }

    fn schedule_waiting(&mut self, budget: &mut usize, work: &mut StepWork) {
        let block_size = self.config.block_size;
        while *budget > 0
            && self.running.len() < self.config.max_num_seqs
            && let Some(sequence) = self.waiting.front()
        {
            // The last token is computed in any case: without it there would be nothing to sample from.
            let found = self.pool.find_prefix(&sequence.hashes[..(sequence.known() - 1) / block_size]);
            let cached = found.len() * block_size;
            if !sequence.preempted {
                self.counters.prefix_cache_queries += sequence.known() as u64;
                self.counters.prefix_cache_hits += cached as u64;
            }
            let tokens = (sequence.known() - cached).min(*budget);
            let must_fit = if self.config.reserve_full_sequence { sequence.known() } else { cached + tokens };
            let missing = must_fit.div_ceil(block_size) - found.len();
            if missing + self.pool.count_free(&found) > self.pool.free_len() {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            found.iter().for_each(|&id| self.pool.touch(id));
            sequence.blocks = found;
            sequence.computed = cached;
            sequence.cached_tokens.get_or_insert(cached);
            Self::compute(&self.config, &mut self.pool, &mut sequence, tokens, work);
            *budget -= tokens;
            self.running.push(sequence);
        }
    }

    /// Plans `tokens` of a sequence into the step. The blocks, which the caller has made sure of, can be found from now on, so a request
    /// scheduled in the same step shares them.
    fn compute(config: &EngineConfig, pool: &mut BlockPool, sequence: &mut Sequence, tokens: usize, work: &mut StepWork) {
        if sequence.decodes() {
            work.decode_sequences += 1;
        } else {
            work.prefill_tokens += tokens;
        }
        let end = sequence.computed + tokens;
        work.context_tokens += end;
        while sequence.blocks.len() * config.block_size < end {
            let Some(id) = pool.allocate() else { unreachable!("the caller has counted the free blocks") };
            sequence.blocks.push(id);
        }
        for index in sequence.computed / config.block_size..end / config.block_size {
            pool.set_hash(sequence.blocks[index], sequence.hashes[index]);
        }
        sequence.scheduled = tokens;
    }

    fn preempt_last(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.computed = 0;
        sequence.preempted = true;
        self.counters.preemptions += 1;
        self.waiting.push_front(sequence);
    }

    /// Applies the step to one sequence; true when it has ended.
    fn advance(&mut self, sequence: &mut Sequence, events: &mut Vec<Event>) -> bool {
        let computed = std::mem::take(&mut sequence.scheduled);
        sequence.computed += computed;
        if computed == 0 || sequence.pending() > 0 {
            return false;
        }
        let (id, cached_tokens) = (sequence.id, sequence.cached_tokens.unwrap_or(0));
        sequence.generated += 1;
        self.counters.generation_tokens += 1;
        if sequence.generated == 1 {
            self.counters.prompt_tokens_cached += cached_tokens as u64;
            self.counters.prompt_tokens_computed += (sequence.prompt_tokens - cached_tokens) as u64;
            events.push(Event::FirstToken { id, cached_tokens });
        } else {
            events.push(Event::Token { id });
        }
        if sequence.generated < sequence.output_tokens {
            return false;
        }
        match sequence.reason {
            FinishReason::Stop => self.counters.finished_stop += 1,
            FinishReason::Length => self.counters.finished_length += 1,
        }
        events.push(Event::Finished { id, reason: sequence.reason, cached_tokens });
        true
    }

    /// Panics unless the blocks' references are exactly those of the running requests.
    #[cfg(test)]
    pub(super) fn check(&self) {
        self.pool.check();
        assert_eq!(self.pool.references(), self.running.iter().map(|sequence| sequence.blocks.len()).sum::<usize>());
        assert!(self.waiting.iter().all(|sequence| sequence.blocks.is_empty()));
    }
}
