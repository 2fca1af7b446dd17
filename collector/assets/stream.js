// The stream of states: one connection, opened again soon after it ends or falls silent.

const STALE_MS = 3_000;
/** A connection that has said nothing for so long, be it since it was opened, is given up. */
const GIVE_UP_MS = 10_000;
/** Short, so that a page is right again soon after the collector is back, however long that was away. */
const PAUSE_MS = 1_000;

/** Calls `onState` with each state, and `onLink` twice a second with `{ silentMs, stale, everLive, retryMs }`. */
export function watch(url, onState, onLink) {
  let source = null;
  let opened = performance.now();
  let heard = opened;
  let everLive = false;
  let retryAt = null;

  function open() {
    retryAt = null;
    opened = performance.now();
    source = new EventSource(url);
    source.addEventListener('state', (event) => {
      heard = performance.now();
      everLive = true;
      onState(JSON.parse(event.data));
      report();
    });
    source.addEventListener('error', again);
  }

  function again() {
    if (retryAt !== null) return;
    source.close();
    // Pages that lost the same collector do not all come back at the same moment.
    const wait = PAUSE_MS * (0.75 + Math.random() / 2);
    retryAt = performance.now() + wait;
    setTimeout(open, wait);
  }

  function report() {
    const now = performance.now();
    const silentMs = now - heard;
    if (now - Math.max(heard, opened) > GIVE_UP_MS) again();
    onLink({ silentMs, stale: silentMs > STALE_MS, everLive, retryMs: retryAt === null ? null : Math.max(0, retryAt - now) });
  }

  open();
  setInterval(report, 500);
}
