//! Virtual time: what happens next, and what it leads to.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::policy::{Fleet, HomingOptions, Policy, PolicyName, Routed, View};
use super::report::{Figures, Tally};
use crate::engine::{Counters, Engine, EngineConfig, Event, FinishReason, Gauges, Request};
use crate::text::{Prompt, TOKEN_BYTES, text_of, words};
use crate::workload::{CallKind, Ending, Next, NextCall, Session, SessionPlan, Sessions, Workload};

/// How often replicas are counted as busy or not.
const LOOK: Duration = Duration::from_millis(250);
/// Between two sessions' first requests at the start: nobody starts all at the same instant.
const STAGGER: Duration = Duration::from_millis(50);
/// How often the policy looks at what it holds.
const RELEASES: Duration = Duration::from_millis(20);
/// Before a session that was refused is replaced.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_secs(1);

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Replicas, at least 1.
    pub replicas: usize,
    /// Each replica's engine.
    pub engine: EngineConfig,
    /// Sessions at once, unless the workload is an open loop; one that ends is replaced.
    pub sessions: usize,
    /// What they send.
    pub workload: Workload,
    /// Where requests go.
    pub policy: PolicyName,
    /// Homing's settings.
    pub homing: HomingOptions,
    /// For how long.
    pub duration: Duration,
    /// Of what policies leave to chance.
    pub seed: u64,
    /// The way from the clients to the fleet and back; half of it each way.
    pub network: Duration,
}

/// Names a session in this run.
type SessionId = u64;

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// An engine's step ends.
    StepEnds(usize),
    /// A session begins.
    Begins(SessionId),
    /// A session has thought and sends its call.
    Sends(SessionId),
    /// A client hangs up on a request.
    HangsUp(u64),
    /// The next session of an open loop comes, or the next of a closed loop takes a place that is free.
    Arrives,
    /// The policy looks at the engines' metrics.
    PolicyLooks,
    /// Requests that the policy holds may go.
    Releases,
    /// Busy replicas are counted.
    Look,
}

/// A session that has not ended.
struct Active {
    session: Session,
    /// Stands for its name.
    key: u64,
    /// Who waits for it.
    parent: Option<(SessionId, u64)>,
    /// Subagents that it waits for.
    waits_for: usize,
    /// The call that it is thinking about or waiting for.
    call: Option<NextCall>,
    /// What the history's messages are as tokens, as far as they have been sent.
    prompt: Prompt,
    /// Where each message ends in it.
    messages: Vec<usize>,
    /// Where its last turn was served.
    last: Option<usize>,
}

/// A request on its way.
struct InFlight {
    session: SessionId,
    kind: CallKind,
    /// Where it went; None while it is held.
    replica: Option<usize>,
    sent: Duration,
    prompt: Vec<u32>,
    output: Vec<u32>,
    first_token: Option<Duration>,
}

struct World {
    policy: Box<dyn Policy>,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64, Happening)>>,
    order: u64,
    engines: Vec<Engine>,
    stepping: Vec<bool>,
    in_flight: Vec<u32>,
    upcoming: Sessions,
    is_open: bool,
    /// The next session of an open loop.
    arriving: Option<SessionPlan>,
    active: BTreeMap<SessionId, Active>,
    requests: HashMap<u64, InFlight>,
    next_session: SessionId,
    next_request: u64,
    tally: Tally,
    network: Duration,
    /// Whether the policy holds a request.
    holds: bool,
}

/// Runs a simulation to its end.
pub fn run(simulation: &Simulation) -> Figures {
    run_stages(simulation, &[simulation.sessions]).pop().unwrap_or_default()
}

/// Runs one stage after the other on the same engines, each as long as the simulation and with as many sessions at once as it says. At the
/// end of a stage its clients hang up; caches stay as they are.
pub fn run_stages(simulation: &Simulation, stages: &[usize]) -> Vec<Figures> {
    let mut world = World::new(simulation);
    (1..).zip(stages).map(|(stage, sessions)| world.stage(*sessions, simulation.duration, simulation.duration * stage)).collect()
}

impl World {
    fn new(simulation: &Simulation) -> Self {
        let fleet = Fleet::new(simulation.replicas, &simulation.engine);
        let mut world = Self {
            policy: simulation.policy.policy(&fleet, simulation.homing, simulation.seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            order: 0,
            engines: (0..simulation.replicas).map(|_| Engine::new(simulation.engine.clone())).collect(),
            stepping: vec![false; simulation.replicas],
            in_flight: vec![0; simulation.replicas],
            upcoming: simulation.workload.sessions(0),
            is_open: simulation.workload.is_open(),
            arriving: None,
            active: BTreeMap::new(),
            requests: HashMap::new(),
            next_session: 0,
            next_request: 0,
            tally: Tally::default(),
            network: simulation.network,
            holds: false,
        };
        if let Some(every) = world.policy.looks_every() {
            world.schedule(every, Happening::PolicyLooks);
        }
        world.schedule(LOOK, Happening::Look);
        world
    }

    fn stage(&mut self, sessions: usize, duration: Duration, until: Duration) -> Figures {
        let before = self.counters();
        if self.is_open {
            self.schedule_arrival();
        } else {
            for place in 0..sessions {
                self.schedule(STAGGER * place as u32, Happening::Arrives);
            }
        }
        while self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= until)
            && let Some(Reverse((at, _, happening))) = self.queue.pop()
        {
            self.now = at;
            self.happens(happening);
        }
        self.now = until;
        let unfinished = self.active.values().filter(|active| active.parent.is_none()).count();
        let figures = std::mem::take(&mut self.tally).figures(duration, unfinished, &(self.counters() - before));
        self.all_hang_up();
        figures
    }

