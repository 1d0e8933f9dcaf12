/** The panels of memory and of prompt tokens by source. */

import { byId, el, fill, table } from "./dom.js";
import { bytes, count, percent } from "./format.js";

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
  if (pool.tier) {
    const tier = pool.tier;
    const moving = tier.loading ? ` · ${tier.loading} loading` : "";
    rows.push(stacked(`tier (${tier.state})`, `${bytes(tier.used)} of ${bytes(tier.cap)}${moving}`, [
      ["loaded", (tier.used - tier.foreign) / tier.cap], ["foreign", tier.foreign / tier.cap],
    ]));
  }
  const entries = [["live", "in use"], ["cached", "cached"]];
  if (pool.tier) entries.push(["loaded", "stored"], ["foreign", "of other models"]);
  fill(box, ...rows, keys(entries));
  if (pool.families.length === 1) {
    box.prepend(el("p", { class: "hint" }, `${bytes(pool.used)} of ${bytes(pool.budget)} (${percent(pool.used, pool.budget)})`));
  }
}

const WINDOWS = [["60", "1 min"], ["300", "5 min"], ["900", "15 min"]];

/** @param {any} rates */
export function showRates(rates) {
  const rows = WINDOWS.map(([seconds, name]) => {
    const hits = rates.windows[seconds];
    const all = hits.memory + hits.loaded + hits.computed;
    return stacked(name, all ? `${percent(hits.memory + hits.loaded, all)} hit · ${count(all)} tokens` : "no prompts", all ? [
      ["memory-c", hits.memory / all], ["loaded", hits.loaded / all], ["computed", hits.computed / all],
    ] : []);
  });
  const cells = WINDOWS.map(([seconds, name]) => {
    const hits = rates.windows[seconds];
    return el("tr", {}, el("th", { scope: "row" }, name), ...[hits.requests, hits.memory, hits.loaded, hits.computed].map(
      (value) => el("td", { class: "n" }, count(value)),
    ));
  });
  const detail = el("details", {}, el("summary", {}, "As a table"), table(
    [["window"], ["prompts", "n"], ["memory", "n"], ["disk", "n"], ["computed", "n"]], cells, "Prompt tokens by source",
  ));
  detail.toggleAttribute("open", Boolean(byId("rates").querySelector("details")?.open));
  fill(byId("rates"), ...rows, keys([["memory-c", "memory"], ["loaded", "disk"], ["computed", "computed"]]), sparkline(rates.history), detail);
}

/** The hit rate of each 10 seconds of the last quarter of an hour. @param {number[][]} history */
function sparkline(history) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("class", "spark");
  drawing.setAttribute("viewBox", `0 0 ${history.length} 40`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  const known = history.filter((hits) => hits.length);
  const all = known.reduce((sum, hits) => sum + hits[0] + hits[1] + hits[2], 0);
  const found = known.reduce((sum, hits) => sum + hits[0] + hits[1], 0);
  drawing.setAttribute("aria-label", `Hit rate over 15 minutes: ${percent(found, all)} in all`);
  history.forEach((hits, place) => {
    if (!hits.length) return;
    const total = hits[0] + hits[1] + hits[2];
    let top = 40;
    [["var(--memory)", hits[0]], ["var(--loaded)", hits[1]], ["var(--computed)", hits[2]]].forEach(([colour, tokens]) => {
      const height = (40 * Number(tokens)) / Math.max(1, total);
      const part = document.createElementNS(space, "rect");
      part.setAttribute("x", String(place + 0.06));
      part.setAttribute("width", "0.88");
      part.setAttribute("y", String((top -= height)));
      part.setAttribute("height", String(height));
      part.style.fill = String(colour);
      drawing.append(part);
    });
  });
  return drawing;
}
