/** The live feed: merges the changed sections of each event, and connects again after the server was away. */

const REFUSED_MS = 5000; // until a feed that was refused is tried again

/** @typedef {{at: number, seenAt: number, sections: Record<string, any>}} State */

export class Feed {
  /**
   * @param {(state: State, changed: Set<string>) => void} onChange
   * @param {(kind: "open"|"lost"|"full"|"gone") => void} onStatus
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

  /** @param {string} model */
  open(model) {
    this.close();
    this.url = `dashboard/events?model=${encodeURIComponent(model)}`;
    this.connect();
  }

  connect() {
    /** @type {State} */
    this.state = { at: 0, seenAt: 0, sections: {} };
    const source = this.source = new EventSource(this.url);
    source.onopen = () => { this.wait = 1000; this.onStatus("open"); };
    source.onmessage = (event) => this.take(JSON.parse(event.data));
    source.onerror = () => {
      // The browser would connect again by itself after a lost connection, but not after a refusal.
      this.later("lost", this.wait);
      this.wait = Math.min(this.wait * 1.7, 15000);
    };
  }

  /** Connects again after some time. @param {"lost"|"full"|"gone"} kind @param {number} wait_ms */
  later(kind, wait_ms) {
    this.source?.close();
    this.onStatus(kind);
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

  /** @param {any} event */
  take(event) {
    if (event.full) { this.later("full", REFUSED_MS); return; }
    if (event.gone) { this.later("gone", REFUSED_MS); return; }
    const state = /** @type {State} */ (this.state);
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

/** The time by the server's clock. @param {State} state */
export const nowOf = (state) => state.at + (performance.now() - state.seenAt) / 1000;
