// Charts as SVG: areas and lines over time, with one cursor for all charts of a pool (pointer, or arrow keys).

import { element, attribute, text } from './dom.js';
import { clock, exact } from './format.js';

const SVG = 'http://www.w3.org/2000/svg';
const WINDOWS = [60, 180, 360, 720];
const MOST_POINTS = 180;
const PLOT_HEIGHT = 120;
const ROW_HEIGHT = 22;
/** What stands in a chart before anything is recorded. */
const FIRST_STEP = 'No figures yet: they begin some seconds after the first replica is read';

function svg(name, attributes = {}) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** The steps that are shown: the smallest of a few windows that has all, in points of one step or a few. */
export function shownWindow(history) {
  const steps = WINDOWS.find((window) => history.length <= window) ?? WINDOWS.at(-1);
  const each = Math.ceil(steps / MOST_POINTS);
  // Points begin at the same steps however many follow, so that a chart moves and does not flicker.
  const newest = Math.floor(history.step / each);
  const points = steps / each;
  const endMs = history.atMs || Date.now();
  return {
    minutes: (steps * history.stepMs) / 60_000,
    points,
    timeOf: (point) => endMs - (points - 1 - point) * each * history.stepMs,
    pick(values) {
      const picked = new Array(points).fill(null);
      const sums = new Map();
      values.forEach((value, at) => {
        if (value === null) return;
        const step = history.step - (values.length - 1 - at);
        const point = points - 1 - (newest - Math.floor(step / each));
        if (point < 0) return;
        const { sum, count } = sums.get(point) ?? { sum: 0, count: 0 };
        sums.set(point, { sum: sum + value, count: count + 1 });
      });
      for (const [point, { sum, count }] of sums) picked[point] = sum / count;
      return picked;
    },
  };
}

/** The next round number at or above. */
function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((round) => round >= value);
}

/** Runs of points that are known, as path data. */
function runs(values) {
  const found = [];
  let run = null;
  values.forEach((value, at) => {
    if (value === null) run = null;
    else if (run) run.push(at);
    else found.push((run = [at]));
  });
  return found;
}

const round = (value) => Math.round(value * 10) / 10;
const line = (run, x, y) => run.map((at, i) => `${i ? 'L' : 'M'}${round(x(at))} ${round(y(at))}`).join('');

/** All charts of one pool, and the moment they are read at. */
export class ChartGroup {
  constructor() {
    this.charts = [];
    this.cursor = null;
    this.window = null;
  }

  add(chart) {
    this.charts.push(chart);
    return chart.root;
  }

  show(history) {
    this.window = shownWindow(history);
    for (const chart of this.charts) chart.show(history, this.window);
  }

  read(cursor) {
    this.cursor = cursor;
    for (const chart of this.charts) chart.read();
  }
}

/** Makes a plot that can be read with pointer and keyboard. */
function readable(group, label, width) {
  const plot = element('div', 'plot');
  plot.tabIndex = 0;
  attribute(plot, 'role', 'slider');
  attribute(plot, 'aria-label', `${label}, by time`);
  attribute(plot, 'aria-valuemin', 0);
  const move = (point) => group.read(point === null ? null : Math.min(Math.max(point, 0), group.window.points - 1));
  plot.addEventListener('pointermove', (event) => {
    if (!group.window) return;
    const box = plot.getBoundingClientRect();
    move(Math.round(((event.clientX - box.left) / width()) * (group.window.points - 1)));
  });
  plot.addEventListener('pointerleave', () => move(null));
  plot.addEventListener('blur', () => move(null));
  plot.addEventListener('keydown', (event) => {
    if (!group.window) return;
    const last = group.window.points - 1;
    const at = group.cursor ?? last;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 12, PageDown: at + 12, Home: 0, End: last, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    move(next);
  });
  return plot;
}

