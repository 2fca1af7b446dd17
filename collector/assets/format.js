// How figures are written. A figure that is not known is a dash, never a zero.

const DASH = '–';
const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const clockTime = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' });
const exactTime = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const dayTime = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit' });

const known = (value, write) => (value === null || value === undefined ? DASH : write(value));

export const number = (value) => known(value, (n) => whole.format(n));

export const percent = (share) => known(share, (s) => `${Math.round(s * 100)} %`);

/** Large counts in three digits: 9.8k, 131k, 1.2M. */
export const short = (value) =>
  known(value, (n) => {
    for (const [unit, letter] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
      if (n >= unit) return `${(n / unit).toFixed(n < 10 * unit ? 1 : 0)}${letter}`;
    }
    return n >= 10 || Number.isInteger(n) ? whole.format(n) : n.toFixed(1);
  });

/** An age: 0.2 s, 12 s, 3 min, 2 h. */
export const age = (ms) =>
  known(ms, (n) => {
    if (n < 10_000) return `${(n / 1000).toFixed(1)} s`;
    if (n < 120_000) return `${Math.round(n / 1000)} s`;
    return n < 7_200_000 ? `${Math.round(n / 60_000)} min` : `${Math.round(n / 3_600_000)} h`;
  });

export const clock = (ms) => clockTime.format(ms);
export const exact = (ms) => exactTime.format(ms);
export const day = (ms) => known(ms, (n) => dayTime.format(n));

/** A value that may differ: 8, or 4 to 8. */
export const span = (value) => known(value, ({ min, max }) => (min === max ? number(min) : `${number(min)}–${number(max)}`));

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
