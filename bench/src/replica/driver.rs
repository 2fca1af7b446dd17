//! The engine in real time: one task that owns it, and the handle through which requests reach it.

use super::histogram::{E2E_BOUNDS, Histogram, TTFT_BOUNDS};
use crate::engine::{Counters, Engine, Event, Gauges, Request, RequestId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

/// What `/metrics` shows of an engine.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) counters: Counters,
    /// As of its last step, which is when vLLM writes them; None before the first.
    pub(super) gauges: Option<Gauges>,
    pub(super) asleep: bool,
    /// In the model's seconds: real seconds times the speed.
    pub(super) time_to_first_token: Histogram,
    pub(super) e2e_latency: Histogram,
}

enum Command {
    Submit {
        request: Request,
        events: mpsc::UnboundedSender<Event>,
    },
    Abort(RequestId),
    /// No step begins while the engine is asleep; what is submitted waits.
    Sleep(bool),
    Observe(oneshot::Sender<Observed>),
}

/// Sends requests to the engine's task.
#[derive(Clone, Debug)]
pub(super) struct EngineHandle {
    commands: mpsc::UnboundedSender<Command>,
    next_id: Arc<AtomicU64>,
}

/// A request in the engine. Dropping it aborts the request, so one whose client has gone does not linger.
pub(super) struct Ticket {
    id: RequestId,
    events: mpsc::UnboundedReceiver<Event>,
    commands: mpsc::UnboundedSender<Command>,
}

impl EngineHandle {
    /// Submits what `request` makes of the id that it is given.
    pub(super) fn submit(&self, request: impl FnOnce(RequestId) -> Request) -> Ticket {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = mpsc::unbounded_channel();
        // If the task is gone, so is the sender, and the ticket's first event is None.
        let _ = self.commands.send(Command::Submit { request: request(id), events: sender });
        Ticket { id, events, commands: self.commands.clone() }
    }

    /// Puts the engine to sleep, or wakes it.
    pub(super) fn sleep(&self, asleep: bool) {
        let _ = self.commands.send(Command::Sleep(asleep));
    }

    /// The engine's metrics now; None if its task is gone.
    pub(super) async fn observe(&self) -> Option<Observed> {
        let (sender, observed) = oneshot::channel();
        self.commands.send(Command::Observe(sender)).ok()?;
        observed.await.ok()
    }
}

impl Ticket {
    /// The next event; None once the request has ended, and at once if the engine refused it.
    pub(super) async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Abort(self.id));
    }
}

/// A request's client, and the times that the latency metrics need.
struct Client {
    events: mpsc::UnboundedSender<Event>,
    arrived: Instant,
}

/// The engine's task.
pub(super) struct Driver {
    engine: Engine,
    speed: f64,
    clients: HashMap<RequestId, Client>,
    commands: mpsc::UnboundedReceiver<Command>,
    gauges: Option<Gauges>,
    asleep: bool,
    time_to_first_token: Histogram,
    e2e_latency: Histogram,
}

impl Driver {
    /// A driver for `engine` whose clock runs `speed` times faster than the real one, and the handle to it.
    pub(super) fn new(engine: Engine, speed: f64) -> (Self, EngineHandle) {
        let (sender, commands) = mpsc::unbounded_channel();
        let driver = Self {
            engine,
            speed,
            clients: HashMap::new(),
            commands,
            gauges: None,
            asleep: false,
            time_to_first_token: Histogram::new(TTFT_BOUNDS),
            e2e_latency: Histogram::new(E2E_BOUNDS),
        };
        (driver, EngineHandle { commands: sender, next_id: Arc::default() })
    }

    /// Runs until every handle and ticket is gone.
    ///
    /// While there is work, each step ends at a time counted from the end of the step before, not from now: a timer that fires late delays
    /// one step's tokens and not all that follow.
    pub(super) async fn run(mut self) {
        let mut step_end = Instant::now();
        loop {
            let Some(duration) = (if self.asleep { None } else { self.engine.start_step() }) else {
                let Some(command) = self.commands.recv().await else { return };
                self.obey(command);
                step_end = Instant::now();
                continue;
            };
            step_end += duration.div_f64(self.speed);
            loop {
                tokio::select! {
                    biased;
                    command = self.commands.recv() => match command {
                        Some(command) => self.obey(command),
                        None => return,
                    },
                    () = sleep_until(step_end) => break,
                }
            }
            self.finish_step();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { request, events } => {
                // A refused request's sender is dropped, which ends its ticket.
                if self.engine.submit(&request).is_ok() {
                    self.clients.insert(request.id, Client { events, arrived: Instant::now() });
                }
            }
            Command::Abort(id) => {
                // What was aborted takes part in no step any more, but vLLM makes an empty one to say so.
                if self.engine.abort(id) && !self.asleep {
                    self.gauges = Some(self.engine.gauges());
                }
                self.clients.remove(&id);
            }
            Command::Sleep(asleep) => self.asleep = asleep,
            Command::Observe(reply) => {
                let _ = reply.send(Observed {
                    counters: self.engine.counters(),
                    gauges: self.gauges,
                    asleep: self.asleep,
                    time_to_first_token: self.time_to_first_token.clone(),
                    e2e_latency: self.e2e_latency.clone(),
                });
            }
        }
    }