/** One plot with one or more series; stacked series lie on each other. `series` are `{ key, name, style, of }`. */
export class Chart {
  constructor(group, { title, series, write, max, empty, stacked = false }) {
    Object.assign(this, { group, series, write, max, empty, stacked, title, data: null });
    this.readings = series.map(({ name, style }) => {
      const value = element('b');
      const key = element('span', `key ${style}`);
      attribute(key, 'aria-hidden', 'true');
      return { value, node: element('span', 'reading', ...(name ? [key, `${name} `] : []), value) };
    });
    this.when = element('span', 'when');
    const caption = element('figcaption', null, element('span', 'title', title), ...this.readings.map(({ node }) => node), this.when);
    this.plot = readable(group, title, () => this.width);
    this.drawing = svg('svg', { height: PLOT_HEIGHT, 'aria-hidden': 'true' });
    this.note = element('p', 'nothing');
    this.plot.append(this.drawing, this.note);
    this.axis = element('div', 'axis', element('span'), element('span'), element('span'));
    attribute(this.axis, 'aria-hidden', 'true');
    this.root = element('figure', null, caption, this.plot, this.axis);
    this.width = 300;
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.draw();
    }).observe(this.plot);
  }

  show(history, window) {
    this.data = this.series.map(({ of }) => window.pick(of(history)));
    this.window = window;
    this.recorded = history.pool.computed.some((value) => value !== null);
    this.draw();
  }

  draw() {
    if (!this.data || this.width === 0) return;
    const { window, data } = this;
    const layers = this.stacked ? stack(data) : data.map((top) => ({ top, base: null }));
    const highest = Math.max(0, ...layers.flatMap(({ top }) => top.map((value) => value ?? 0)));
    const nothing = highest === 0 && !this.max;
    const unknown = data.every((values) => values.every((value) => value === null));
    this.note.hidden = !(nothing || unknown);
    text(this.note, this.recorded ? this.empty : FIRST_STEP);
    const max = this.max ?? roundUp(highest);
    const x = (at) => (at / (window.points - 1)) * this.width;
    const y = (value) => PLOT_HEIGHT - 1 - (value / max) * (PLOT_HEIGHT - 16);
    attribute(this.drawing, 'width', this.width);
    this.drawing.replaceChildren(hatching());
    for (const part of nothing || unknown ? [0] : [0, 0.5, 1]) {
      this.drawing.append(svg('line', { class: 'grid-line', x1: 0, x2: this.width, y1: round(y(part * max)), y2: round(y(part * max)) }));
      if (part > 0) {
        const label = svg('text', { class: 'tick', x: 0, y: round(y(part * max)) - 4 });
        label.textContent = this.write(part * max);
        this.drawing.append(label);
      }
    }
    layers.forEach(({ top, base }, at) => {
      for (const run of runs(top)) {
        const { style } = this.series[at];
        const edge = line(run, x, (point) => y(top[point]));
        const back = [...run].reverse().map((point) => `L${round(x(point))} ${round(y(base ? base[point] : 0))}`).join('');
        this.drawing.append(svg('path', { class: `area ${style}`, d: `${edge}${back}Z` }));
        this.drawing.append(svg('path', { class: `line ${style}`, d: edge }));
      }
    });
    this.mark = svg('line', { class: 'mark', y1: 8, y2: PLOT_HEIGHT });
    this.drawing.append(this.mark);
    const [from, middle, to] = this.axis.children;
    text(from, clock(window.timeOf(0)));
    text(middle, clock(window.timeOf((window.points - 1) / 2)));
    text(to, 'now');
    attribute(this.plot, 'aria-valuemax', window.points - 1);
    this.read();
  }

  /** Shows the figures at the cursor, or the newest. */
  read() {
    if (!this.data || !this.mark) return;
    const { cursor } = this.group;
    const last = this.window.points - 1;
    const at = cursor ?? last;
    const values = this.data.map((series) => (cursor === null ? (series.findLast((value) => value !== null) ?? null) : series[at]));
    values.forEach((value, i) => text(this.readings[i].value, this.write(value)));
    const moment = cursor === null ? 'now' : exact(this.window.timeOf(at));
    text(this.when, cursor === null ? '' : moment);
    const x = round((at / last) * this.width);
    attribute(this.mark, 'x1', x);
    attribute(this.mark, 'x2', x);
    this.mark.style.visibility = cursor === null ? 'hidden' : 'visible';
    const told = this.series.map(({ name }, i) => `${name ? `${name} ` : ''}${this.write(values[i])}`);
    attribute(this.plot, 'aria-valuenow', at);
    attribute(this.plot, 'aria-valuetext', `${moment}: ${told.join(', ')}`);
  }
}

