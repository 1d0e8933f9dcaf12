/**
 * The panel of requests: a line each, with its phases in time, and a button that stops it. On a narrow screen the cells of
 * a line are a block with labels.
 */

import { body, post } from "./api.js";
import { byId, confirmed, el, fill, legend, table, toast } from "./dom.js";
import { nowOf } from "./feed.js";
import { count, duration, short } from "./format.js";

const PHASES = [["queued", "queued"], ["held", "held for memory"], ["waiting_for_prefix", "waiting for a prefix"], ["loading", "loading"], ["prefill", "prefill"], ["decode", "decode"]];
const NAMES = Object.fromEntries(PHASES);
const MOST = 60;

/** @typedef {{row: HTMLElement, line: HTMLElement, ago: HTMLElement, cells: HTMLElement[], button: HTMLButtonElement}} Row */

export class Requests {
  /** @param {() => string} model */
  constructor(model) {
    this.model = model;
    /** @type {Map<string, Row>} */
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    /** @type {import("./feed.js").State|null} */
    this.state = null;
    this.table = table([["request"], ["tenant"], ["phase"], ["time"], ["cached", "n"], ["prompt", "n"], ["answer", "n"], ["stop"]], [], "Requests", "lines");
    this.table.querySelector("tbody")?.replaceWith(this.body);
    this.empty = el("p", { class: "empty" });
    fill(byId("requests"), this.table, this.empty);
    legend(byId("phases"), /** @type {[string, string][]} */ (PHASES));
    byId("window").addEventListener("change", () => this.draw());
    setInterval(() => { if (this.state && !document.hidden) this.draw(); }, 1000);
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
    const { sections } = this.state;
    const all = Object.entries(sections.requests ?? {});
    const open = all.filter(([, request]) => request.open);
    const ended = all.filter(([, request]) => !request.open);
    ended.sort(([, a], [, b]) => endOf(b) - endOf(a));
    const shown = [...open, ...ended].slice(0, MOST);
    const opened = sections.open ?? open.length, unseen = opened - Math.min(open.length, MOST);
    byId("requests-count").textContent = `${count(opened)} open`;
    this.table.hidden = !shown.length;
    this.empty.hidden = shown.length > 0;
    const prompts = sections.rates?.windows["900"].requests;
    setText(this.empty, prompts ? `No request is open. ${count(prompts)} came in the last 15 minutes, before those of others.` : "No request has come in the last 15 minutes.");
    byId("requests-more").hidden = unseen <= 0;
    setText(byId("requests-more"), `${count(unseen)} more requests are open.`);
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
    const cells = ["phase", "cached", "prompt", "answer"].map((name, place) => el("td", { role: "cell", class: place ? `n ${name === "answer" ? name : ""}` : name, "data-label": name }));
    const name = id.length > 18 ? `…${id.slice(-14)}` : id;
    const button = /** @type {HTMLButtonElement} */ (el("button", { type: "button", "aria-label": `Stop request ${name}`, onclick: () => this.stop(id, name) }, "Stop"));
    const first = el("td", { role: "cell", class: "id", title: id }, el("code", {}, name));
    const of = el("td", { role: "cell", class: "of wraps", title: tenant }, tenant ? short(tenant) : "no tenant");
    const ago = el("span", { class: "ago" });
    const time = el("td", { role: "cell", class: "time" }, line, ago);
    const row = el("tr", { role: "row" }, first, of, cells[0], time, cells[1], cells[2], cells[3], el("td", { role: "cell", class: "stop" }, button));
    const made = { row, line, ago, cells, button };
    this.rows.set(id, made);
    return made;
  }

  /** @param {Row} row @param {any} request @param {number} now @param {number} window_s */
  update(row, request, now, window_s) {
    const { line, ago, cells, button } = row;
    const last = request.spans.at(-1) ?? ["queued", now, now];
    const phase = request.preempted ? "preempted" : NAMES[last[0]];
    const ends = { stop: "done", length: "done at its limit", aborted: "stopped", failed: "failed" };
    setText(cells[0], request.open ? `${phase} ${duration(Math.max(0, now - last[1]))}` : ends[/** @type {"stop"} */ (request.outcome)]);
    setText(cells[1], request.cached == null ? "…" : count(request.cached));
    setText(cells[2], request.open && last[0] === "prefill" ? `${count(request.computed)} / ${count(request.prompt)}` : count(request.prompt));
    setText(cells[3], count(request.completion));
    row.row.className = request.open ? "" : "ended";
    button.hidden = !request.open;
    const from = now - window_s;
    const isOld = !request.open && endOf(request) <= from;
    line.hidden = isOld;
    ago.hidden = !isOld;
    if (isOld) setText(ago, `${duration(Math.max(0, now - endOf(request)))} ago`);
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
