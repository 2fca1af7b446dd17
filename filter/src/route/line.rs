//! Requests in line: paused streams, which this thread's tick sends on when their conversations have places.

use core::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use homing_routing::host::Host;
use homing_routing::identity::Conversation;
use homing_routing::metric::ErrorKind;
use homing_routing::router::{Held, Router, Verdict};

use super::State;
use super::head::Head;
use super::verdict::carry_out;
use crate::envoy::Envoy;
use crate::module::Action;

/// How often a thread ticks while it has requests in line: what a request waits at most from the moment its place is free.
const HELD_TICK_MS: u32 = 10;

/// A request in line.
pub(super) struct InLine {
    pub(super) head: Head,
    pub(super) conversation: Option<Conversation>,
    pub(super) held: Held<Envoy>,
    /// What has become of it, until its stream asks.
    released: RefCell<Option<Released>>,
}

/// What has become of a request that was in line.
pub(super) struct Released {
    pub(super) state: State,
    pub(super) held_ms: u64,
}

/// This thread's requests in line, by the contexts of their streams.
pub(crate) struct Line {
    /// Taken out while it is looked at, so that nothing is ever borrowed twice.
    streams: Cell<BTreeMap<u32, Rc<InLine>>>,
    /// The context of the root, whose tick sends them on.
    root: u32,
    /// Ticks while nothing is in line, in milliseconds.
    idle_tick_ms: u32,
    ticks_fast: Cell<bool>,
}

impl InLine {
    pub(super) fn new(head: Head, conversation: Option<Conversation>, held: Held<Envoy>) -> Self {
        Self { head, conversation, held, released: RefCell::new(None) }
    }

    /// What has become of it, the first time this is asked after it was released.
    pub(super) fn take_released(&self) -> Option<Released> {
        self.released.try_borrow_mut().ok()?.take()
    }

    /// Decides it whatever it costs the others: it cannot wait any longer.
    pub(super) fn overdue(&self, router: &mut Router<Envoy>) -> Verdict<Envoy> {
        router.overdue(&self.head.cluster, &self.head.request(self.conversation.as_ref()), &self.held)
    }

    fn held_ms(&self, now_ms: u64) -> u64 {
        // Where the clock has been set back, it must not start to wait anew.
        now_ms.abs_diff(self.held.since_ms())
    }
}

impl Line {
    pub(crate) fn new(root: u32, idle_tick_ms: u32) -> Self {
        Self { streams: Cell::default(), root, idle_tick_ms, ticks_fast: Cell::new(false) }
    }

    /// Whether this thread ticks for its requests in line.
    pub(super) fn ticks_fast(&self) -> bool {
        self.ticks_fast.get()
    }

    /// Puts a paused stream in line.
    pub(super) fn join(&self, stream: u32, in_line: Rc<InLine>, router: &mut Router<Envoy>) {
        self.with(|streams| streams.insert(stream, in_line));
        self.set_ticks(true, router);
    }

    /// Takes a stream out that has ended or is sent on.
    pub(super) fn leave(&self, stream: u32) {
        self.with(|streams| streams.remove(&stream));
    }

    /// Sends on what may go, and what has waited for too long. With `says_so`, says of the others that they still wait.
    ///
    /// A thread asks for itself: Envoy lets none act on another's streams.
    pub(super) fn look(&self, router: &mut Router<Envoy>, says_so: bool) {
        let streams = self.all();
        let mut clusters: Vec<_> = streams.iter().map(|(_, in_line)| &in_line.head.cluster).collect();
        clusters.sort_unstable();
        clusters.dedup();
        for cluster in clusters {
            let of_pool = || streams.iter().filter(|(_, in_line)| in_line.head.cluster == *cluster);
            let called = router.called(cluster).unwrap_or_else(|_| {
                router.count_error(ErrorKind::Host, 1);
                Vec::new()
            });
            for id in called {
                let Some((stream, in_line)) = of_pool().find(|(_, in_line)| in_line.held.id() == id) else { continue };
                let request = in_line.head.request(in_line.conversation.as_ref());
                if let Some(verdict) = router.retry(cluster, &request, &in_line.held) {
                    self.release(*stream, in_line, verdict, router);
                }
            }
            let now_ms = Envoy.now_ms();
            let admission = router.pool(cluster).and_then(|pool| pool.policy.admission);
            let is_late = |in_line: &InLine| admission.is_none_or(|admission| in_line.held_ms(now_ms) >= admission.max_wait_ms);
            for (stream, in_line) in of_pool().filter(|(stream, in_line)| is_late(in_line) && self.has(*stream)) {
                let verdict = in_line.overdue(router);
                self.release(*stream, in_line, verdict, router);
            }
        }
        let still = self.all();
        if says_so && router.still_waiting(still.iter().map(|(_, in_line)| &in_line.held)).is_err() {
            router.count_error(ErrorKind::Host, 1);
        }
        self.set_ticks(!still.is_empty(), router);
    }

    /// Sends a stream on, or answers it, as if it had called itself.
    fn release(&self, stream: u32, in_line: &InLine, verdict: Verdict<Envoy>, router: &mut Router<Envoy>) {
        let now_ms = Envoy.now_ms();
        if Envoy.set_effective_context(stream).is_err() {
            // The stream has ended without a word. The verdict is dropped here, and with it what it has reserved.
            self.leave(stream);
            router.count_error(ErrorKind::Host, 1);
            return;
        }
        let mut done = Ok(());
        if let Ok((state, action)) = carry_out(router, &in_line.head, verdict) {
            self.leave(stream);
            if let Ok(mut released) = in_line.released.try_borrow_mut() {
                *released = Some(Released { state, held_ms: in_line.held_ms(now_ms) });
            }
            if action == Action::Continue {
                done = Envoy.resume_request();
            }
        }
        if done.and(Envoy.set_effective_context(self.root)).is_err() {
            router.count_error(ErrorKind::Host, 1);
        }
    }

    fn set_ticks(&self, fast: bool, router: &mut Router<Envoy>) {
        if self.ticks_fast.get() == fast {
            return;
        }
        match Envoy.set_tick_period(if fast { HELD_TICK_MS } else { self.idle_tick_ms }) {
            Ok(()) => self.ticks_fast.set(fast),
            Err(_) => router.count_error(ErrorKind::Host, 1),
        }
    }

    fn all(&self) -> Vec<(u32, Rc<InLine>)> {
        self.with(|streams| streams.iter().map(|(stream, in_line)| (*stream, Rc::clone(in_line))).collect())
    }

    fn has(&self, stream: u32) -> bool {
        self.with(|streams| streams.contains_key(&stream))
    }

    fn with<T>(&self, look: impl FnOnce(&mut BTreeMap<u32, Rc<InLine>>) -> T) -> T {
        let mut streams = self.streams.take();
        let result = look(&mut streams);
        self.streams.set(streams);
        result
    }
}
