// The page: follows the stream of states and shows each.

import { attribute, copy, element, keyed, text } from './dom.js';
import { age, day, number, plural } from './format.js';
import { PoolView } from './pool.js';
import { watch } from './stream.js';

const by = (id) => document.getElementById(id);
const pools = new Map();
const envoys = new Map();
const links = new Map();
let conditions = null;

function show(state) {
  by('loading').hidden = true;
  keyed(by('pools'), pools, state.pools.map(({ cluster }) => cluster), (cluster) => new PoolView(cluster));
  for (const pool of state.pools) pools.get(pool.cluster).show(pool);
  if (state.pools.length === 0) text(by('pools'), 'No pool is configured.');
  showNavigation(state.pools);
  showEnvoys(state.envoys);
  announce(state);
}

function showNavigation(list) {
  const nav = by('pool-nav');
  nav.hidden = list.length < 2;
  keyed(nav, links, list.map(({ cluster }) => cluster), (cluster) => {
    const root = element('a', null, cluster);
    root.href = `#pool-${encodeURIComponent(encodeURIComponent(cluster))}`;
    return { root };
  });
}

function showEnvoys(list) {
  const section = by('envoys');
  section.hidden = false;
  section.querySelector('[data-f=table]').hidden = list.length === 0;
  section.querySelector('[data-f=none]').hidden = list.length > 0;
  keyed(section.querySelector('tbody'), envoys, list.map(({ url }) => url), () => copy('envoy-template'));
  for (const envoy of list) {
    const { root, f } = envoys.get(envoy.url);
    const asked = envoy.answered + envoy.failed > 0;
    const state = envoy.connected ? 'ready' : asked ? 'down' : 'asleep';
    attribute(root, 'data-state', state);
    text(f('url'), envoy.url);
    text(f('state'), envoy.connected ? 'connected' : asked ? 'not connected' : 'not asked yet');
    attribute(f('state'), 'data-state', state);
    text(f('problem'), envoy.problem ?? '');
    text(f('version'), envoy.filter_version || '–');
    text(f('age'), age(envoy.answer_age_ms));
    text(f('answered'), number(envoy.answered));
    text(f('failed'), number(envoy.failed));
    text(f('since'), day(envoy.counting_since_ms));
  }
}

/** Tells what came or went, once; figures are not read out. */
function announce(state) {
  const now = new Map();
  for (const pool of state.pools) {
    for (const { replica, state: condition } of pool.replicas) now.set(`Replica ${replica}`, condition);
  }
  for (const { url, connected } of state.envoys) now.set(`Envoy ${url}`, connected ? 'connected' : 'not connected');
  const changed = conditions ? [...now].filter(([name, condition]) => conditions.get(name) !== condition) : [];
  if (changed.length > 0) text(by('announcer'), changed.map(([name, condition]) => `${name} is ${condition}`).join('. '));
  conditions = now;
  const wrong = [...now.values()].filter((condition) => condition === 'down' || condition === 'not connected').length;
  document.title = wrong > 0 ? `(${wrong}) Homing` : 'Homing';
}

let told = 'loading';

function showLink({ silentMs, stale, everLive, retryMs }) {
  const link = everLive ? (stale ? 'stale' : 'live') : stale ? 'lost' : 'loading';
  attribute(document.body, 'data-link', link);
  const retry = retryMs === null ? 'trying to reconnect' : `next try in ${Math.ceil(retryMs / 1000)} s`;
  const texts = {
    loading: ['connecting', ''],
    live: ['live', ''],
    stale: [`stale, ${age(silentMs)}`, `Nothing from the collector for ${plural(Math.round(silentMs / 1000), 'second')}: what stands here is old; ${retry}.`],
    lost: ['no answer', `The collector does not answer; ${retry}. Is it running, and is this name in its allowed_hosts?`],
  };
  text(by('link-text'), texts[link][0]);
  text(by('notice'), texts[link][1]);
  by('notice').hidden = texts[link][1] === '';
  if (link !== told && !(told === 'loading' && link === 'live')) {
    text(by('announcer'), { live: 'Live again', stale: 'Figures are stale', lost: 'The collector does not answer', loading: '' }[link]);
  }
  told = link;
}

watch('/api/v1/events', show, showLink);