    fn finish_step(&mut self) {
        let mut events = Vec::new();
        self.engine.finish_step(&mut events);
        self.gauges = Some(self.engine.gauges());
        for event in events {
            let Some(client) = self.clients.get(&event.id()) else { continue };
            let latency = client.arrived.elapsed().as_secs_f64() * self.speed;
            // A client that has gone sends an abort, too.
            let _ = client.events.send(event);
            match event {
                Event::FirstToken { .. } => self.time_to_first_token.record(latency),
                Event::Token { .. } => {}
                Event::Finished { id, .. } => {
                    self.e2e_latency.record(latency);
                    self.clients.remove(&id);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineConfig, FinishReason, StepCost};
    use std::time::Duration;

    fn start(speed: f64) -> EngineHandle {
        let cost = StepCost {
            base: Duration::from_millis(100),
            per_prefill_token: Duration::ZERO,
            per_decode_sequence: Duration::ZERO,
            per_context_token: Duration::ZERO,
        };
        let (driver, handle) = Driver::new(Engine::new(EngineConfig { cost, ..EngineConfig::default() }), speed);
        tokio::spawn(driver.run());
        handle
    }

    fn submit(handle: &EngineHandle, output: usize) -> Ticket {
        handle.submit(|id| Request { id, prompt: vec![1, 2, 3], output: vec![0; output], reason: FinishReason::Length })
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_come_when_their_step_has_passed() {
        let handle = start(10.0);
        let start = Instant::now();
        let mut ticket = submit(&handle, 3);
        for step in 1..=3 {
            ticket.next().await.unwrap();
            assert_eq!(start.elapsed(), Duration::from_millis(10 * step));
        }
        assert!(matches!(ticket.next().await, Some(Event::Finished { .. })));
        assert_eq!(ticket.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn latencies_are_in_the_models_time() {
        let handle = start(10.0);
        let mut ticket = submit(&handle, 3);
        while ticket.next().await.is_some() {}
        let observed = handle.observe().await.unwrap();
        assert!((observed.time_to_first_token.sum() - 0.1).abs() < 1e-6);
        assert!((observed.e2e_latency.sum() - 0.3).abs() < 1e-6);
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_a_ticket_frees_its_place_at_once() {
        let handle = start(1.0);
        let mut ticket = submit(&handle, 1000);
        ticket.next().await.unwrap();
        let before = Instant::now();
        assert_eq!(handle.observe().await.unwrap().gauges.unwrap().running, 1);
        drop(ticket);
        assert_eq!(handle.observe().await.unwrap().gauges, Some(Gauges::default()));
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn gauges_are_those_of_the_last_step_and_there_are_none_before_it() {
        let handle = start(1.0);
        assert_eq!(handle.observe().await.unwrap().gauges, None);
        let mut ticket = submit(&handle, 2);
        assert_eq!(handle.observe().await.unwrap().gauges, None);
        ticket.next().await.unwrap();
        assert_eq!(handle.observe().await.unwrap().gauges.unwrap().running, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sleeping_engine_keeps_requests_waiting_and_its_gauges_as_they_were() {
        let handle = start(1.0);
        let mut ticket = submit(&handle, 1);
        while ticket.next().await.is_some() {}
        handle.sleep(true);
        let mut ticket = submit(&handle, 1);
        assert!(tokio::time::timeout(Duration::from_secs(3600), ticket.next()).await.is_err());
        let observed = handle.observe().await.unwrap();
        assert_eq!((observed.gauges, observed.asleep), (Some(Gauges::default()), true));
        handle.sleep(false);
        assert!(ticket.next().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_can_never_run_ends_without_an_event() {
        let handle = start(1.0);
        assert_eq!(submit(&handle, 40_000).next().await, None);
    }
}
