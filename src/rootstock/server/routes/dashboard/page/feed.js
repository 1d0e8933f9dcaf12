/** The live feed: merges the changed sections of each event, and connects again after the server was away. */

const FULL_MS = 5000; // until a feed that was refused is tried again
const GONE_MS = 2000; // and the feed of a model that is not loaded

/** @typedef {{at: number, seenAt: number, lostAt?: number, sections: Record<string, any>}} State */

export class Feed {
  /**
   * @param {(state: State, changed: Set<string>) => void} onChange
   * @param {(kind: "open"|"lost"|"full"|"gone", server?: any) => void} onStatus
   * @param {() => Promise<boolean>} mayConnect asks for the session, and returns whether there is one
   */
  constructor(onChange, onStatus, mayConnect) {
    this.onChange = onChange;
    this.onStatus = onStatus;
    this.mayConnect = mayConnect;
    /** @type {EventSource|null} */
    this.source = null;
    this.timer = 0;
    this.wait = 1000;
    this.url = "";
  }

  /** @param {string} model @param {string} page shows that this page has asked */
  open(model, page) {
    this.close();
    this.url = `dashboard/events?model=${encodeURIComponent(model)}&page=${encodeURIComponent(page)}`;
    this.connect();
  }

  connect() {
    /** @type {State} */
    const state = { at: 0, seenAt: 0, sections: {} };
    const source = this.source = new EventSource(this.url);
    source.onopen = () => { this.wait = 1000; this.onStatus("open"); };
    source.onmessage = (event) => this.take(state, JSON.parse(event.data));
    source.onerror = () => {
      state.lostAt ??= performance.now(); // the server's clock is not known any more
      // The browser would connect again by itself after a lost connection, but not after a refusal.
      this.later("lost", this.wait);
      this.wait = Math.min(this.wait * 1.7, 15000);
    };
  }

  /** Connects again after some time. @param {"lost"|"full"|"gone"} kind @param {number} wait_ms @param {any} [server] */
  later(kind, wait_ms, server) {
    this.source?.close();
    this.onStatus(kind, server);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.again(), wait_ms);
  }

  async again() {
    const url = this.url;
    let may = false;
    try {
      may = await this.mayConnect();
    } catch {
      this.timer = setTimeout(() => this.again(), this.wait);
      this.wait = Math.min(this.wait * 1.7, 15000);
      return;
    }
    if (may && url === this.url) this.connect();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.url = "";
  }

  /** @param {State} state @param {any} event */
  take(state, event) {
    if (event.full) { this.later("full", FULL_MS); return; }
    if (event.gone) { this.later("gone", GONE_MS, event.server); return; }
    const { at, ...changed } = event;
    state.at = at;
    state.seenAt = performance.now();
    for (const [name, section] of Object.entries(changed)) {
      if (!section?.set) { state.sections[name] = section; continue; }
      const entries = section.first ? {} : state.sections[name];
      for (const id of section.gone) delete entries[id];
      state.sections[name] = Object.assign(entries, section.set);
    }
    this.onChange(state, new Set(Object.keys(changed)));
  }
}

/** The time by the server's clock; of a server that is away, its last time. @param {State} state */
export const nowOf = (state) => state.at + ((state.lostAt ?? performance.now()) - state.seenAt) / 1000;
