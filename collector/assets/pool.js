// One pool: its routing card, its capacity, its replicas and its charts.

import { Chart, ChartGroup, RowsChart } from './charts.js';
import { attribute, copy, element, keyed, text } from './dom.js';
import { age, day, number, percent, plural, short, span } from './format.js';
import { History } from './history.js';

const OLD_MS = 3_000;
const STATES = { ready: 'ready', down: 'down', draining: 'draining', asleep: 'asleep', unknown: 'not asked yet' };
const LEVELS = { fits: 'Fits', near: 'Nearly full', over: 'Too much' };
/** Why requests are held, after their number. */
const REASONS = { no_room: 'no room', behind_others: 'behind others', turns_used: 'turns used', outgrown: 'cache outgrown' };
const AFFINITY = { on: 'On', off: 'Off', mixed: 'Mixed' };

const automatic = (auto) => (auto === null ? '' : auto ? 'automatic' : 'configured');

/** The routing card's figures: what they are called, how they read, and what stands below. One that gives `null` is left out. */
const FACTS = [
  { key: 'affinity', name: 'Affinity', of: (r) => [AFFINITY[r.affinity] ?? '–', r.affinity === 'mixed' ? 'differs by Envoy' : ''] },
  { key: 'threshold', name: 'Spill threshold', of: (r) => [span(r.spill_threshold), automatic(r.spill_threshold_auto)] },
  { key: 'margin', name: 'Spill margin', of: (r) => [span(r.spill_margin), automatic(r.spill_margin_auto)] },
  { key: 'sticky', name: 'Sticky share', of: (r) => [percent(r.sticky_share), isCounted(r) ? `of ${plural(total(r.requests), 'request')}` : ''] },
  { key: 'in-flight', name: 'In flight', of: (r) => [number(r.in_flight), r.in_flight === 1 ? 'request' : 'requests'] },
  { key: 'envoys', name: 'Envoys', of: (r) => [number(r.envoys_connected), `connected of ${number(r.envoys)}`] },
  { key: 'held-back', name: 'Held back', of: (r, admission) => admission && [number(admission.held), reasons(admission)] },
  { key: 'longest-held', name: 'Longest held', of: (r, admission) => admission && [age(admission.oldest_held_ms), ''] },
  { key: 'active', name: 'Active context', of: (r, admission) => admission && [percent(admission.usage), activeOf(admission)] },
];

const reasons = ({ held, by_reason: counts }) => {
  const told = Object.entries(REASONS).filter(([reason]) => counts[reason] > 0).map(([reason, words]) => `${number(counts[reason])} ${words}`);
  return held === 0 ? 'requests' : told.join(', ');
};

const activeOf = ({ active_conversations: count, cache_tokens: cache }) => `${plural(count, 'conversation')}, of ${short(cache)} tokens`;

const total = (requests) => Object.values(requests).reduce((sum, count) => sum + count, 0);

/** Whether some Envoy has ever said how many requests it counted. */
const isCounted = (routing) => routing.counting_since_ms !== null || total(routing.requests) > 0;

export class PoolView {
  constructor(cluster) {
    const { root, f } = copy('pool-template');
    Object.assign(this, { root, f, cluster, rows: new Map(), history: new History(cluster), charts: new ChartGroup() });
    const title = f('name');
    title.id = `pool-${encodeURIComponent(cluster)}`;
    root.setAttribute('aria-labelledby', title.id);
    text(title, cluster);
    text(f('caption'), `Replicas of ${cluster}`);
    this.facts = new Map(FACTS.map(({ key, name }) => {
      const value = element('dd', null);
      const note = element('dd', 'below');
      const node = element('div', 'fact', element('dt', null, name), value, note);
      node.dataset.fact = key;
      f('facts').append(node);
      return [key, { node, value, note }];
    }));
    const perSecond = (value) => short(value === null ? null : Math.round(value));
    f('charts').append(
      this.charts.add(new Chart(this.charts, {
        title: 'Prompt tokens per second',
        stacked: true,
        write: perSecond,
        empty: 'No prompts yet',
        series: [
          { name: 'cached', style: 'solid', of: (history) => history.pool.cached },
          { name: 'computed', style: 'hatched', of: (history) => history.pool.computed },
        ],
      })),
      this.charts.add(new Chart(this.charts, {
        title: 'Generated tokens per second',
        write: perSecond,
        empty: 'Nothing generated yet',
        series: [{ name: '', style: 'solid', of: (history) => history.pool.generated }],
      })),
      this.charts.add(new Chart(this.charts, {
        title: 'Prefix hit rate',
        max: 1,
        write: percent,
        empty: 'No prompts yet',
        series: [{ name: '', style: 'solid', of: (history) => history.hitRate() }],
      })),
      this.charts.add(new RowsChart(this.charts, {
        title: 'In flight by replica',
        write: (value) => short(value === null ? null : Math.round(value * 10) / 10),
        empty: 'No Envoy says what is in flight',
        of: ({ replicas }) => inOrder([...this.rows.keys()], replicas).map(([name, series]) => [name, series.in_flight]),
      })),
    );
  }

