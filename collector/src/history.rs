//! The last hour of every pool and replica, in steps of five seconds. Memory is bounded: 720 steps of 16 bytes a replica, and of replicas
//! that are gone no more than a pool may have.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use homing_routing::replica::ReplicaName;
use homing_routing::sync::MAX_REPLICAS;
use serde::{Serialize, Serializer};
use tokio::time::{Instant, MissedTickBehavior};

use crate::fleet::{Fleet, now_ms};
use crate::status::{ReplicaStatus, Status};

/// The length of a step.
pub const STEP: Duration = Duration::from_secs(5);

/// How many steps are kept: an hour.
pub const STEPS: usize = 720;

/// Steps in a minute.
const MINUTE: usize = 12;

/// Readings further apart than this are not compared: what happened between them belongs to no step.
const GAP: Duration = Duration::from_secs(12);

/// Figures older than this are not taken for a step's.
const OLD_MS: u64 = 5_000;

/// The last hour of everything.
#[derive(Debug, Default)]
pub struct History(Mutex<Recorded>);

#[derive(Debug, Default)]
struct Recorded {
    /// The number of the newest step; steps count from 1.
    step: u64,
    /// When it ended, in milliseconds since 1970.
    at_ms: u64,
    pools: BTreeMap<String, BTreeMap<ReplicaName, Track>>,
}

/// One replica's last hour.
#[derive(Debug, Default)]
struct Track {
    last: Option<Reading>,
    /// One point a step, the newest last.
    points: VecDeque<Point>,
    /// For how many steps it has been gone.
    gone: usize,
}

/// What one reading says of a replica: counters since its engine started.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reading {
    at: Instant,
    prompt: u64,
    cached: Option<u64>,
    generated: u64,
}

/// One step of one replica. What is not known is NaN, which needs no more room than a number.
#[derive(Clone, Copy, Debug)]
struct Point {
    cached: f32,
    computed: f32,
    generated: f32,
    in_flight: f32,
}

/// What a pool did in its last hour, or since the collector started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Hour {
    /// The newest step, for asking only for what is newer; 0 before the first.
    pub step: u64,
    /// Prompt tokens served from the cache.
    pub cached_tokens: u64,
    /// Prompt tokens computed, and those of which the engine did not say.
    pub computed_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Cached among all prompt tokens, 0 to 1; absent when none was read.
    pub cached_share: Option<f64>,
    /// The same over the last minute.
    pub latest_cached_share: Option<f64>,
}

/// One pool's steps.
#[derive(Clone, Debug, Serialize)]
pub struct PoolHistory {
    /// The Envoy cluster's name.
    pub cluster: String,
    /// Seconds a step takes.
    pub step_seconds: u64,
    /// The number of the newest step, the last of each series; steps count from 1 since the collector started.
    pub step: u64,
    /// When it ended, in milliseconds since 1970.
    pub at_ms: u64,
    /// All replicas together.
    pub pool: Series,
    /// Each replica that was there within the hour.
    pub replicas: Vec<ReplicaHistory>,
}

/// One replica's steps.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaHistory {
    /// The replica.
    pub replica: ReplicaName,
    /// Its steps.
    #[serde(flatten)]
    pub series: Series,
}

/// One value a step, the newest last and all of one length; `null` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// Prompt tokens a second that were served from the cache.
    pub cached: Vec<Value>,
    /// Prompt tokens a second that were computed.
    pub computed: Vec<Value>,
    /// Generated tokens a second.
    pub generated: Vec<Value>,
    /// Requests in flight at the step's end.
    pub in_flight: Vec<Value>,
}

/// A figure, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value(pub Option<f32>);

/// Records a step every [`STEP`] for ever.
pub(crate) async fn run(fleet: Arc<Fleet>, history: Arc<History>) {
    let mut ticks = tokio::time::interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let now = Instant::now();
        history.record(&Status::of(&fleet, &history, now), now);
    }
}

