/** Pinned prefixes: kept until they are released. */

import { ask, post } from "./api.js";
import { byId, confirmed, el, fill, table, toast } from "./dom.js";
import { bytes, count } from "./format.js";

export class Pins {
  /** @param {() => string} model @param {() => void} onChange */
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
  }

  async load() {
    let told;
    try {
      told = await (await ask(`v1/cache/pins?model=${encodeURIComponent(this.model())}`)).json();
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
      const { tenant, model, tokens } = await (await ask(`dashboard/tree/${node.number}/prefix?model=${encodeURIComponent(this.model())}`)).json();
      if (tenant == null) throw new Error("The tenant of this prefix is not known here: a client chose its salt.");
      if (model == null) throw new Error("The LoRA adapter of this prefix is not loaded.");
      const headers = tenant ? { "X-Cache-Salt": tenant } : {}; // the operator pins on behalf of the tenant
      await ask("v1/cache/pin", { method: "POST", headers, json: { model, prompt: tokens } });
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
      return;
    }
    toast("The prefix is pinned.");
    this.load();
    this.onChange();
  }

  /** @param {any} pin */
  async release(pin) {
    if (!(await confirmed("Release this prefix?", "It stays in the cache until its memory is needed.", "Release"))) return;
    try {
      await post("v1/cache/release", { id: pin.id });
      toast("The prefix is released.");
      this.load();
      this.onChange();
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
    }
  }
}
