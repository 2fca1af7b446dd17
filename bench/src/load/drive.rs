//! Sessions on their way.

use super::LoadConfig;
use super::api::{Message, Speaker};
use super::client::{Endpoint, Leave};
use super::engines::Counted;
use super::report::LoadReport;
use super::tally::Tally;
use crate::workload::{CallKind, Ending, Next, NextCall, Session, SessionPlan, Sessions};
use anyhow::{Context, Result};
use futures_util::future::{BoxFuture, FutureExt, join_all};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

/// Before a new session, after one that failed: an endpoint that refuses at once is not hammered.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// What the sessions of a run share.
pub(super) struct Run {
    config: LoadConfig,
    endpoint: Endpoint,
    start: Instant,
    tally: Mutex<Tally>,
    plans: Mutex<Sessions>,
}

/// The tasks that carry sessions out.
pub(super) struct Tasks(JoinSet<()>);

/// How a session, or one call of it, went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Went {
    /// To its end.
    Well,
    /// A turn failed.
    Wrong,
    /// It stopped without notice, as planned.
    Abandoned,
    /// The run was over.
    Late,
}

impl Run {
    pub(super) fn new(config: LoadConfig, endpoint: Endpoint, start: Instant) -> Self {
        let plans = Mutex::new(config.workload.sessions(config.first_session));
        Self { config, endpoint, start, tally: Mutex::default(), plans }
    }

    pub(super) fn config(&self) -> &LoadConfig {
        &self.config
    }

    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the run began.
    pub(super) fn start(&self) -> Instant {
        self.start
    }

    /// When the run is over.
    pub(super) fn end(&self) -> Instant {
        self.start + self.config.duration
    }

    /// Starts the sessions.
    pub(super) fn begin(self: &Arc<Self>) -> Tasks {
        let mut tasks = JoinSet::new();
        if self.config.is_open() {
            tasks.spawn(Arc::clone(self).arrivals());
        } else {
            for _ in 0..self.config.sessions {
                tasks.spawn(Arc::clone(self).one_after_the_other());
            }
        }
        Tasks(tasks)
    }

    /// What was seen, after all sessions have ended.
    pub(super) fn report(&self, elapsed: Duration, counted: Counted, cpu: Duration) -> LoadReport {
        self.tally().clone().report(&self.config, elapsed, counted, cpu)
    }