// === impl History ===

impl History {
    /// Adds a step that ends with this status.
    pub fn record(&self, status: &Status, now: Instant) {
        let mut recorded = self.lock();
        recorded.step += 1;
        recorded.at_ms = now_ms();
        for pool in &status.pools {
            let tracks = recorded.pools.entry(pool.cluster.clone()).or_default();
            for replica in &pool.replicas {
                tracks.entry(replica.report.replica).or_default();
            }
            let there: HashMap<_, _> = pool.replicas.iter().map(|replica| (replica.report.replica, replica)).collect();
            for (name, track) in tracks.iter_mut() {
                track.step(there.get(name).copied(), now);
            }
            // One that left the pool is forgotten when nothing of it is left in the hour.
            tracks.retain(|_, track| track.gone == 0 || track.points.iter().any(Point::is_known));
            forget_the_longest_gone(tracks);
        }
    }

    /// A pool's hour in a few figures.
    pub fn hour(&self, cluster: &str) -> Hour {
        let recorded = self.lock();
        let sums = |steps: usize| {
            let tracks = recorded.pools.get(cluster).into_iter().flatten();
            let points = tracks.flat_map(|(_, track)| track.points.iter().rev().take(steps));
            let mut sums = [0.0_f64; 3];
            for point in points.filter(|point| !point.cached.is_nan()) {
                for (sum, rate) in sums.iter_mut().zip([point.cached, point.computed, point.generated]) {
                    *sum += f64::from(rate) * STEP.as_secs_f64();
                }
            }
            sums
        };
        let share = |cached: f64, computed: f64| (cached + computed > 0.0).then(|| cached / (cached + computed));
        let [cached, computed, generated] = sums(STEPS);
        let [latest_cached, latest_computed, _] = sums(MINUTE);
        Hour {
            step: recorded.step,
            cached_tokens: cached.round() as u64,
            computed_tokens: computed.round() as u64,
            generated_tokens: generated.round() as u64,
            cached_share: share(cached, computed),
            latest_cached_share: share(latest_cached, latest_computed),
        }
    }

    /// A pool's steps after the one numbered `since`; `None` for a pool of which there is none yet.
    pub fn pool(&self, cluster: &str, since: u64) -> Option<PoolHistory> {
        let recorded = self.lock();
        let tracks = recorded.pools.get(cluster)?;
        let wanted = usize::try_from(recorded.step.saturating_sub(since)).unwrap_or(STEPS).min(STEPS);
        let longest = tracks.values().map(|track| track.points.len()).max().unwrap_or(0).min(wanted);
        let mut pool = vec![Point::UNKNOWN; longest];
        let mut replicas = Vec::with_capacity(tracks.len());
        for (&replica, track) in tracks {
            let mut series = Series::default();
            for (place, sum) in pool.iter_mut().enumerate() {
                // A replica that came later has fewer points than the pool: they end at the same step.
                let at = (track.points.len() + place).checked_sub(longest);
                let point = at.and_then(|at| track.points.get(at)).copied().unwrap_or(Point::UNKNOWN);
                series.push(point);
                sum.add(point);
            }
            replicas.push(ReplicaHistory { replica, series });
        }
        let mut all = Series::default();
        pool.into_iter().for_each(|point| all.push(point));
        let (cluster, step_seconds) = (cluster.to_owned(), STEP.as_secs());
        Some(PoolHistory { cluster, step_seconds, step: recorded.step, at_ms: recorded.at_ms, pool: all, replicas })
    }

