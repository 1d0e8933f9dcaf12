/** The panel of models: their states, and buttons that load and unload them. */

import { body, post } from "./api.js";
import { byId, confirmed, el, fill, toast } from "./dom.js";

/** @typedef {{name: string, status: string, task: string|null, adapters: string[], error: string|null, may_unload: boolean}} Model */

const STATES = { loaded: "loaded", loading: "loading…", unloading: "unloading…", unloaded: "not loaded", failed: "could not be loaded" };

/** Whether a page can show the model's cache. @param {Model} model */
export const hasCache = (model) => model.task !== "embed";

export class Models {
  /** @param {() => string} shown the model that the page shows @param {(name: string) => void} show */
  constructor(shown, show) {
    this.shown = shown;
    this.show = show;
    /** @type {Model[]} */
    this.all = [];
    this.drawn = "";
  }

  /** @param {string} name */
  find(name) {
    return this.all.find((model) => model.name === name);
  }

  /** Why the page shows nothing of a model; "": it is loaded. @param {string} name */
  absence(name) {
    const model = this.find(name);
    if (!model || model.status === "loaded") return "";
    const remedy = { loading: "It is being loaded.", unloading: "It is being unloaded." }[model.status] ?? "A request loads it.";
    return `The model ${name} is not loaded. ${remedy}`;
  }

  /** @param {{models: Model[], draining: boolean}} server @param {boolean} mayChange */
  update(server, mayChange) {
    this.all = server.models;
    const drawn = JSON.stringify([server, mayChange, this.shown()]);
    if (drawn === this.drawn) return; // a button keeps its focus
    this.drawn = drawn;
    byId("models-card").hidden = this.all.length < 2 && !this.all.some((model) => model.adapters.length || model.status !== "loaded");
    fill(byId("models"), ...this.all.map((model) => this.entry(model, mayChange && !server.draining)));
  }

  /** @param {Model} model @param {boolean} mayChange */
  entry(model, mayChange) {
    const { name, status } = model;
    const state = STATES[/** @type {"loaded"} */ (status)] ?? status;
    const about = [model.task === "embed" ? "for embeddings" : "", model.error ? `the last load failed: ${model.error}` : "",
      model.adapters.length ? `adapters: ${model.adapters.join(", ")}` : ""].filter(Boolean).join(" · ");
    const button = (/** @type {string} */ text, /** @type {() => void} */ onclick) => el("button", { type: "button", "aria-label": `${text} ${name}`, onclick }, text);
    const buttons = [];
    if (hasCache(model) && name !== this.shown()) buttons.push(button("Show", () => this.show(name)));
    if (mayChange && model.may_unload && status === "loaded") buttons.push(button("Unload", () => this.unload(name)));
    if (mayChange && (status === "unloaded" || status === "failed")) buttons.push(button("Load", () => this.change("load", name)));
    return el("li", {},
      el("div", { class: "about" }, el("strong", {}, name), " ", el("span", { class: `tag ${status}` }, state), ...(about ? [el("span", { class: "hint" }, about)] : [])),
      el("div", { class: "buttons" }, ...buttons));
  }

  /** @param {string} name */
  async unload(name) {
    if (await confirmed("Unload this model?", `Requests that name ${name} wait until it is loaded again. Its cached prefixes leave the memory; those in a disk tier stay.`, "Unload")) await this.change("unload", name);
  }

  /** @param {"load"|"unload"} action @param {string} name */
  async change(action, name) {
    toast(action === "load" ? `${name} is being loaded.` : `${name} is being unloaded.`);
    try {
      const told = await body(post(`dashboard/models/${action}?model=${encodeURIComponent(name)}`));
      toast(told.message ?? `${name} is ${action}ed.`);
    } catch (error) {
      toast(/** @type {Error} */ (error).message);
    }
  }
}
