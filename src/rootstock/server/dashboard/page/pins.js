/** Pinned prefixes: kept until they are released. */

import { ask, body, post } from "./api.js";
import { byId, confirmed, el, fill, table, toast } from "./dom.js";
import { bytes, count } from "./format.js";

export class Pins {
  /** @param {() => string} model @param {() => void} onChange */
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
  }

  /** Shows the pins. Those of a key without a tenant are none. @param {boolean} [mayAsk] */
  async load(mayAsk = true) {
    let told;
    try {
      told = mayAsk ? await body(ask("v1/cache/pins")) : { pins: [] };
    } catch (error) {
      fill(byId("pins"), el("p", { class: "empty" }, /** @type {Error} */ (error).message));
      return;
    }
    const pins = told.pins;
    if (!pins.length) { fill(byId("pins"), el("p", { class: "empty" }, "No prefix is pinned.")); return; }
    fill(byId("pins"), table([["prefix"], ["tenant"], ["tokens", "n"], ["memory", "n"], ["release"]], pins.map((/** @type {any} */ pin) => el("tr", {},
      el("td", {}, el("code", {}, String(pin.id).slice(0, 16))), el("td", {}, pin.tenant || "none"), el("td", { class: "n" }, count(pin.tokens ?? 0)), el("td", { class: "n" }, pin.bytes == null ? "" : bytes(pin.bytes)),
      el("td", {}, el("button", { type: "button", class: "stop", "aria-label": `Release ${pin.id}`, onclick: () => this.release(pin) }, "Release")))), "Pinned prefixes"));
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