    fn next_plan(&self) -> Option<SessionPlan> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).next()
    }

    /// A time of the engines on the real clock.
    fn real(&self, model: Duration) -> Duration {
        model.div_f64(self.config.speed)
    }

    /// The closed loop: one of the sessions at once, always replaced.
    async fn one_after_the_other(self: Arc<Self>) {
        while Instant::now() < self.end()
            && let Some(plan) = self.next_plan()
        {
            match self.root(plan, Instant::now()).await {
                Went::Wrong => sleep(PAUSE_AFTER_ERROR).await,
                // It goes on after the end, only nobody looks any more: nobody takes its place in what is left of the run.
                Went::Late => break,
                Went::Well | Went::Abandoned => {}
            }
        }
    }

    /// The open loop: sessions when they come. Nothing here waits for an answer.
    async fn arrivals(self: Arc<Self>) {
        let mut sessions = JoinSet::new();
        let mut rng = ChaCha8Rng::seed_from_u64(self.config.seed);
        let mut after = 0.0;
        while let Some(plan) = self.next_plan() {
            after = match (self.config.rate, plan.arrival_ms) {
                // Times between the arrivals of a Poisson process are distributed exponentially.
                (Some(rate), _) => after - (1.0 - rng.random::<f64>()).ln() * 60.0 / rate,
                (None, arrival_ms) => arrival_ms.unwrap_or_default() as f64 / 1000.0,
            };
            let Ok(arrival) = Duration::try_from_secs_f64(after / self.config.speed) else { break };
            let due = self.start + arrival;
            if due >= self.end() {
                break;
            }
            sleep_until(due.into()).await;
            let run = Arc::clone(&self);
            sessions.spawn(async move { run.root(plan, due).await });
            // Those that have ended are forgotten.
            while sessions.try_join_next().is_some() {}
        }
        // A task's panic is the run's.
        while let Some(ended) = sessions.join_next().await {
            if let Err(error) = ended
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            }
        }
    }

    /// A session that no other started, which was due then.
    async fn root(self: &Arc<Self>, plan: SessionPlan, due: Instant) -> Went {
        {
            let mut tally = self.tally();
            tally.sessions_started += 1;
            tally.sessions_now += 1;
        }
        let root = plan.id.clone();
        let went = self.session(plan, root, due).await;
        let mut tally = self.tally();
        tally.sessions_now -= 1;
        if went == Went::Well && Instant::now() < self.end() {
            tally.sessions_completed += 1;
        }
        went
    }

    /// A session, or a subagent's: both go the same way.
    fn session<'a>(self: &'a Arc<Self>, plan: SessionPlan, root: String, mut due: Instant) -> BoxFuture<'a, Went> {
        async move {
            let speaker = Speaker { id: plan.id.clone(), parent: plan.parent.clone(), root };
            let mut rng = self.rng(&speaker.id);
            let mut session = Session::new(plan);
            let mut served_by = None;
            loop {
                match session.advance() {
                    Next::End(Ending::Done) => return Went::Well,
                    Next::End(Ending::Abandoned) => return Went::Abandoned,
                    Next::FanOut(plans) => {
                        let subagents = plans.into_iter().map(|plan| self.session(plan, speaker.root.clone(), due));
                        // What becomes of subagents is counted with their turns; who started them goes on with what came back.
                        join_all(subagents).await;
                        due = Instant::now();
                    }
                    Next::Call(call) => {
                        due += self.real(call.think);
                        match self.call(&mut session, &speaker, call, due, &mut rng, &mut served_by).await {
                            Went::Well => due = Instant::now(),
                            other => return other,
                        }
                    }
                }
            }
        }
        .boxed()
    }

    /// Sends a call when it is due, counts it, and takes the answer into the history.
    async fn call(
        &self,
        session: &mut Session,
        speaker: &Speaker,
        call: NextCall,
        due: Instant,
        rng: &mut ChaCha8Rng,
        served_by: &mut Option<String>,
    ) -> Went {
        if due >= self.end() {
            return Went::Late;
        }
        sleep_until(due.into()).await;
        // A closed loop has no times that could be missed: a request that is sent late was thought about for longer.
        let due = if self.config.is_open() { due } else { Instant::now() };
        let leave = match call.hang_up {
            Some(after) => Some(Leave::At(due + self.real(after))),
            None if rng.random_bool(self.config.abort_share) => {
                Some(Leave::AfterTokens(rng.random_range(1..=call.output.max(2) as u64 - 1)))
            }
            None => None,
        };
        let messages: Vec<_> =
            session.messages().iter().map(|message| Message { role: message.role, content: &message.text }).collect();
        self.tally().on_their_way += 1;
        let answer = self.endpoint.call(speaker, &messages, call.output, due, leave).await;
        let mut tally = self.tally();
        tally.on_their_way -= 1;
        match answer {
            Ok(answer) => {
                // A call beside the conversation may go anywhere.
                let mut anywhere = None;
                let served_by = if call.kind == CallKind::Side { &mut anywhere } else { served_by };
                tally.answered(&answer, Instant::now() < self.end(), served_by);
                drop(tally);
                session.answered(answer.text);
                Went::Well
            }
            Err(error) => {
                tally.failed(error);
                Went::Wrong
            }
        }
    }

    /// Randomness that belongs to one session of one run.
    fn rng(&self, id: &str) -> ChaCha8Rng {
        let mut hasher = DefaultHasher::new();
        (self.config.seed, id).hash(&mut hasher);
        ChaCha8Rng::seed_from_u64(hasher.finish())
    }
}

impl Tasks {
    /// Waits until every session has ended.
    ///
    /// # Errors
    /// A session's task that panicked.
    pub(super) async fn all(&mut self) -> Result<()> {
        while let Some(ended) = self.0.join_next().await {
            ended.context("a session's task failed")?;
        }
        Ok(())
    }

    /// Drops what has not ended.
    pub(super) async fn stop(mut self) {
        self.0.shutdown().await;
    }
}
