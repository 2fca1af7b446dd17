// A pool's last hour, kept up to date with what is newer at the collector.

const STEPS = 720;
const SERIES = ['cached', 'computed', 'generated', 'in_flight'];

export class History {
  constructor(cluster) {
    this.cluster = cluster;
    this.generation = null;
    this.clear();
  }

  clear() {
    this.step = 0;
    this.atMs = 0;
    this.stepMs = 5_000;
    this.length = 0;
    this.pool = Object.fromEntries(SERIES.map((name) => [name, []]));
    this.replicas = new Map();
    this.asking = false;
  }

  /**
   * Fetches the steps after the newest one known, and says whether the history is another now. Each collector counts steps from its
   * own start, its generation: another one's are not joined to what is here.
   */
  async follow(newest, generation) {
    const begins = generation !== this.generation;
    if (begins) {
      this.clear();
      this.generation = generation;
    }
    if (newest === this.step || this.asking) return begins;
    this.asking = true;
    try {
      const answer = await fetch(`/api/v1/history?pool=${encodeURIComponent(this.cluster)}&since=${this.step}`);
      if (!answer.ok) return begins;
      const news = await answer.json();
      if (generation !== this.generation) return false;
      this.add(news);
      return true;
    } catch {
      // The stream says when the collector is away; the steps are asked for again with the next state.
      return begins;
    } finally {
      if (generation === this.generation) this.asking = false;
    }
  }

  add(news) {
    const added = news.pool.in_flight.length;
    const before = this.length;
    const merge = (series, more) => {
      for (const name of SERIES) {
        const values = more ? more[name] : new Array(added).fill(null);
        series[name] = series[name].concat(values).slice(-STEPS);
      }
      return series;
    };
    merge(this.pool, news.pool);
    const more = new Map(news.replicas.map((replica) => [replica.replica, replica]));
    for (const name of more.keys()) {
      if (!this.replicas.has(name)) {
        this.replicas.set(name, Object.fromEntries(SERIES.map((series) => [series, new Array(before).fill(null)])));
      }
    }
    for (const [name, series] of this.replicas) {
      merge(series, more.get(name));
      if (series.in_flight.every((value) => value === null)) this.replicas.delete(name);
    }
    this.length = Math.min(before + added, STEPS);
    this.step = news.step;
    this.atMs = news.at_ms;
    this.stepMs = news.step_seconds * 1000;
  }

  /** Cached among all prompt tokens, step by step. */
  hitRate() {
    return this.pool.cached.map((cached, at) => {
      const computed = this.pool.computed[at];
      return cached === null || computed === null || cached + computed === 0 ? null : cached / (cached + computed);
    });
  }
}
