/** The panels of recent misses and of volatile spans. */

import { byId, el, fill } from "./dom.js";
import { nowOf } from "./feed.js";
import { count, duration, short } from "./format.js";

const CAUSES = {
  cache_off: "cache off", scored: "prompt scored", nothing_cached: "nothing cached", diverged: "diverged",
  volatile_span: "volatile text", no_checkpoint: "no checkpoint", evicted: "evicted", on_disk: "on disk",
};

/** @typedef {{id: number, text: string|null}} Token */

/** @param {Token[]} tokens */
const written = (tokens) => tokens.map((token) => token.text ?? `${token.id} `).join("");

/** @param {import("./feed.js").State} state */
export function showMisses(state) {
  const all = Object.entries(state.sections.misses ?? {});
  if (!all.length) {
    fill(byId("misses"), el("p", { class: "empty" }, "None of the latest prompts missed many tokens."));
    return;
  }
  all.sort(([, a], [, b]) => b.at - a.at);
  fill(byId("misses"), ...all.map(([id, miss]) => one(id, miss, nowOf(state))));
}

/** @param {number} at @param {number} now */
const ago = (at, now) => `${duration(Math.max(0, now - at))} ago`;

/** Shows how long ago the misses are, without drawing them again. @param {import("./feed.js").State} state */
export function ageMisses(state) {
  for (const span of /** @type {NodeListOf<HTMLElement>} */ (byId("misses").querySelectorAll("[data-at]"))) span.textContent = ago(Number(span.dataset.at), nowOf(state));
}

/** @param {string} id @param {any} miss @param {number} now */
function one(id, miss, now) {
  const head = el("p", { class: "head" },
    el("strong", { class: "tag" }, CAUSES[/** @type {"diverged"} */ (miss.cause)] ?? miss.cause),
    el("span", {}, `${count(miss.missed)} of ${count(miss.prompt)} tokens`),
    el("span", { class: "hint" }, el("span", { "data-at": miss.at }, ago(miss.at, now)), miss.tenant ? ` · ${short(miss.tenant)}` : ""),
    el("code", { class: "hint", title: id }, id.slice(-14)),
  );
  const parts = [head, el("p", { class: "hint" }, miss.message)];
  if (miss.withheld) parts.push(el("p", { class: "hint" }, "Token ids are shown to a key of the tenant, and to the operator."));
  if (miss.asked.length) {
    const volatile = miss.volatile;
    const differing = volatile ? miss.asked.slice(0, Math.max(1, volatile.asked.length)) : miss.asked.slice(0, 1);
    const rest = miss.asked.slice(differing.length);
    parts.push(el("p", { class: "tokens mono", tabindex: "0", role: "group", "aria-label": "The prompt around the divergence" },
      el("span", { class: "same" }, written(miss.before)), el("mark", {}, written(differing)), written(rest)));
    const cached = volatile ? written(volatile.cached) : miss.others.map((/** @type {Token} */ token) => written([token]).trim()).join(" | ");
    if (cached) parts.push(el("p", { class: "hint" }, "Cached prefixes go on with ", el("code", {}, cached),
      volatile ? `, and the next ${count(volatile.agreed)} tokens are equal.` : "."));
  }
  return el("article", { class: "miss" }, ...parts);
}

/** @param {any[]} spans */
export function showVolatile(spans) {
  if (!spans?.length) {
    fill(byId("volatile"), el("p", { class: "empty" }, "None was found."));
    return;
  }
  fill(byId("volatile"), ...spans.map((span) => el("article", { class: "miss" },
    el("p", { class: "head" }, el("strong", { class: "tag" }, `at token ${count(span.position)}`),
      el("span", {}, `${count(span.count)} prompts${span.tenant ? ` · ${short(span.tenant)}` : ""}`)),
    ...(span.examples[0] == null ? [] : [el("p", { class: "tokens mono", tabindex: "0", role: "group", "aria-label": "The text that changes" }, el("span", { class: "same" }, span.before.slice(-80)),
      el("mark", {}, span.examples.join(" | ")))]),
    el("p", { class: "hint" }, span.hint))));
}
