//! How long a pool's agents think between two turns, and so how long a conversation that is quiet keeps its place.

use super::Admission;

/// Think times by powers of two: the first counts those below 125 ms, the last those from 64 s on.
const STEPS: usize = 10;
const FIRST_MS: u64 = 125;

/// The part of think times that a place outlasts.
const COVERED: f32 = 0.9;

/// The part of the longest grace that is given before anything is known.
const FIRST_PART: u64 = 4;

/// Think times heard before they are believed.
const ENOUGH: f32 = 20.0;

/// What each new think time leaves of the weight of those before: the last few hundred count.
const KEEP: f32 = 0.998;

/// The think times one thread has seen of late.
#[derive(Clone, Debug, Default)]
pub(crate) struct ThinkTimes {
    steps: [f32; STEPS],
}

impl ThinkTimes {
    pub(crate) fn heard(&mut self, ms: u64) {
        let step = (ms / FIRST_MS).checked_ilog2().map_or(0, |log| log.saturating_add(1) as usize).min(STEPS.saturating_sub(1));
        for (at, weight) in self.steps.iter_mut().enumerate() {
            *weight = *weight * KEEP + if at == step { 1.0 } else { 0.0 };
        }
    }

    /// How long a quiet conversation keeps its place: the time within which nine of ten next turns come, within the pool's bounds.
    pub(crate) fn grace_ms(&self, bounds: &Admission) -> u64 {
        let within = |ms: u64| ms.min(bounds.max_grace_ms).max(bounds.min_grace_ms);
        let all: f32 = self.steps.iter().sum();
        if all < ENOUGH {
            return within(bounds.max_grace_ms / FIRST_PART);
        }
        let mut below = 0.0;
        let mut end_ms = FIRST_MS;
        for weight in self.steps {
            below += weight;
            if below >= COVERED * all {
                break;
            }
            end_ms = end_ms.saturating_mul(2);
        }
        within(end_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(times: &[(u64, usize)]) -> ThinkTimes {
        let mut think = ThinkTimes::default();
        for (ms, count) in times {
            (0..*count).for_each(|_| think.heard(*ms));
        }
        think
    }

    fn grace_ms(times: &[(u64, usize)]) -> u64 {
        heard(times).grace_ms(&Admission::default())
    }

    #[test]
    fn a_place_outlasts_nine_of_ten_think_times() {
        assert_eq!(grace_ms(&[]), 5_000);
        assert_eq!(grace_ms(&[(300, 100)]), 2_000);
        assert_eq!(grace_ms(&[(300, 80), (7_000, 20)]), 8_000);
        assert_eq!(grace_ms(&[(300, 10), (200_000, 90)]), 20_000);
    }

    #[test]
    fn what_was_heard_long_ago_counts_for_little() {
        assert_eq!(grace_ms(&[(7_000, 1_000), (300, 2_000)]), 2_000);
    }

    #[test]
    fn bounds_are_the_pools_own() {
        let fast = Admission { min_grace_ms: 500, max_grace_ms: 5_000, ..Admission::default() };
        let graces = [&[][..], &[(75, 100)], &[(50_000, 100)]].map(|times| heard(times).grace_ms(&fast));
        assert_eq!(graces, [1_250, 500, 5_000]);
    }
}
