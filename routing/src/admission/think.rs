//! How long a pool's agents think between two turns, and so how long a conversation that is quiet keeps its place.

/// Think times by powers of two: the first counts those below 125 ms, the last those from 64 s on.
const STEPS: usize = 10;
const FIRST_MS: u64 = 125;

/// The part of think times that a place outlasts.
const COVERED: f32 = 0.9;

/// Grace before anything is known, and its bounds: at least so long that a client far away gets its next turn in, and not so long that
/// the places of conversations that have ended without notice stand empty while others wait.
const FIRST_GRACE_MS: u64 = 5_000;
const LEAST_MS: u64 = 2_000;
const MOST_MS: u64 = 20_000;

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

    /// How long a quiet conversation keeps its place: the time within which nine of ten next turns come, within bounds.
    pub(crate) fn grace_ms(&self) -> u64 {
        let all: f32 = self.steps.iter().sum();
        if all < ENOUGH {
            return FIRST_GRACE_MS;
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
        end_ms.clamp(LEAST_MS, MOST_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;

    fn heard(times: &[(u64, usize)]) -> ThinkTimes {
        let mut think = ThinkTimes::default();
        for (ms, count) in times {
            (0..*count).for_each(|_| think.heard(*ms));
        }
        think
    }

    #[test]
    fn a_place_outlasts_nine_of_ten_think_times() {
        assert_eq!(ThinkTimes::default().grace_ms(), FIRST_GRACE_MS);
        assert_eq!(heard(&[(300, 100)]).grace_ms(), LEAST_MS);
        assert_eq!(heard(&[(300, 80), (7_000, 20)]).grace_ms(), 8_000);
        assert_eq!(heard(&[(300, 10), (200_000, 90)]).grace_ms(), MOST_MS);
    }

    #[test]
    fn what_was_heard_long_ago_counts_for_little() {
        assert_eq!(heard(&[(7_000, 1_000), (300, 2_000)]).grace_ms(), LEAST_MS);
    }
}