    /// Every session ends where it is.
    fn all_hang_up(&mut self) {
        self.active.clear();
        let on_their_way: BTreeSet<u64> = self.requests.keys().copied().collect();
        for id in on_their_way {
            self.hang_up(id);
        }
        self.holds = false;
        self.queue.retain(|Reverse((_, _, happening))| {
            matches!(happening, Happening::StepEnds(_) | Happening::PolicyLooks | Happening::Look)
        });
    }

    /// What all engines have counted together.
    fn counters(&self) -> Counters {
        self.engines.iter().map(Engine::counters).fold(Counters::default(), |sum, one| sum + one)
    }

    fn schedule(&mut self, after: Duration, happening: Happening) {
        self.order += 1;
        self.queue.push(Reverse((self.now + after, self.order, happening)));
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::StepEnds(replica) => self.step_ends(replica),
            Happening::Begins(session) => self.goes_on(session),
            Happening::Sends(session) => self.send(session),
            Happening::HangsUp(request) => self.hang_up(request),
            Happening::Arrives => self.arrives(),
            Happening::PolicyLooks => self.policy_looks(),
            Happening::Releases => self.releases(),
            Happening::Look => {
                self.tally.look(self.engines.iter().filter(|engine| engine.metrics().running > 0).count());
                self.schedule(LOOK, Happening::Look);
            }
        }
    }

    // === Sessions ===

    fn schedule_arrival(&mut self) {
        self.arriving = self.upcoming.next();
        if let Some(plan) = &self.arriving {
            let at = Duration::from_millis(plan.arrival_ms.unwrap_or(0));
            self.schedule(at.saturating_sub(self.now), Happening::Arrives);
        }
    }

    fn arrives(&mut self) {
        let plan = if self.is_open { self.arriving.take() } else { self.upcoming.next() };
        if let Some(plan) = plan {
            self.tally.started += 1;
            let session = self.begin(plan, None);
            self.goes_on(session);
        }
        if self.is_open {
            self.schedule_arrival();
        }
    }

    fn begin(&mut self, plan: SessionPlan, parent: Option<(SessionId, u64)>) -> SessionId {
        self.next_session += 1;
        let mut hasher = DefaultHasher::new();
        plan.id.hash(&mut hasher);
        let active = Active {
            session: Session::new(plan),
            key: hasher.finish(),
            parent,
            waits_for: 0,
            call: None,
            prompt: Prompt::default(),
            messages: Vec::new(),
            last: None,
        };
        self.active.insert(self.next_session, active);
        self.next_session
    }

    fn goes_on(&mut self, id: SessionId) {
        let Some(active) = self.active.get_mut(&id) else { return };
        match active.session.advance() {
            Next::Call(call) => {
                active.call = Some(call);
                self.schedule(call.think + self.network, Happening::Sends(id));
            }
            Next::FanOut(plans) => {
                active.waits_for = plans.len();
                let parent = (id, active.key);
                if plans.is_empty() {
                    self.schedule(Duration::ZERO, Happening::Begins(id));
                }
                for plan in plans {
                    let subagent = self.begin(plan, Some(parent));
                    self.schedule(Duration::ZERO, Happening::Begins(subagent));
                }
            }
            Next::End(Ending::Done) => self.ends(id, Duration::ZERO, |tally| &mut tally.done),
            Next::End(Ending::Abandoned) => self.ends(id, Duration::ZERO, |tally| &mut tally.abandoned),
        }
    }

    /// A session ends and is counted, and what waited for its end goes on.
    fn ends(&mut self, id: SessionId, pause: Duration, count: fn(&mut Tally) -> &mut u64) {
        let Some(ended) = self.active.remove(&id) else { return };
        let Some((parent, _)) = ended.parent else {
            *count(&mut self.tally) += 1;
            if !self.is_open {
                self.schedule(pause, Happening::Arrives);
            }
            return;
        };
        if let Some(waiting) = self.active.get_mut(&parent) {
            waiting.waits_for -= 1;
            if waiting.waits_for == 0 {
                self.schedule(pause, Happening::Begins(parent));
            }
        }
    }

    // === Requests ===

    fn send(&mut self, session: SessionId) {
        let Some(active) = self.active.get_mut(&session) else { return };
        let Some(call) = active.call else { return };
        let (prompt, messages) = active.prompt(call.kind);
        self.next_request += 1;
        let id = self.next_request;
        let routed = Routed {
            id,
            session: active.key,
            parent: active.parent.map(|(_, key)| key),
            prompt: &prompt,
            messages: &messages,
            bytes: (prompt.len() * TOKEN_BYTES) as u32,
        };
        let replica = self.policy.choose(&routed, &View { now: self.now, in_flight: &self.in_flight });
        // No text of a workload has the seed of an answer.
        let output = words(u64::MAX - id, call.output);
        let request = InFlight { session, kind: call.kind, replica: None, sent: self.now, prompt, output, first_token: None };
        self.requests.insert(id, request);
        if let Some(after) = call.hang_up {
            self.schedule(after, Happening::HangsUp(id));
        }
        match replica {
            Some(replica) => self.submit(id, replica),
            None if !self.holds => {
                self.holds = true;
                self.schedule(RELEASES, Happening::Releases);
            }
            None => {}
        }
    }

    fn submit(&mut self, id: u64, replica: usize) {
        let Some(in_flight) = self.requests.get_mut(&id) else { return };
        let (prompt, output) = (std::mem::take(&mut in_flight.prompt), in_flight.output.clone());
        let session = in_flight.session;
        in_flight.replica = Some(replica);
        self.in_flight[replica] += 1;
        if self.engines[replica].submit(&Request { id, prompt, output, reason: FinishReason::Length }).is_err() {
            self.over(id);
            self.tally.refused_calls += 1;
            self.ends(session, PAUSE_AFTER_REFUSAL, |tally| &mut tally.refused);
            return;
        }
        self.start_step(replica);
    }

    fn releases(&mut self) {
        for (id, replica) in self.policy.released(&View { now: self.now, in_flight: &self.in_flight }) {
            self.submit(id, replica);
        }
        self.holds = self.requests.values().any(|request| request.replica.is_none());
        if self.holds {
            self.schedule(RELEASES, Happening::Releases);
        }
    }

    fn start_step(&mut self, replica: usize) {
        if !self.stepping[replica]
            && let Some(takes) = self.engines[replica].start_step()
        {
            self.stepping[replica] = true;
            self.schedule(takes, Happening::StepEnds(replica));
        }
    }

    fn step_ends(&mut self, replica: usize) {
        let mut events = Vec::new();
        self.engines[replica].finish_step(&mut events);
        self.stepping[replica] = false;
        for event in events {
            match event {
                Event::FirstToken { id, .. } => {
                    if let Some(request) = self.requests.get_mut(&id) {
                        request.first_token = Some(self.now);
                    }
                }
                Event::Token { .. } => {}
                Event::Finished { id, .. } => self.answered(id),
            }
        }
        self.start_step(replica);
    }

    fn answered(&mut self, id: u64) {
        let Some(request) = self.over(id) else { return };
        let Some(active) = self.active.get_mut(&request.session) else { return };
        active.session.answered(text_of(&request.output));
        self.tally.output_tokens += request.output.len() as u64;
        if request.kind != CallKind::Side {
            let first_token = request.first_token.unwrap_or(self.now);
            let before = request.replica.and_then(|replica| active.last.replace(replica));
            let stayed = before.map(|before| Some(before) == request.replica);
            self.tally.turn(first_token - request.sent + self.network, stayed);
        }
        self.goes_on(request.session);
    }

    /// The client of a request that is still on its way goes, and the engine learns of it at once.
    fn hang_up(&mut self, id: u64) {
        if let Some(request) = self.over(id) {
            if let Some(replica) = request.replica {
                self.engines[replica].abort(id);
            }
            self.goes_on(request.session);
        }
    }

    /// A request is no longer in flight.
    fn over(&mut self, id: u64) -> Option<InFlight> {
        let request = self.requests.remove(&id)?;
        if let Some(replica) = request.replica {
            self.in_flight[replica] -= 1;
        }
        self.policy.ended(id, &View { now: self.now, in_flight: &self.in_flight });
        Some(request)
    }

    fn policy_looks(&mut self) {
        self.policy.counted(&self.counters());
        let engines: Vec<Gauges> = self.engines.iter().map(Engine::metrics).collect();
        self.policy.looked(&engines, &View { now: self.now, in_flight: &self.in_flight });
        if let Some(every) = self.policy.looks_every() {
            self.schedule(every, Happening::PolicyLooks);
        }
    }
}

impl Active {
    /// The call's prompt and where its messages end. What the history had at the last call is not made into tokens again.
    fn prompt(&mut self, kind: CallKind) -> (Vec<u32>, Vec<usize>) {
        if kind == CallKind::Side {
            let (mut prompt, mut messages) = Default::default();
            append(&mut prompt, &mut messages, self.session.messages());
            return (prompt.into_tokens(), messages);
        }
        if kind == CallKind::Compacted {
            (self.prompt, self.messages) = Default::default();
        }
        let known = self.messages.len();
        append(&mut self.prompt, &mut self.messages, &self.session.messages()[known..]);
        (self.prompt.clone().into_tokens(), self.messages.clone())
    }
}

fn append(prompt: &mut Prompt, ends: &mut Vec<usize>, messages: &[crate::workload::Message]) {
    for message in messages {
        prompt.turn(message.role, &message.text);
        ends.push(prompt.len());
    }
}