  show(pool, generation) {
    this.showHead(pool);
    this.showRouting(pool);
    this.showCapacity(pool);
    const names = pool.replicas.map(({ replica }) => replica);
    keyed(this.root.querySelector('tbody'), this.rows, names, () => copy('replica-template'));
    for (const replica of pool.replicas) showReplica(this.rows.get(replica.replica), replica, isCounted(pool.routing));
    this.showColumnOfActive(pool.admission !== null);
    this.f('no-replicas').hidden = names.length > 0;
    text(this.f('no-replicas'), whyNone(pool.sources));
    text(this.f('sources'), pool.sources.filter(({ problem }) => problem).map(explainSource).join(' '));
    this.history.follow(pool.hour.step, generation).then((news) => {
      if (news) {
        this.charts.show(this.history);
        const { minutes } = this.charts.window;
        text(this.f('charts-title'), minutes === 60 ? 'Last hour' : `Last ${minutes} minutes`);
      }
    });
  }

  showHead({ replicas, hour }) {
    const states = Object.entries(STATES).map(([state, name]) => [name, replicas.filter((replica) => stateOf(replica) === state).length]);
    const [[, ready], ...others] = states;
    const told = others.filter(([, count]) => count > 0).map(([name, count]) => `${count} ${name}`);
    text(this.f('summary'), replicas.length === 0 ? 'no replicas' : [`${ready} of ${plural(replicas.length, 'replica')} ready`, ...told].join(', '));
    const alarm = replicas.some((replica) => !['ready', 'unknown'].includes(stateOf(replica)));
    attribute(this.f('summary'), 'data-alarm', alarm ? '' : null);
    text(this.f('share'), percent(hour.cached_share));
    text(this.f('share-text'), hour.cached_share === null ? 'no prompts in the last hour' : 'of prompt tokens from the cache, last hour');
  }

  showRouting({ routing, admission }) {
    for (const { key, of } of FACTS) {
      const [value, note] = of(routing, admission) ?? ['', ''];
      const fact = this.facts.get(key);
      fact.node.hidden = value === '';
      text(fact.value, value);
      text(fact.note, note);
    }
    const since = routing.counting_since_ms === null ? '' : `Requests are counted since ${day(routing.counting_since_ms)}.`;
    text(this.f('routing-note'), explain(routing, this.cluster) ?? since);
    const counted = routing.counting_since_ms === null ? 'Requests counted' : `Requests since ${day(routing.counting_since_ms)}`;
    text(this.f('counted'), counted);
  }

  /** What is active is a column where the pool admits by working set. */
  showColumnOfActive(shown) {
    for (const cell of [this.f('active-head'), ...[...this.rows.values()].map(({ f }) => f('active-cell'))]) cell.hidden = !shown;
    attribute(this.f('conversations'), 'colspan', shown ? 3 : 2);
    attribute(this.f('conversations-columns'), 'span', shown ? 3 : 2);
  }

  showCapacity({ capacity }) {
    const card = this.f('capacity');
    attribute(card, 'data-level', capacity?.level ?? 'unknown');
    text(this.f('usage'), percent(capacity?.usage));
    const meter = this.f('meter');
    if (!capacity) {
      for (const name of ['role', 'aria-label', 'aria-valuenow', 'aria-valuemin', 'aria-valuemax', 'aria-valuetext']) attribute(meter, name, null);
      meter.firstElementChild.style.width = '0';
      text(this.f('sum'), 'Not known: no connected Envoy says what is held, or no engine how large its cache is.');
      text(this.f('advice'), '');
      return;
    }
    const { conversations, typical_context_tokens: typical, context_tokens: tokens, cache_tokens: cache, usage, level } = capacity;
    attribute(meter, 'role', 'meter');
    attribute(meter, 'aria-label', 'Context of recent conversations against the cache');
    attribute(meter, 'aria-valuemin', 0);
    attribute(meter, 'aria-valuemax', 100);
    attribute(meter, 'aria-valuenow', Math.min(100, Math.round(usage * 100)));
    attribute(meter, 'aria-valuetext', `${percent(usage)}, ${LEVELS[level]}`);
    meter.firstElementChild.style.width = `${Math.min(usage, 1) * 100}%`;
    const sum = conversations === 0
      ? `No conversation was active in the last 2 minutes; the cache takes ${short(cache)} tokens.`
      : `${plural(conversations, 'conversation')} of the last 2 minutes × about ${short(typical)} tokens ≈ ${short(tokens)} of ${short(cache)}.`;
    text(this.f('sum'), sum);
    text(this.f('advice'), conversations === 0 ? '' : capacity.advice);
  }
}

