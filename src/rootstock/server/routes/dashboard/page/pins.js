/** Pinned prefixes: kept until they are released. */

import { ask, body, post } from "./api.js";
import { byId, confirmed, el, fill, toast } from "./dom.js";
import { bytes, count, short } from "./format.js";

export class Pins {
  /** @param {() => string} model @param {() => void} onChange */
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.drawn = "";
  }

  /** Shows the pins. Those of a key without a tenant are none. @param {boolean} [mayAsk] */
  async load(mayAsk = true) {
    let pins = [];
    try {
      if (mayAsk) pins = (await body(ask("v1/cache/pins"))).pins;
    } catch {
      return; // the banner says that the server is away
    }
    const drawn = JSON.stringify(pins);
    if (drawn === this.drawn) return; // a button keeps its focus
    this.drawn = drawn;
    const size = pins.reduce((/** @type {number} */ sum, /** @type {any} */ pin) => sum + (pin.bytes ?? 0), 0);
    byId("pins-count").textContent = pins.length ? `${count(pins.length)} · ${bytes(size)}` : "";
    if (!pins.length) { fill(byId("pins"), el("p", { class: "empty" }, "No prefix is pinned.")); return; }
    fill(byId("pins"), el("ul", { class: "entries" }, ...pins.map((/** @type {any} */ pin) => this.entry(pin))));
  }

  /** @param {any} pin */
  entry(pin) {
    const id = String(pin.id).slice(0, 16);
    return el("li", {},
      el("div", { class: "about" }, el("code", { title: pin.id }, id), " ", el("span", { title: pin.tenant }, pin.tenant ? short(pin.tenant) : "no tenant"),
        el("span", { class: "hint" }, `${count(pin.tokens ?? 0)} tokens${pin.bytes == null ? "" : ` · ${bytes(pin.bytes)}`}`)),
      el("div", { class: "buttons" }, el("button", { type: "button", "aria-label": `Release ${id}`, onclick: () => this.release(pin) }, "Release")));
  }

  /** The buttons of a node's detail. @param {any} node */
  buttons(node) {
    return [el("button", { type: "button", onclick: () => this.pin(node) }, "Pin this prefix…")];
  }

  /** @param {any} node */
  async pin(node) {
    if (!(await confirmed("Pin this prefix?", `Its ${count(node.end)} tokens, from the start to the end of this node, stay in the cache until they are released.`, "Pin"))) return;
    try {
      const told = await body(post(`dashboard/tree/${node.number}/pin?model=${encodeURIComponent(this.model())}`));
      this.changed(told, "The prefix is pinned.");
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
    }
  }

  /** @param {any} told the server's answer @param {string} done */
  changed(told, done) {
    toast(told.message ?? done);
    this.load();
    this.onChange();
  }

  /** @param {any} pin */
  async release(pin) {
    if (!(await confirmed("Release this prefix?", "It stays in the cache until its memory is needed.", "Release"))) return;
    try {
      this.changed(await body(post(`dashboard/pins/${encodeURIComponent(pin.id)}/release`)), "The prefix is released.");
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
    }
  }
}