/** One row a replica, all on one scale, so that they compare by eye without a colour each. */
export class RowsChart {
  constructor(group, { title, of, write, empty, most = 12 }) {
    Object.assign(this, { group, of, write, empty, most, title, rows: [], data: null });
    this.scale = element('span', 'reading');
    this.when = element('span', 'when');
    this.plot = readable(group, title, () => this.width);
    this.root = element('figure', 'rows', element('figcaption', null, element('span', 'title', title), this.scale, this.when), this.plot);
    this.width = 200;
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(history, window) {
    this.window = window;
    this.recorded = history.length > 0;
    const all = [...this.of(history)].map(([name, values]) => ({ name, values: window.pick(values) }));
    const load = ({ values }) => Math.max(0, ...values.map((value) => value ?? 0));
    const busiest = all.length > this.most ? [...all].sort((a, b) => load(b) - load(a)).slice(0, this.most) : all;
    this.data = all.filter((row) => busiest.includes(row));
    this.left = all.length - this.data.length;
    this.highest = roundUp(Math.max(1, ...this.data.map(load)));
    this.draw();
  }

  draw() {
    if (!this.data) return;
    text(this.scale, this.left > 0 ? `the ${this.data.length} busiest; ${this.left} more` : `each up to ${this.write(this.highest)}`);
    this.rows = this.data.map(({ name, values }) => {
      const drawing = svg('svg', { height: ROW_HEIGHT, 'aria-hidden': 'true' });
      const value = element('b');
      return { name, values, drawing, value, node: element('div', 'row', element('span', 'name', name), drawing, value) };
    });
    if (this.rows.length === 0) this.plot.replaceChildren(element('p', 'nothing', this.recorded ? this.empty : FIRST_STEP));
    else this.plot.replaceChildren(...this.rows.map(({ node }) => node));
    // The drawing's own width is what the names and figures leave.
    const box = this.rows[0]?.drawing.getBoundingClientRect();
    this.width = box?.width || 200;
    for (const row of this.rows) {
      const x = (at) => (at / (this.window.points - 1)) * this.width;
      const y = (value) => ROW_HEIGHT - 1 - (value / this.highest) * (ROW_HEIGHT - 3);
      row.drawing.append(svg('line', { class: 'grid-line', x1: 0, x2: this.width, y1: ROW_HEIGHT - 0.5, y2: ROW_HEIGHT - 0.5 }));
      for (const run of runs(row.values)) {
        const edge = line(run, x, (at) => y(row.values[at]));
        row.drawing.append(svg('path', { class: 'area solid', d: `${edge}L${round(x(run.at(-1)))} ${ROW_HEIGHT}L${round(x(run[0]))} ${ROW_HEIGHT}Z` }));
        row.drawing.append(svg('path', { class: 'line solid', d: edge }));
      }
      row.mark = svg('line', { class: 'mark', y1: 0, y2: ROW_HEIGHT });
      row.drawing.append(row.mark);
    }
    attribute(this.plot, 'aria-valuemax', this.window.points - 1);
    this.read();
  }

  read() {
    if (!this.data) return;
    const { cursor } = this.group;
    const last = this.window.points - 1;
    const at = cursor ?? last;
    const moment = cursor === null ? 'now' : exact(this.window.timeOf(at));
    text(this.when, cursor === null ? '' : moment);
    const told = this.rows.map(({ name, values, value, mark }) => {
      text(value, this.write(values[at]));
      const x = round((at / last) * this.width);
      attribute(mark, 'x1', x);
      attribute(mark, 'x2', x);
      mark.style.visibility = cursor === null ? 'hidden' : 'visible';
      return `${name} ${this.write(values[at])}`;
    });
    attribute(this.plot, 'aria-valuenow', at);
    attribute(this.plot, 'aria-valuetext', `${moment}: ${told.join(', ')}`);
  }
}

/** Each series on the sum of those before it. */
function stack(series) {
  const height = new Array(series[0].length).fill(0);
  return series.map((values) => {
    const base = [...height];
    const top = values.map((value, at) => (value === null ? null : (height[at] += value)));
    return { top, base };
  });
}

/** The pattern of the second series, so that it differs by more than its colour. */
function hatching() {
  const pattern = svg('pattern', { id: 'hatch', width: 5, height: 5, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' });
  pattern.append(svg('rect', { class: 'hatch-ground', width: 5, height: 5 }), svg('line', { class: 'hatch-line', x1: 0, x2: 0, y1: 0, y2: 5 }));
  const defs = svg('defs');
  defs.append(pattern);
  return defs;
}
