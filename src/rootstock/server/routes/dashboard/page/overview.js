/** The panels of memory and of prompt tokens by source. */

import { byId, el, fill, table } from "./dom.js";
import { bytes, compact, count, percent } from "./format.js";

/**
 * A stacked bar with its numbers in text. @param {string} name @param {string} value
 * @param {[string, number][]} parts class, share of the whole
 */
function stacked(name, value, parts) {
  const bar = el("div", { class: "stack", "aria-hidden": "true" });
  for (const [look, share] of parts) {
    const part = el("i", { class: look });
    part.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    bar.append(part);
  }
  return el("div", { class: "row" }, el("div", {}, el("span", {}, name), el("span", { class: "value" }, value)), bar);
}

/** @param {(string[])[]} entries */
function keys(entries) {
  return el("ul", { class: "legend" }, ...entries.map(([look, name]) => el("li", {}, el("i", { class: look }), name)));
}

/** @param {any} pool */
export function showMemory(pool) {
  const box = byId("memory");
  if (!pool) {
    fill(box, el("p", { class: "empty" }, "The operator's key shows the memory of all tenants."));
    return;
  }
  const rows = pool.families.map((/** @type {any} */ family) => stacked(
    family.name,
    `${bytes(family.live)} live · ${bytes(family.cached)} cached`,
    [["live", family.live / pool.budget], ["cached", family.cached / pool.budget]],
  ));
  rows.unshift(stacked("all families", `${bytes(pool.used)} of ${bytes(pool.budget)}`, pool.families.flatMap(
    (/** @type {any} */ family) => [["live", family.live / pool.budget], ["cached", family.cached / pool.budget]],
  )));
  if (pool.families.length === 1) rows.shift();
  for (const tier of pool.tiers ?? []) {
    rows.push(stacked(tier.name, `${bytes(tier.used)} of ${bytes(tier.cap)}`, [
      [tier.name === "disk" ? "disk" : "host", (tier.used - tier.foreign) / tier.cap], ["foreign", tier.foreign / tier.cap],
    ]));
  }
  const entries = [["live", "in use"], ["cached", "cached"]];
  for (const tier of pool.tiers ?? []) entries.push(tier.name === "disk" ? ["disk", "on disk"] : ["host", "in host memory"]);
  if (pool.tiers?.some((/** @type {any} */ tier) => tier.foreign)) entries.push(["foreign", "of other models"]);
  fill(box, ...rows, keys(entries));
  if (pool.families.length === 1) {
    box.prepend(el("p", { class: "hint" }, `${bytes(pool.used)} of ${bytes(pool.budget)} are used (${percent(pool.used, pool.budget)}).`));
  }
  const moves = pool.tier ? [
    pool.tier.state === "ready" ? "" : `The tier is ${pool.tier.state}.`,
    pool.tier.loading ? `Prefixes being loaded: ${count(pool.tier.loading)}.` : "",
    pool.tier.storing ? `${bytes(pool.tier.storing)} wait to be stored.` : "",
  ].filter(Boolean) : [];
  if (moves.length) box.append(el("p", { class: "hint" }, moves.join(" ")));
}

const WINDOWS = [["60", "1 min"], ["300", "5 min"], ["900", "15 min"]];

/** Where the K/V of a prompt's token comes from: its name in the feed, its class, and its name for people. */
const SOURCES = [["memory", "memory-c", "memory"], ["host", "host", "host memory"], ["disk", "disk", "disk"], ["computed", "computed", "computed"]];

/** @param {any} rates @param {any} pool */
export function showRates(rates, pool) {
  const tiers = (pool?.tiers ?? []).map((/** @type {any} */ tier) => tier.name);
  const sources = SOURCES.filter(([key, , name]) => key === "memory" || key === "computed" || tiers.includes(name) || rates.windows["900"][key]);
  const rows = WINDOWS.map(([seconds, name]) => {
    const hits = rates.windows[seconds];
    const all = SOURCES.reduce((sum, [key]) => sum + hits[key], 0);
    return stacked(name, all ? `${percent(all - hits.computed, all)} hit · ${count(all)} tokens` : "no prompts",
      all ? SOURCES.map(([key, look]) => [look, hits[key] / all]) : []);
  });
  const cells = [["requests", "", "prompts"], ...sources].map(([key, , name]) => el("tr", {}, el("th", { scope: "row" }, name), ...WINDOWS.map(
    ([seconds]) => el("td", { class: "n", title: count(rates.windows[seconds][key]) }, compact(rates.windows[seconds][key])),
  )));
  const detail = el("details", {}, el("summary", {}, "As a table"), table(
    [["tokens from"], ...WINDOWS.map(([, name]) => /** @type {[string, string]} */ ([name, "n"]))], cells, "Prompt tokens by source",
  ));
  detail.toggleAttribute("open", Boolean(byId("rates").querySelector("details")?.open));
  const axis = el("div", { class: "axis hint" }, el("span", {}, "15 min ago"), el("span", {}, "every 10 s"), el("span", {}, "now"));
  fill(byId("rates"), ...rows, keys(sources.map(([, look, name]) => [look, name])), sparkline(rates.history), axis, detail);
  if (pool?.inside_block_tokens) {
    byId("rates").append(el("p", { class: "hint", id: "inside-blocks" },
      `Of ${count(pool.hit_tokens)} cached tokens since the start, ${count(pool.inside_block_tokens)} lie behind the last whole block of their hit.`));
  }
}

/** The sources of the prompt tokens of each 10 seconds of the last quarter of an hour. @param {number[][]} history */
function sparkline(history) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("class", "spark");
  drawing.setAttribute("viewBox", `0 0 ${history.length} 40`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  const known = history.filter((hits) => hits.length);
  const sumOf = (/** @type {number[]} */ hits) => hits.reduce((sum, tokens) => sum + tokens, 0);
  const all = known.reduce((sum, hits) => sum + sumOf(hits), 0);
  const found = all - known.reduce((sum, hits) => sum + hits[3], 0);
  drawing.setAttribute("aria-label", `Hit rate over 15 minutes: ${percent(found, all)} in all`);
  history.forEach((hits, place) => {
    if (!hits.length) return;
    const total = sumOf(hits);
    let top = 40;
    ["var(--memory)", "var(--host)", "var(--loaded)", "var(--computed)"].forEach((colour, source) => {
      const height = (40 * hits[source]) / Math.max(1, total);
      const part = document.createElementNS(space, "rect");
      part.setAttribute("x", String(place + 0.06));
      part.setAttribute("width", "0.88");
      part.setAttribute("y", String((top -= height)));
      part.setAttribute("height", String(height));
      part.style.fill = colour;
      drawing.append(part);
    });
  });
  return drawing;
}
