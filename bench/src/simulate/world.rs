//! Virtual time: what happens next, and what it leads to.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use super::policy::{HomingOptions, Policy, PolicyName, View};
use super::report::{SimulationReport, Tally};
use super::workload::{Session, Workload};
use crate::engine::{Engine, EngineConfig, Event, FinishReason, Gauges, Request};
use crate::text::{TOKEN_BYTES, answer};

/// How often the collector looks, and how often replicas are counted as busy or not.
const LOOK: Duration = Duration::from_millis(250);

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Replicas.
    pub replicas: usize,
    /// Each replica's engine.
    pub engine: EngineConfig,
    /// Sessions at once; one that ends is replaced.
    pub sessions: usize,
    /// What they send.
    pub workload: Workload,
    /// Where turns go.
    pub policy: PolicyName,
    /// Homing's settings.
    pub homing: HomingOptions,
    /// For how long.
    pub duration: Duration,
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// An engine's step ends.
    Step(usize),
    /// A session sends its next turn.
    Turn(usize),
    /// The collector looks.
    Look,
}

/// A turn on its way.
struct Turn {
    place: usize,
    replica: usize,
    sent: Duration,
    output: Vec<u32>,
    first_token: Option<Duration>,
}

struct World {
    simulation: Simulation,
    policy: Box<dyn Policy>,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64, Next)>>,
    order: u64,
    engines: Vec<Engine>,
    stepping: Vec<bool>,
    in_flight: Vec<u32>,
    /// The sessions at once, and where the last turn of each was served.
    sessions: Vec<(Session, Option<usize>)>,
    turns: HashMap<u64, Turn>,
    next_session: u64,
    next_turn: u64,
    tally: Tally,
}

/// Runs a simulation to its end.
pub fn run(simulation: &Simulation) -> SimulationReport {
    let mut world = World::new(simulation.clone());
    while let Some(Reverse((at, _, next))) = world.queue.pop() {
        if at > simulation.duration {
            break;
        }
        world.now = at;
        match next {
            Next::Step(replica) => world.step_ends(replica),
            Next::Turn(place) => world.send(place),
            Next::Look => world.look(),
        }
    }
    let counters: Vec<_> = world.engines.iter().map(Engine::counters).collect();
    world.tally.report(simulation, &counters)
}

impl World {
    fn new(simulation: Simulation) -> Self {
        let max_num_seqs = simulation.engine.max_num_seqs as u32;
        let mut world = Self {
            policy: simulation.policy.policy(simulation.replicas, max_num_seqs, simulation.homing),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            order: 0,
            engines: (0..simulation.replicas).map(|_| Engine::new(simulation.engine.clone())).collect(),
            stepping: vec![false; simulation.replicas],
            in_flight: vec![0; simulation.replicas],
            sessions: Vec::new(),
            turns: HashMap::new(),
            next_session: 0,
            next_turn: 0,
            tally: Tally::default(),
            simulation,
        };
        for place in 0..world.simulation.sessions {
            let session = world.new_session();
            world.sessions.push((session, None));
            // Nobody starts all sessions at the same instant.
            world.schedule(Duration::from_millis(50 * place as u64), Next::Turn(place));
        }
        world.schedule(Duration::ZERO, Next::Look);
        world
    }

    fn new_session(&mut self) -> Session {
        self.next_session += 1;
        self.simulation.workload.session(self.next_session)
    }

    fn schedule(&mut self, after: Duration, next: Next) {
        self.order += 1;
        self.queue.push(Reverse((self.now + after, self.order, next)));
    }

    fn gauges(&self) -> Vec<Gauges> {
        self.engines.iter().map(Engine::gauges).collect()
    }

    fn send(&mut self, place: usize) {
        let gauges = self.gauges();
        let (session, _) = &mut self.sessions[place];
        let prompt = session.next_prompt();
        let output = answer(&prompt, session.max_tokens());
        self.next_turn += 1;
        let id = self.next_turn;
        let view = View { now_ms: self.now.as_millis() as u64, in_flight: &self.in_flight, gauges: &gauges };
        let bytes = (prompt.len() * TOKEN_BYTES) as u32;
        let replica = self.policy.choose(id, session.number, bytes, &view).replica;
        let request = Request { id, prompt, output: output.clone(), reason: FinishReason::Length };
        self.in_flight[replica] += 1;
        self.turns.insert(id, Turn { place, replica, sent: self.now, output, first_token: None });
        match self.engines[replica].submit(&request) {
            Ok(()) => self.start_step(replica),
            Err(_) => self.end(id, false),
        }
    }

    fn start_step(&mut self, replica: usize) {
        if !self.stepping[replica]
            && let Some(takes) = self.engines[replica].start_step()
        {
            self.stepping[replica] = true;
            self.schedule(takes, Next::Step(replica));
        }
    }

    fn step_ends(&mut self, replica: usize) {
        let mut events = Vec::new();
        self.engines[replica].finish_step(&mut events);
        self.stepping[replica] = false;
        for event in events {
            match event {
                Event::FirstToken { id, .. } => {
                    if let Some(turn) = self.turns.get_mut(&id) {
                        turn.first_token.get_or_insert(self.now);
                    }
                }
                Event::Token { .. } => {}
                Event::Finished { id, .. } => self.end(id, true),
            }
        }
        self.start_step(replica);
    }

    fn end(&mut self, id: u64, served: bool) {
        let gauges = self.gauges();
        let Some(turn) = self.turns.remove(&id) else { return };
        self.in_flight[turn.replica] -= 1;
        let view = View { now_ms: self.now.as_millis() as u64, in_flight: &self.in_flight, gauges: &gauges };
        self.policy.ended(id, &view);
        let first_token = turn.first_token.filter(|_| served);
        self.tally.turn(turn.sent, first_token, self.now, turn.output.len());
        let (session, last) = &mut self.sessions[turn.place];
        if let Some(last) = last.replace(turn.replica) {
            self.tally.later_turn(last == turn.replica);
        }
        session.answered(&turn.output);
        let think = session.think();
        if session.is_done() || !served {
            self.tally.sessions += 1;
            self.sessions[turn.place] = (self.new_session(), None);
        }
        self.schedule(think, Next::Turn(turn.place));
    }

    fn look(&mut self) {
        let gauges = self.gauges();
        let busy = gauges.iter().filter(|gauges| gauges.running > 0).count();
        self.tally.look(busy);
        let view = View { now_ms: self.now.as_millis() as u64, in_flight: &self.in_flight, gauges: &gauges };
        self.policy.snapshot(&view);
        self.schedule(LOOK, Next::Look);
    }
}
