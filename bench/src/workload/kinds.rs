//! Kinds of load.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::sync::Arc;

use super::plan::{Call, SessionPlan, Step, Text};

/// Tokens that a chat template adds to a message, about: what [`crate::text`] adds.
const TEMPLATE: usize = 9;

/// What sessions are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Synthetic agent sessions of one shape that send the next turn when the answer has come, after the way to the client and back.
    Reference(SessionShape),
    /// Sessions as agents have them: contexts from 5k to 100k tokens, most think times under a second, one in twenty above ten, some of
    /// minutes; calls for titles beside the conversation; one session in four that reaches its window is compacted and goes on; one in
    /// ten ends without notice, half of those in the middle of an answer.
    Agents,
    /// [`SessionShape::default`], but twice in a session two to four subagents work side by side.
    Subagents,
    /// Six turns on contexts of 5k to 100k tokens, evenly on a logarithmic scale; no think time.
    Long,
    /// [`SessionShape::default`] with agents' think times, but one session in eight begins with 20k tokens and has 20 turns.
    Skewed,
    /// [`SessionShape::default`], and sessions come when they come: a Poisson process.
    Open {
        /// Sessions a minute, above 0.
        per_minute: f64,
    },
}

/// A session of one shape: a system prompt that all sessions share, a long first message of its own, then turns that each add a little to
/// a history sent whole every time. Token counts are exact on the stand-in replica, where four bytes are one token, and approximate on a
/// real engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SessionShape {
    /// Tokens of the system prompt.
    pub system_tokens: usize,
    /// Tokens of the first message.
    pub first_tokens: usize,
    /// Requests in a session, the first included.
    pub turns: usize,
    /// Tokens that the user adds at each turn after the first.
    pub turn_tokens: usize,
    /// Most tokens in an answer.
    pub max_tokens: usize,
}

impl Default for SessionShape {
    fn default() -> Self {
        Self { system_tokens: 3500, first_tokens: 7300, turns: 6, turn_tokens: 400, max_tokens: 256 }
    }
}

/// Sessions without end, or those of a trace. The same seed gives the same sessions.
#[derive(Clone, Debug)]
pub struct Workload {
    seed: u64,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    Kind(Kind),
    Trace(Arc<[SessionPlan]>),
}

/// A workload's sessions, one after the other; those of an open loop in the order in which they come.
#[derive(Clone, Debug)]
pub struct Sessions {
    workload: Workload,
    next: u64,
    /// Of the next arrival, in an open loop.
    arrival_ms: f64,
    /// Draws the times between arrivals.
    gaps: ChaCha8Rng,
}

impl Workload {
    /// Sessions of one kind.
    pub fn new(kind: Kind, seed: u64) -> Self {
        Self { seed, source: Source::Kind(kind) }
    }

    /// The sessions of a trace, in its order, and no others. Either all have an arrival, in ascending order, or none.
    pub fn from_trace(plans: Vec<SessionPlan>) -> Self {
        Self { seed: 0, source: Source::Trace(plans.into()) }
    }

    /// The sessions from this number on, counted from 0: runs that shall share no session begin at different ones.
    pub fn sessions(&self, first: u64) -> Sessions {
        Sessions { workload: self.clone(), next: first, arrival_ms: 0.0, gaps: rng(self.seed, &[0, first]) }
    }

    /// Whether sessions come at times of their own. In a trace all do, or none.
    pub fn is_open(&self) -> bool {
        match &self.source {
            Source::Kind(kind) => matches!(kind, Kind::Open { .. }),
            Source::Trace(plans) => plans.first().is_some_and(|plan| plan.arrival_ms.is_some()),
        }
    }

    /// The session with this number, counted from 0; without its arrival, which depends on those before it. None behind a trace's end.
    pub fn session(&self, number: u64) -> Option<SessionPlan> {
        let kind = match &self.source {
            Source::Trace(plans) => return plans.get(usize::try_from(number).ok()?).cloned(),
            Source::Kind(kind) => *kind,
        };
        let mut author = Author { rng: rng(self.seed, &[1, number]), system_seed: rng(self.seed, &[2]).next_u64() >> 11 };
        Some(match kind {
            Kind::Reference(shape) => author.shaped(shape, Author::round_trip),
            Kind::Open { .. } => author.shaped(SessionShape::default(), Author::round_trip),
            Kind::Agents => author.agent(),
            Kind::Subagents => author.with_subagents(),
            Kind::Long => author.long(),
            Kind::Skewed => {
                let long = SessionShape { first_tokens: 20_000, turns: 20, ..SessionShape::default() };
                let shape = if author.rng.random_ratio(1, 8) { long } else { SessionShape::default() };
                author.shaped(shape, Author::think)
            }
        })
    }
}