    /// A step that panicked while it was recorded leaves whole points behind.
    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of replicas that are gone, at most [`MAX_REPLICAS`] are kept: an endpoint whose ranks have other names at every poll would fill the
/// memory.
fn forget_the_longest_gone(tracks: &mut BTreeMap<ReplicaName, Track>) {
    let mut gone: Vec<_> = tracks.iter().filter(|(_, track)| track.gone > 0).map(|(name, track)| (track.gone, *name)).collect();
    gone.sort_unstable();
    for (_, name) in gone.into_iter().skip(MAX_REPLICAS) {
        tracks.remove(&name);
    }
}

// === impl Track ===

impl Track {
    /// Adds the step that ended at `now`; without a status the replica is gone.
    fn step(&mut self, status: Option<&ReplicaStatus>, now: Instant) {
        let mut point = Point::UNKNOWN;
        self.gone = if status.is_some() { 0 } else { self.gone + 1 };
        if let Some(status) = status {
            point.in_flight = status.in_flight.map_or(f32::NAN, |count| count as f32);
            if let Some(reading) = Reading::of(status, now) {
                if let Some(last) = self.last.filter(|last| reading.at.duration_since(last.at) <= GAP) {
                    point.set_rates(&last, &reading);
                }
                self.last = Some(reading);
            }
        }
        if self.points.len() == STEPS {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }
}

impl Reading {
    /// `None` while the replica's figures are too old to say anything of this step.
    fn of(status: &ReplicaStatus, now: Instant) -> Option<Self> {
        let age_ms = status.report.age_ms.filter(|age_ms| *age_ms <= OLD_MS)?;
        Some(Self {
            at: now.checked_sub(Duration::from_millis(age_ms))?,
            prompt: status.prompt_tokens,
            cached: status.cached_prompt_tokens,
            generated: status.generation_tokens,
        })
    }
}

// === impl Point ===

impl Point {
    const UNKNOWN: Self = Self { cached: f32::NAN, computed: f32::NAN, generated: f32::NAN, in_flight: f32::NAN };

    fn is_known(&self) -> bool {
        [self.cached, self.computed, self.generated, self.in_flight].iter().any(|value| !value.is_nan())
    }

    /// Rates between two readings. After a restart the counters begin at 0. What the engine did not measure counts as computed.
    fn set_rates(&mut self, last: &Reading, reading: &Reading) {
        let seconds = reading.at.duration_since(last.at).as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let fell = |then: Option<u64>, now: Option<u64>| then.zip(now).is_some_and(|(then, now)| now < then);
        let restarted = reading.prompt < last.prompt || reading.generated < last.generated || fell(last.cached, reading.cached);
        let grown = |then: u64, now: u64| if restarted { now } else { now - then };
        let prompt = grown(last.prompt, reading.prompt);
        // An engine that has only begun to count its hits may show many at once.
        let cached = last.cached.zip(reading.cached).map_or(0, |(then, now)| grown(then, now)).min(prompt);
        let rate = |tokens: u64| (tokens as f64 / seconds) as f32;
        self.cached = rate(cached);
        self.computed = rate(prompt - cached);
        self.generated = rate(grown(last.generated, reading.generated));
    }

    /// Adds what is known of another.
    fn add(&mut self, other: Self) {
        let add = |sum: &mut f32, value: f32| {
            if !value.is_nan() {
                *sum = if sum.is_nan() { value } else { *sum + value };
            }
        };
        add(&mut self.cached, other.cached);
        add(&mut self.computed, other.computed);
        add(&mut self.generated, other.generated);
        add(&mut self.in_flight, other.in_flight);
    }
}

impl Series {
    fn push(&mut self, point: Point) {
        let value = |value: f32| Value((!value.is_nan()).then_some(value));
        self.cached.push(value(point.cached));
        self.computed.push(value(point.computed));
        self.generated.push(value(point.generated));
        self.in_flight.push(value(point.in_flight));
    }
}

impl Serialize for Value {
    /// With one decimal: more would only make the answer longer.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.map(|value| (f64::from(value) * 10.0).round() / 10.0) {
            None => serializer.serialize_none(),
            Some(value) if value.fract() == 0.0 && value.abs() < 1e15 => serializer.serialize_i64(value as i64),
            Some(value) => serializer.serialize_f64(value),
        }
    }
}

#[cfg(test)]
mod tests;
