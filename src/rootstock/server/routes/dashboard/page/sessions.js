/** The latest sessions: what the cache kept for each, and which ones wait for a place in memory. */

import { ask, body } from "./api.js";
import { byId, el, fill } from "./dom.js";
import { bytes, count, duration, percent, short } from "./format.js";

const SHOWN = 50;
const STATES = {
  held: ["held", "a request waits for its place in memory"], running: ["decode", "a request runs"],
  expected: ["prefill", "its next request is expected soon"], active: ["waiting_for_prefix", "its next request is expected"],
  idle: ["queued", "it has not come back in its usual time"],
};

export class Sessions {
  /** @param {() => string} model */
  constructor(model) {
    this.model = model;
    this.drawn = "";
  }

  /** Shows the sessions. Those of a key without a tenant are none. @param {boolean} [mayAsk] */
  async load(mayAsk = true) {
    /** @type {any[]} */
    let sessions = [];
    try {
      if (mayAsk) sessions = (await body(ask(`v1/cache/sessions?limit=${SHOWN}`))).sessions;
    } catch {
      return; // the banner says that the server is away
    }
    const shown = sessions.filter((session) => !session.model || session.model === this.model());
    const drawn = JSON.stringify(shown);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    byId("sessions-count").textContent = shown.length ? `${count(shown.length)}${sessions.length === SHOWN ? " latest" : ""}` : "";
    if (!shown.length) { fill(byId("sessions"), el("p", { class: "empty" }, "No request has named its session.")); return; }
    fill(byId("sessions"), el("ul", { class: "entries" }, ...shown.map(entry)));
  }
}

/** @param {any} session */
function entry(session) {
  const [look, meaning] = STATES[/** @type {"held"} */ (session.state)] ?? ["queued", ""];
  const pause = session.running || !session.expected_pause_s ? [] : [`pauses ${duration(session.expected_pause_s)}, now for ${duration(session.idle_s)}`];
  const found = session.prompt_tokens ? [`${percent(session.cached_tokens, session.prompt_tokens)} found: ${count(session.cached_tokens)} tokens saved`] : [];
  const lost = session.lost_tokens ? [`${count(session.lost_tokens)} tokens of the conversation not found: ${duration(session.lost_s)} of prefill`] : [];
  const drafts = session.draft_tokens ? [`${percent(session.accepted_draft_tokens, session.draft_tokens)} of ${count(session.draft_tokens)} draft tokens accepted`] : [];
  const waited = [...(session.held_s ? [`held for ${duration(session.held_s)}`] : []), ...(session.queued_s >= 0.1 ? [`queued for ${duration(session.queued_s)}`] : [])];
  const told = [session.requests === 1 ? "1 request" : `${count(session.requests)} requests`, ...found, ...lost, ...drafts, bytes(session.bytes).replace(" ", "\u00a0"), ...pause, ...waited];
  return el("li", {},
    el("div", { class: "about" }, el("span", { class: "state", title: meaning }, el("i", { class: look }), session.state), " ", el("code", { title: session.session }, short(session.session)),
      " ", el("span", { title: session.tenant }, session.tenant ? short(session.tenant) : "no tenant"),
      el("span", { class: "hint" }, told.join(" · "))));
}