impl Iterator for Sessions {
    type Item = SessionPlan;

    fn next(&mut self) -> Option<SessionPlan> {
        let mut plan = self.workload.session(self.next)?;
        self.next += 1;
        if let Source::Kind(Kind::Open { per_minute }) = self.workload.source {
            // Times between the arrivals of a Poisson process are distributed exponentially.
            self.arrival_ms += -(1.0 - self.gaps.random::<f64>()).ln() * 60_000.0 / per_minute;
            plan.arrival_ms = Some(self.arrival_ms as u64);
        }
        Some(plan)
    }
}

/// Randomness that belongs to this seed and this place in the workload.
fn rng(seed: u64, place: &[u64]) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip([seed].iter().chain(place)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// Writes one session's plan.
struct Author {
    rng: ChaCha8Rng,
    /// Of the system prompt that all sessions of the workload share.
    system_seed: u64,
}

impl Author {
    /// New text. Seeds have 53 bits, which every JSON parser keeps.
    fn text(&mut self, tokens: usize) -> Text {
        Text { seed: self.rng.next_u64() >> 11, tokens }
    }

    fn call(&mut self, think_ms: u64, tokens: usize, output: usize) -> Call {
        Call { think_ms, text: vec![self.text(tokens)], output, hang_up_ms: None }
    }

    fn plan(&mut self, system_tokens: usize, steps: Vec<Step>) -> SessionPlan {
        let system = if system_tokens == 0 { Vec::new() } else { vec![Text { seed: self.system_seed, tokens: system_tokens }] };
        let id = uuid::Builder::from_random_bytes(self.rng.random()).into_uuid().to_string();
        SessionPlan { id, parent: None, arrival_ms: None, system, steps }
    }

    /// Evenly on a logarithmic scale.
    fn log_uniform(&mut self, least: usize, most: usize) -> usize {
        self.rng.random_range((least as f64).ln()..=(most as f64).ln()).exp().round() as usize
    }

    /// What passes between an answer and the next turn of a client that does not think: the way there and back, a connection, the client's
    /// own work. The calibration to the published measurement found it. Without it, sessions march in step and flatter any policy.
    fn round_trip(&mut self) -> u64 {
        self.rng.random_range(500..1_500)
    }

    /// How long an agent's tools, or its user, take.
    fn think(&mut self) -> u64 {
        match self.rng.random_range(0..1000) {
            0..800 => self.rng.random_range(50..1_000),
            800..950 => self.rng.random_range(1_000..10_000),
            950..990 => self.rng.random_range(10_000..60_000),
            _ => self.rng.random_range(60_000..240_000),
        }
    }

    fn shaped(&mut self, shape: SessionShape, think: fn(&mut Self) -> u64) -> SessionPlan {
        let turn = |turn: usize| {
            let tokens = if turn == 0 { shape.first_tokens } else { shape.turn_tokens };
            let think_ms = if turn == 0 { self.round_trip() } else { think(self) };
            Step::Turn(self.call(think_ms, tokens, shape.max_tokens))
        };
        let steps = (0..shape.turns).map(turn).collect();
        self.plan(shape.system_tokens, steps)
    }

    fn long(&mut self) -> SessionPlan {
        let shape = SessionShape::default();
        let later = (shape.turns - 1) * (shape.turn_tokens + shape.max_tokens + 2 * TEMPLATE);
        let context = self.log_uniform(5_000, 100_000);
        // The smallest contexts have little room for later turns, and short prompts rather than long ones.
        let system_tokens = shape.system_tokens.min(context / 5);
        let fixed = system_tokens + later + shape.max_tokens + 3 * TEMPLATE;
        let first_tokens = context.saturating_sub(fixed).max(500);
        self.shaped(SessionShape { system_tokens, first_tokens, ..shape }, Self::round_trip)
    }

    fn with_subagents(&mut self) -> SessionPlan {
        let mut plan = self.shaped(SessionShape::default(), Self::round_trip);
        for after in [4, 2] {
            let count = self.rng.random_range(2..=4);
            let subagents = (0..count)
                .map(|_| {
                    let (first_tokens, turns) = (self.log_uniform(500, 4_000), self.rng.random_range(3..=6));
                    let shape = SessionShape { first_tokens, turns, ..SessionShape::default() };
                    SessionPlan { parent: Some(plan.id.clone()), ..self.shaped(shape, Self::round_trip) }
                })
                .collect();
            plan.steps.insert(after, Step::FanOut(subagents));
        }
        plan
    }

    fn agent(&mut self) -> SessionPlan {
        let system_tokens = SessionShape::default().system_tokens;
        let window = self.log_uniform(5_000, 100_000);
        let room = window.saturating_sub(system_tokens + 3 * TEMPLATE);
        let mut steps = Vec::new();
        if self.rng.random_ratio(1, 2) {
            steps.push(Step::Side(self.title()));
        }
        let share = self.rng.random_range(0.2..0.6);
        let output = self.output(room);
        let think_ms = self.round_trip();
        let first = self.call(think_ms, (room as f64 * share) as usize, output);
        let mut used = Text::count(&first.text) + output;
        steps.push(Step::Turn(first));
        for _ in 0..40 {
            let output = self.output(room);
            let (tokens, think_ms) = (self.log_uniform(50, 3_000).min(room / 4), self.think());
            let mut call = self.call(think_ms, tokens, output);
            used += tokens + output + 2 * TEMPLATE;
            if used > room {
                if !self.rng.random_ratio(1, 4) {
                    break;
                }
                // What is left is a summary, and what is asked next.
                let summary = self.log_uniform(500, 4_000).min(room / 3);
                call.text.insert(0, self.text(summary));
                used = Text::count(&call.text) + output;
                steps.push(Step::Compact(call));
            } else {
                steps.push(Step::Turn(call));
            }
            if self.rng.random_ratio(1, 20) {
                steps.push(Step::Side(self.title()));
            }
        }
        if self.rng.random_ratio(1, 10) {
            self.abandon(&mut steps);
        }
        self.plan(system_tokens, steps)
    }

    fn output(&mut self, room: usize) -> usize {
        self.log_uniform(30, 800).min(room / 4)
    }

    /// A short call for a title, or a check of a command.
    fn title(&mut self) -> Call {
        let (tokens, output) = (self.log_uniform(100, 1_000), self.rng.random_range(5..40));
        self.call(0, tokens, output)
    }

    /// Cuts a session short, between calls or within one.
    fn abandon(&mut self, steps: &mut Vec<Step>) {
        // Not before the first turn.
        steps.truncate(self.rng.random_range(2.min(steps.len())..=steps.len()));
        let hang_up_ms = self.rng.random_range(100..5_000);
        match steps.last_mut() {
            Some(Step::Turn(call) | Step::Compact(call) | Step::Side(call)) if self.rng.random_ratio(1, 2) => {
                call.hang_up_ms = Some(hang_up_ms);
            }
            _ => steps.push(Step::Stop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const KINDS: [Kind; 6] = [
        Kind::Reference(SessionShape { system_tokens: 3500, first_tokens: 7300, turns: 6, turn_tokens: 400, max_tokens: 256 }),
        Kind::Agents,
        Kind::Subagents,
        Kind::Long,
        Kind::Skewed,
        Kind::Open { per_minute: 12.0 },
    ];

    fn plans(kind: Kind, seed: u64, count: usize) -> Vec<SessionPlan> {
        Workload::new(kind, seed).sessions(0).take(count).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_sessions_and_another_gives_others() {
        for kind in KINDS {
            assert_eq!(plans(kind, 1, 20), plans(kind, 1, 20));
            assert!(plans(kind, 1, 20).iter().zip(&plans(kind, 2, 20)).all(|(one, two)| one != two), "{kind:?}");
        }
    }

    #[test]
    fn sessions_share_their_system_prompt_and_nothing_else() {
        for kind in KINDS {
            let plans = plans(kind, 3, 30);
            let systems: HashSet<_> = plans.iter().map(|plan| plan.system[0].seed).collect();
            assert_eq!(systems.len(), 1, "{kind:?}");
            let texts: Vec<_> =
                plans.iter().flat_map(SessionPlan::calls).flat_map(|call| &call.text).map(|text| text.seed).collect();
            assert_eq!(texts.iter().collect::<HashSet<_>>().len(), texts.len(), "{kind:?}");
            let ids: HashSet<_> = plans.iter().map(|plan| &plan.id).collect();
            assert_eq!(ids.len(), plans.len());
        }
    }

    #[test]
    fn sessions_that_begin_at_a_number_are_those_after_it() {
        let workload = Workload::new(Kind::Agents, 1);
        assert_eq!(workload.sessions(5).next(), workload.sessions(0).nth(5));
    }

    #[test]
    fn a_reference_session_has_its_shape() {
        let plan = &plans(KINDS[0], 1, 1)[0];
        let tokens: Vec<_> = plan.calls().map(|call| (Text::count(&call.text), call.output)).collect();
        assert_eq!(tokens[0], (7300, 256));
        assert_eq!(tokens[1..], [(400, 256); 5]);
        assert_eq!(Text::count(&plan.system), 3500);
        assert_eq!(plan.largest_call(), 3500 + 7300 + 5 * 400 + 6 * 256);
    }

    #[test]
    fn contexts_spread_from_5k_to_100k() {
        for kind in [Kind::Agents, Kind::Long] {
            let mut largest: Vec<_> = plans(kind, 1, 400).iter().map(SessionPlan::largest_call).collect();
            largest.sort_unstable();
            assert!(largest[0] > 3_500 && largest[399] <= 100_000, "{kind:?}: {} to {}", largest[0], largest[399]);
            assert!(largest[40] < 9_000 && largest[360] > 60_000, "{kind:?}: {} to {}", largest[40], largest[360]);
        }
    }

    #[test]
    fn agents_think_mostly_under_a_second_and_sometimes_for_minutes() {
        let plans = plans(Kind::Agents, 1, 400);
        let thinks: Vec<_> = plans
            .iter()
            .flat_map(|plan| {
                plan.steps.iter().filter_map(|step| if let Step::Turn(call) = step { Some(call) } else { None }).skip(1)
            })
            .map(|call| call.think_ms)
            .collect();
        let share = |above: u64| thinks.iter().filter(|think| **think >= above).count() as f64 / thinks.len() as f64;
        assert!((0.15..0.25).contains(&share(1_000)), "{}", share(1_000));
        assert!((0.04..0.06).contains(&share(10_000)), "{}", share(10_000));
        assert!(share(60_000) > 0.002);
    }

    #[test]
    fn some_agents_compact_call_aside_and_end_without_notice() {
        let plans = plans(Kind::Agents, 1, 400);
        let share = |is: fn(&SessionPlan) -> bool| plans.iter().filter(|plan| is(plan)).count() as f64 / 400.0;
        let has = |plan: &SessionPlan, is: fn(&Step) -> bool| plan.steps.iter().any(is);
        assert!((0.1..0.4).contains(&share(|plan| plan.steps.iter().any(|step| matches!(step, Step::Compact(_))))));
        assert!(plans.iter().filter(|plan| has(plan, |step| matches!(step, Step::Side(_)))).count() > 200);
        let stops = share(|plan| plan.steps.last() == Some(&Step::Stop));
        let hangs_up = share(|plan| plan.calls().any(|call| call.hang_up_ms.is_some()));
        assert!((0.02..0.09).contains(&stops) && (0.02..0.09).contains(&hangs_up), "{stops} {hangs_up}");
    }

    #[test]
    fn subagents_know_their_parent_and_have_names_of_their_own() {
        for plan in plans(Kind::Subagents, 1, 20) {
            let fans: Vec<_> =
                plan.steps.iter().filter_map(|step| if let Step::FanOut(of) = step { Some(of) } else { None }).collect();
            assert_eq!(fans.len(), 2);
            for subagents in fans {
                assert!((2..=4).contains(&subagents.len()));
                assert!(subagents.iter().all(|one| one.parent.as_ref() == Some(&plan.id) && one.id != plan.id));
            }
        }
    }

    #[test]
    fn an_open_loops_sessions_come_at_its_rate_and_a_closed_loops_when_there_is_room() {
        let plans = plans(Kind::Open { per_minute: 12.0 }, 1, 2_000);
        let arrivals: Vec<_> = plans.iter().map(|plan| plan.arrival_ms.expect("an open loop")).collect();
        assert!(arrivals.is_sorted());
        let per_minute = 2_000.0 / (arrivals[1_999] as f64 / 60_000.0);
        assert!((11.0..13.0).contains(&per_minute), "{per_minute}");
        assert!(Workload::new(KINDS[0], 1).sessions(0).take(5).all(|plan| plan.arrival_ms.is_none()));
    }
}
