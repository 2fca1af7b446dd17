// The stream of states: one connection, opened again with growing pauses when it ends or falls silent.

const STALE_MS = 3_000;
const GIVE_UP_MS = 10_000;
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 15_000;

/** Calls `onState` with each state, and `onLink` twice a second with `{ silentMs, stale, everLive, retryMs }`. */
export function watch(url, onState, onLink) {
  let source = null;
  let heard = performance.now();
  let everLive = false;
  let pause = FIRST_PAUSE_MS;
  let retryAt = null;

  function open() {
    retryAt = null;
    source = new EventSource(url);
    source.addEventListener('state', (event) => {
      heard = performance.now();
      everLive = true;
      pause = FIRST_PAUSE_MS;
      onState(JSON.parse(event.data));
      report();
    });
    source.addEventListener('error', again);
  }

  function again() {
    if (retryAt !== null) return;
    source.close();
    // Pages that lost the same collector do not all come back at the same moment.
    const wait = pause * (0.75 + Math.random() / 2);
    retryAt = performance.now() + wait;
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    setTimeout(open, wait);
  }

  function report() {
    const now = performance.now();
    const silentMs = now - heard;
    if (everLive && silentMs > GIVE_UP_MS) again();
    onLink({ silentMs, stale: silentMs > STALE_MS, everLive, retryMs: retryAt === null ? null : Math.max(0, retryAt - now) });
  }

  open();
  setInterval(report, 500);
}
