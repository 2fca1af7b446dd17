// The page: follows the stream of states and shows each.

import { attribute, copy, element, keyed, text } from './dom.js';
import { age, day, number, plural } from './format.js';
import { PoolView, explainSource, stateOf } from './pool.js';
import { watch } from './stream.js';

const by = (id) => document.getElementById(id);
const pools = new Map();
const envoys = new Map();
const links = new Map();
let conditions = null;

function show(state) {
  by('loading').hidden = true;
  keyed(by('pools'), pools, state.pools.map(({ cluster }) => cluster), (cluster) => new PoolView(cluster));
  for (const pool of state.pools) pools.get(pool.cluster).show(pool, state.generation);
  showNavigation(state.pools);
  showEnvoys(state.envoys, state.envoy_sources);
  showHomes(state.affinity);
  const { drain_file_problem: problem } = state;
  text(by('drain-file'), problem === null ? '' : `The drain file cannot be used: ${problem}. What it said last holds.`);
  by('drain-file').hidden = problem === null;
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

const ENVOY_STATES = { connected: 'ready', standby: 'asleep', 'not connected': 'down', 'not asked yet': 'unknown' };

/** One that hears another collector is well: this one stands by. */
function conditionOf({ connected, standby, answered, failed }) {
  if (connected) return standby ? 'standby' : 'connected';
  return answered + failed > 0 ? 'not connected' : 'not asked yet';
}

function showEnvoys(list, sources) {
  const section = by('envoys');
  section.hidden = false;
  section.querySelector('[data-f=table]').hidden = list.length === 0;
  section.querySelector('[data-f=none]').hidden = list.length > 0 || sources.length > 0;
  const failing = sources.filter(({ problem }) => problem).map(explainSource).join(' ');
  const searching = list.length === 0 && sources.length > 0 ? 'Envoys are being looked up.' : '';
  text(section.querySelector('[data-f=sources]'), failing || searching);
  keyed(section.querySelector('tbody'), envoys, list.map(({ url }) => url), () => copy('envoy-template'));
  for (const envoy of list) {
    const { root, f } = envoys.get(envoy.url);
    const condition = conditionOf(envoy);
    attribute(root, 'data-state', ENVOY_STATES[condition]);
    text(f('url'), envoy.url);
    text(f('state'), condition);
    attribute(f('state'), 'data-state', ENVOY_STATES[condition]);
    text(f('problem'), envoy.problem ?? '');
    text(f('version'), envoy.filter_version || '–');
    text(f('age'), age(envoy.answer_age_ms));
    text(f('answered'), number(envoy.answered));
    text(f('failed'), number(envoy.failed));
    text(f('since'), day(envoy.counting_since_ms));
  }
}

/** What is known of conversations' homes, and the store that keeps them too. */
function showHomes({ conversations, store }) {
  const section = by('envoys');
  const kept = store?.up ? `, kept in ${store.url} too` : '';
  text(section.querySelector('[data-f=homes]'), `${plural(conversations, 'home')} of conversations known${kept}`);
  const why = store?.problem ? `: ${store.problem}` : ' yet';
  text(section.querySelector('[data-f=store]'), store === null || store.up ? '' : `Homes are not kept in ${store.url}${why}. Envoys agree without it.`);
}

/** Tells what came or went, once; figures are not read out. What a collector that just started has not asked yet did not change. */
function announce(state) {
  const now = new Map();
  const note = (name, condition) => {
    const known = condition === 'unknown' || condition === 'not asked yet' ? conditions?.get(name) : condition;
    if (known !== undefined) now.set(name, known);
  };
  for (const pool of state.pools) {
    for (const replica of pool.replicas) note(`Replica ${replica.replica}`, stateOf(replica));
  }
  for (const envoy of state.envoys) note(`Envoy ${envoy.url}`, conditionOf(envoy));
  const changed = conditions ? [...now].filter(([name, condition]) => conditions.get(name) !== condition) : [];
  if (changed.length > 0) text(by('announcer'), changed.map(([name, condition]) => `${name} is ${condition}`).join('. '));
  conditions = now;
  const failing = [...state.envoy_sources, ...state.pools.flatMap(({ sources }) => sources)].filter(({ problem }) => problem).length;
  const others = [state.drain_file_problem, state.affinity.store?.problem ?? null].filter((problem) => problem !== null).length;
  const wrong = failing + others + [...now.values()].filter((condition) => condition === 'down' || condition === 'not connected').length;
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
    lost: ['no answer', `The collector does not answer; ${retry}. Is it running, is this name in its allowed_hosts, and are fewer than 64 pages open?`],
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