/** Why a pool has no replicas. */
function whyNone(sources) {
  if (sources.every(({ endpoints }) => endpoints !== null)) return 'This pool has no replicas: what names them says that there are none.';
  return sources.some(({ problem }) => problem)
    ? 'No replica of this pool was found. Until one is, Envoys keep those they know.'
    : 'The replicas of this pool are being looked up.';
}

/** What is wrong with a source of replicas or of Envoys. */
export function explainSource({ kind, name, problem, endpoints }) {
  return `${kind} ${name}: ${problem}${endpoints === null ? '' : '; what it found last is kept'}.`;
}

/** Its state; for one that no poll has ended of since the collector started that is not known, whatever Envoys are told until then. */
export const stateOf = ({ state, age_ms: age, problem }) => (state === 'down' && age === null && problem === null ? 'unknown' : state);

/** As the table has them; those that left the pool come last. */
function inOrder(names, replicas) {
  const gone = [...replicas.keys()].filter((name) => !names.includes(name));
  return [...names, ...gone].filter((name) => replicas.has(name)).map((name) => [name, replicas.get(name)]);
}

/** Why the card has gaps, and what to do; `null` when it has none. */
function explain(routing, cluster) {
  if (routing.envoys === 0) return 'No Envoy is configured or found: the collector only watches the replicas.';
  if (routing.envoys_connected === 0) return 'No Envoy is connected, so what routing does now is not known. The table of Envoys says why.';
  if (routing.envoys_routing === 0) return `No connected Envoy routes ${cluster}: its filter needs a pool of this name, and both its filters the same vm_id.`;
  return total(routing.requests) === 0 ? 'No request has ended yet.' : null;
}

/** What an operator should know of a replica beside its figures. */
function problems({ problem, drained_by: by, missing }) {
  return [
    problem,
    by.length > 0 ? `drained by ${by.join(' and ')}` : null,
    missing.length > 0 ? `its engine reports no ${missing.join(', ')}` : null,
  ].filter((one) => one);
}

function showReplica({ root, f }, replica, counted) {
  const { requests } = replica;
  const state = stateOf(replica);
  attribute(root, 'data-state', state);
  text(f('name'), replica.replica);
  text(f('state'), STATES[state]);
  attribute(f('state'), 'data-state', state);
  text(f('problem'), problems(replica).join('; '));
  text(f('in_flight'), number(replica.in_flight));
  // Of an engine that was never read nothing is known; its zeros are only what Envoys are told.
  const read = replica.age_ms !== null;
  text(f('running'), number(read ? replica.running : null));
  text(f('waiting'), number(read ? replica.waiting : null));
  for (const outcome of ['sticky', 'spilled', 'pinned', 'placed', 'rehomed']) count(f(outcome), counted ? requests[outcome] : null);
  count(f('other'), counted ? requests.unkeyed + requests.passed : null);
  text(f('held'), number(replica.held_conversations));
  const { recent_context_tokens: recent, active_context_tokens: active, cache_tokens: cache, context_level: level } = replica;
  const of = showShare(f('bar'), recent, cache, level);
  text(f('context'), of === null ? short(recent) : `${short(recent)} of ${short(cache)}`);
  const share = showShare(f('active-bar'), active, cache, cache > 0 && active > cache ? 'near' : null);
  text(f('active'), share === null ? short(active) : `${percent(share)}, ${short(active)} of ${short(cache)}`);
  text(f('kv'), percent(read ? replica.kv_usage : null));
  text(f('hits'), percent(replica.prefix_hit_rate));
  text(f('age'), age(replica.age_ms));
  attribute(root, 'data-old', replica.age_ms > OLD_MS ? '' : null);
}

function count(node, value) {
  text(node, number(value));
  attribute(node, 'data-zero', value === 0 ? '' : null);
}

/** Shows what of a cache is in use as a bar; returns the share, `null` while it is not known. */
function showShare(bar, tokens, cache, level) {
  const share = tokens !== null && cache > 0 ? tokens / cache : null;
  bar.firstElementChild.style.width = `${Math.min(share ?? 0, 1) * 100}%`;
  attribute(bar, 'data-level', level);
  return share;
}
