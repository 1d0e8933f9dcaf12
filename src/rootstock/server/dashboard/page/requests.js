/** The panel of requests: a line each, with its phases in time, and a button that stops it. */

import { body, post } from "./api.js";
import { byId, confirmed, el, fill, legend, table, toast } from "./dom.js";
import { nowOf } from "./feed.js";
import { count, duration } from "./format.js";

const PHASES = [["queued", "queued"], ["waiting_for_prefix", "waiting for a prefix"], ["loading", "loading"], ["prefill", "prefill"], ["decode", "decode"]];
const NAMES = Object.fromEntries(PHASES);
const MOST = 60;

/** @typedef {{row: HTMLElement, line: HTMLElement, cells: HTMLElement[], button: HTMLButtonElement}} Row */

export class Requests {
  /** @param {() => string} model */
  constructor(model) {
    this.model = model;
    /** @type {Map<string, Row>} */
    this.rows = new Map();
    this.body = el("tbody");
    /** @type {import("./feed.js").State|null} */
    this.state = null;
    const shown = table([["request"], ["tenant", "optional"], ["phase"], ["time", "wide"], ["cached", "n"], ["prompt", "n"], ["out", "n"], ["stop"]], [], "Requests");
    shown.querySelector("tbody")?.replaceWith(this.body);
    this.empty = el("p", { class: "empty" }, "No request has come yet.");
    fill(byId("requests"), shown, this.empty);
    legend(byId("phases"), /** @type {[string, string][]} */ (PHASES));
    byId("window").addEventListener("change", () => this.draw());
    setInterval(() => { if (this.state && !document.hidden && this.someOpen()) this.draw(); }, 1000);
  }

  someOpen() {
    return Object.values(this.state?.sections.requests ?? {}).some((request) => request.open);
  }

  /** @param {import("./feed.js").State} state */
  show(state) {
    this.state = state;
    this.draw();
  }

  draw() {
    if (!this.state) return;
    const now = nowOf(this.state);
    const window_s = Number(/** @type {HTMLSelectElement} */ (byId("window")).value);
    const all = Object.entries(this.state.sections.requests ?? {});
    const open = all.filter(([, request]) => request.open);
    const ended = all.filter(([, request]) => !request.open && now - endOf(request) < window_s);
    ended.sort(([, a], [, b]) => endOf(b) - endOf(a));
    const shown = [...open, ...ended].slice(0, MOST);
    byId("requests-count").textContent = `${open.length} open`;
    this.empty.hidden = shown.length > 0;
    const keep = new Set(shown.map(([id]) => id));
    for (const [id, row] of this.rows) if (!keep.has(id)) { row.row.remove(); this.rows.delete(id); }
    shown.forEach(([id, request], place) => {
      const row = this.rows.get(id) ?? this.add(id, request.tenant);
      if (this.body.children[place] !== row.row) this.body.insertBefore(row.row, this.body.children[place] ?? null);
      this.update(row, request, now, window_s);
    });
  }

  /** @param {string} id @param {string} tenant @returns {Row} */
  add(id, tenant) {
    const line = el("div", { class: "line" });
    const cells = [0, 1, 2, 3].map((place) => el("td", { class: place ? "n" : "" }));
    const name = id.length > 18 ? `…${id.slice(-14)}` : id;
    const button = /** @type {HTMLButtonElement} */ (el("button", { type: "button", class: "stop", "aria-label": `Stop request ${name}`, onclick: () => this.stop(id, name) }, "Stop"));
    const first = el("td", { title: id }, el("code", {}, name));
    const row = el("tr", {}, first, el("td", { class: "optional" }, tenant || "–"), cells[0], el("td", { class: "wide" }, line), cells[1], cells[2], cells[3], el("td", {}, button));
    const made = { row, line, cells, button };
    this.rows.set(id, made);
    return made;
  }

  /** @param {Row} row @param {any} request @param {number} now @param {number} window_s */
  update(row, request, now, window_s) {
    const { line, cells, button } = row;
    const last = request.spans.at(-1) ?? ["queued", now, now];
    const phase = request.preempted ? "preempted" : NAMES[last[0]];
    const ends = { stop: "done", length: "done (length)", aborted: "stopped", failed: "failed" };
    setText(cells[0], request.open ? `${phase} ${duration(Math.max(0, now - last[1]))}` : ends[/** @type {"stop"} */ (request.outcome)]);
    setText(cells[1], request.cached == null ? "…" : count(request.cached));
    setText(cells[2], request.open && last[0] === "prefill" ? `${count(request.computed)} / ${count(request.prompt)}` : count(request.prompt));
    setText(cells[3], count(request.completion));
    row.row.className = request.open ? "" : "ended";
    button.hidden = !request.open;
    const from = now - window_s;
    const bars = request.spans.filter((/** @type {any} */ span) => (span[2] ?? now) > from);
    while (line.children.length > bars.length) line.lastElementChild?.remove();
    while (line.children.length < bars.length) line.append(el("i"));
    bars.forEach((/** @type {any} */ [name, began, end], /** @type {number} */ place) => {
      const bar = /** @type {HTMLElement} */ (line.children[place]);
      const left = Math.max(0, (began - from) / window_s);
      bar.className = name;
      bar.title = `${NAMES[name]}: ${duration((end ?? now) - began)}`;
      bar.style.left = `${left * 100}%`;
      bar.style.width = `${Math.max(0, ((end ?? now) - from) / window_s - left) * 100}%`;
    });
  }

  /** @param {string} id @param {string} name */
  async stop(id, name) {
    if (!(await confirmed("Stop this request?", `${name} ends with an error for its client. The tokens computed so far stay in the cache.`, "Stop it"))) return;
    try {
      const told = await body(post(`dashboard/requests/${encodeURIComponent(id)}/stop?model=${encodeURIComponent(this.model())}`));
      toast(told.message ?? "The request was stopped.");
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
    }
  }
}

/** @param {any} request */
const endOf = (request) => request.spans.at(-1)?.[2] ?? 0;

/** @param {HTMLElement} cell @param {string} text */
function setText(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}
