//! Times as this machine and as the fleet tells them.

use crate::binding::Binding;
use crate::router::seconds;
use crate::sync::SyncRequest;

/// This machine's clock and the fleet's.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    pub(super) now_ms: u64,
    /// How far the fleet's is ahead, in milliseconds.
    pub(super) ahead_ms: i64,
}

impl Clock {
    pub(super) fn of(request: &SyncRequest, now_ms: u64) -> Self {
        let fleet_ms = if request.now_ms == 0 { now_ms } else { request.now_ms };
        Self { now_ms, ahead_ms: fleet_ms.checked_signed_diff(now_ms).unwrap_or(0) }
    }

    pub(super) fn now_s(&self) -> u32 {
        seconds(self.now_ms)
    }

    pub(super) fn ahead_s(&self) -> i32 {
        i32::try_from(self.ahead_ms.checked_div(1000).unwrap_or(0)).unwrap_or(0)
    }

    /// A binding whose last turn is told by this machine's clock, by the fleet's.
    pub(super) fn to_fleet(self, told: Binding) -> Binding {
        Binding { last_turn_s: told.last_turn_s.saturating_add_signed(self.ahead_s()), ..told }
    }

    /// The other way round, with nothing far ahead.
    pub(super) fn to_local(self, told: Binding) -> Binding {
        let told = told.clamped(self.now_ms.saturating_add_signed(self.ahead_ms));
        let last_turn_s = told.last_turn_s.saturating_sub_signed(self.ahead_s()).min(self.now_s());
        Binding { last_turn_s, ..told }
    }
}
