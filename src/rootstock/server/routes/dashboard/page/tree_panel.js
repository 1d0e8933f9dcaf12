/** The panel of the prefix tree: loading, colours, pointer and keys, the selected node, and the table. */

import { ask, body } from "./api.js";
import { byId, el, fill, legend, table } from "./dom.js";
import { bytes, count, duration, short, tenantName } from "./format.js";
import { LIVE, decode, rowOf, siblings } from "./tree_data.js";
import { TreeView } from "./tree_view.js";

/** @typedef {import("./tree_data.js").Tree} Tree */
const AGES = [[10, "10 s"], [60, "1 min"], [300, "5 min"], [1800, "30 min"], [7200, "2 h"], [Infinity, "older"]];
const TABLE_ROWS = 40;
const HUES = [152, 212, 32, 276, 340, 96, 188, 12, 244, 60];

export class TreePanel {
  /** @param {() => string} model @param {(node: any) => Node[]} actions buttons for a node's detail */
  constructor(model, actions) {
    this.model = model;
    this.actions = actions;
    const canvas = this.canvas = /** @type {HTMLCanvasElement} */ (byId("tree"));
    this.view = new TreeView(canvas, (node) => this.labels(node));
    this.timer = 0;
    this.asked = 0;
    this.isSeen = false; // a tree that is not seen is not asked for
    new IntersectionObserver((entries) => {
      const seen = Boolean(entries.at(-1)?.isIntersecting), comes = seen && !this.isSeen;
      this.isSeen = seen;
      if (comes && this.model()) this.load();
    }, { rootMargin: "200px" }).observe(byId("tree-card")); // not the canvas, which is hidden at times
    byId("colour").addEventListener("change", () => this.recolour());
    byId("zoom-in").addEventListener("click", () => this.view.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.view.zoom(2));
    byId("fit").addEventListener("click", () => this.view.fit());
    byId("fit-node").addEventListener("click", () => this.view.fitNode(this.view.selected));
    byId("tree-table").addEventListener("toggle", () => this.showTable());
    this.listen(canvas);
  }

  get tree() { return this.view.tree; }

  /** Loads the tree now, and again as often as the server proposes while the panel is seen. */
  async load() {
    clearTimeout(this.timer);
    const asked = ++this.asked;
    let wait = 5;
    if (!document.hidden && this.isSeen) {
      try {
        const seen = this.serial == null ? "" : `&seen=${this.serial}`;
        const response = await ask(`dashboard/tree?model=${encodeURIComponent(this.model())}${seen}`);
        const serial = response.headers.get("X-Serial");
        if (asked !== this.asked) return;
        if (serial == null) this.clear();
        else if (response.status !== 204) {
          const tree = decode(await response.arrayBuffer());
          if (asked !== this.asked) return;
          this.serial = serial;
          this.show(tree);
        }
        wait = Number(response.headers.get("X-Next-S")) || 5;
      } catch { /* the feed's status says that the server is away */ }
    }
    this.timer = setTimeout(() => this.load(), wait * 1000);
  }

  stop() {
    this.asked += 1;
    clearTimeout(this.timer);
  }

  /** Shows no tree until another one comes: that of another model, or of one that is loaded again. */
  clear() {
    this.serial = null;
    this.view.tree = null;
    this.view.selected = this.view.hovered = -1;
    this.described = -1;
    delete this.canvas.dataset.nodes;
    this.view.redraw();
    byId("tree-count").textContent = "";
    fill(byId("node"), el("p", { class: "hint" }, "Point at a node, or move with the arrow keys."));
    fill(/** @type {HTMLElement} */ (byId("tree-table").querySelector(".scroll")));
  }

  /** @param {Tree} tree */
  show(tree) {
    const number = this.tree && this.view.selected >= 0 ? this.tree.number[this.view.selected] : -1;
    this.view.selected = number < 0 ? -1 : rowOf(tree, number);
    this.canvas.dataset.nodes = String(tree.size);
    const all = tree.tops.reduce((sum, node) => sum + tree.total[node], 0);
    byId("tree-count").textContent = `${count(tree.size)} nodes · ${bytes(all)}${tree.head.truncated ? " · only a part is shown" : ""}`;
    this.canvas.setAttribute("aria-label", `Prefix tree with ${count(tree.size)} nodes and ${bytes(all)}`);
    byId("tree-empty").hidden = tree.size > 0;
    this.view.show(tree);
    this.recolour();
    this.showTable();
  }

  recolour() {
    const tree = this.tree;
    if (!tree) return;
    const style = (/** @type {string} */ name) => resolved(name);
    this.view.look = { page: style("--page"), line: style("--line"), text: style("--text"), select: style("--select"), dot: style("--text") };
    const isDark = luminance(style("--page")) < 0.4;
    const by = /** @type {HTMLSelectElement} */ (byId("colour")).value;
    const of = new Uint8Array(tree.size);
    if (by === "age") {
      const from = rgb(style("--memory")), to = rgb(style("--old"));
      this.view.palette = AGES.map((_, k) => mixed(from, to, k / (AGES.length - 1), isDark ? 0.9 : 0.82));
      for (let i = 0; i < tree.size; i++) {
        if (tree.flags[i] & LIVE) continue;
        let k = 0;
        while (tree.idle[i] > AGES[k][0]) k += 1;
        of[i] = k;
      }
      legend(byId("tree-legend"), AGES.map(([, name], k) => [this.view.palette[k], k && k < AGES.length - 1 ? `≤ ${name}` : String(k ? name : `used ≤ ${name} ago`)]));
    } else {
      const groups = by === "session" ? tree.session : tree.root;
      const seen = new Map();
      for (let i = 0; i < tree.size; i++) {
        if (!seen.has(groups[i])) seen.set(groups[i], seen.size % HUES.length);
        of[i] = seen.get(groups[i]);
      }
      this.view.palette = HUES.map((hue) => isDark ? `hsl(${hue} 38% 38%)` : `hsl(${hue} 46% 74%)`);
      const nameOf = (/** @type {number} */ group) => by === "session" ? (group ? `session ${group}` : "several sessions, or none") : short(tenantName(tree.head.roots[group]));
      legend(byId("tree-legend"), [...seen].slice(0, 8).map(([group, k]) => [this.view.palette[k], nameOf(group)]));
    }
    this.view.colourOf = of;
    this.view.inks = this.view.palette.map((colour) => inkOn(colour));
    this.view.redraw();
  }

  /** The words on a node, the longest first. @param {number} node */
  labels(node) {
    const tree = /** @type {Tree} */ (this.tree), tokens = count(tree.end[node] - tree.start[node]);
    return [`${tokens} tokens · ${bytes(tree.total[node])}`, `${tokens} tokens`];
  }

  // ------------------------------------------------------------------------------------------- pointer and keys

  /** @param {HTMLCanvasElement} canvas */
  listen(canvas) {
    const view = this.view;
    /** @type {Map<number, PointerEvent>} */
    const down = new Map();
    let moved = 0, hover = 0;
    canvas.addEventListener("pointerdown", (event) => { down.set(event.pointerId, event); moved = 0; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      const last = down.get(event.pointerId);
      if (!last) {
        const node = view.pick(event);
        if (node !== view.hovered) {
          view.hovered = node;
          view.redraw();
          clearTimeout(hover);
          if (node >= 0) hover = setTimeout(() => this.describe(node), 90);
        }
        return;
      }
      const others = [...down.values()].filter((other) => other.pointerId !== event.pointerId);
      if (others.length) {
        const [other] = others;
        const before = Math.hypot(last.clientX - other.clientX, last.clientY - other.clientY), after = Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY);
        if (before > 8 && after > 8) view.zoom(before / after);
      } else {
        view.pan((last.clientX - event.clientX) / canvas.clientWidth, (last.clientY - event.clientY) / canvas.clientHeight);
      }
      moved += Math.abs(event.clientX - last.clientX) + Math.abs(event.clientY - last.clientY);
      down.set(event.pointerId, event);
    });
    const up = (/** @type {PointerEvent} */ event) => {
      if (down.delete(event.pointerId) && moved < 5 && event.type === "pointerup") this.select(view.pick(event));
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => { clearTimeout(hover); view.hovered = -1; view.redraw(); if (view.selected >= 0) this.describe(view.selected); });
    canvas.addEventListener("dblclick", (event) => view.fitNode(view.pick(event)));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const along = event.shiftKey, amount = event.deltaY || event.deltaX;
      view.zoom(1.0016 ** amount, along, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => { if (this.key(event)) event.preventDefault(); });
  }

  /** @param {KeyboardEvent} event @returns {boolean} whether the key was used */
  key(event) {
    const tree = this.tree, view = this.view;
    if (!tree?.size || event.ctrlKey || event.metaKey || event.altKey) return false;
    const node = view.selected;
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      view.pan(event.key === "ArrowRight" ? 0.1 : event.key === "ArrowLeft" ? -0.1 : 0, event.key === "ArrowDown" ? 0.1 : event.key === "ArrowUp" ? -0.1 : 0);
      return true;
    }
    const beside = (/** @type {number} */ by) => {
      const all = siblings(tree, node);
      return all[Math.min(all.length - 1, Math.max(0, all.indexOf(node) + by))];
    };
    switch (event.key) {
      case "ArrowUp": this.select(node < 0 ? tree.tops[0] : tree.parent[node] < 0 ? node : tree.parent[node]); break;
      case "ArrowDown": this.select(node < 0 ? tree.tops[0] : tree.first[node] < tree.first[node + 1] ? this.largestBelow(node) : node); break;
      case "ArrowLeft": this.select(node < 0 ? tree.tops[0] : beside(-1)); break;
      case "ArrowRight": this.select(node < 0 ? tree.tops[0] : beside(1)); break;
      case "Enter": view.fitNode(node); break;
      case "+": case "=": view.zoom(0.5); break;
      case "-": view.zoom(2); break;
      case "Home": case "0": view.fit(); break;
      default: return false;
    }
    return true;
  }

  /** @param {number} node */
  largestBelow(node) {
    const tree = /** @type {Tree} */ (this.tree);
    return tree.children.subarray(tree.first[node], tree.first[node + 1]).reduce((a, b) => (tree.total[b] > tree.total[a] ? b : a));
  }

  /** @param {number} node */
  select(node) {
    this.view.selected = node;
    this.view.redraw();
    if (node < 0) { fill(byId("node"), el("p", { class: "hint" }, "No node is selected.")); return; }
    this.view.reveal(node);
    this.describe(node);
    const tree = /** @type {Tree} */ (this.tree), all = siblings(tree, node);
    const below = tree.first[node + 1] - tree.first[node];
    byId("tree-live").textContent = `Branch ${all.indexOf(node) + 1} of ${all.length}, tokens ${count(tree.start[node])} to ${count(tree.end[node])}, ${bytes(tree.total[node])}, ${below ? `${below} below` : "a leaf"}, used ${duration(tree.idle[node])} ago.`;
  }

  // ------------------------------------------------------------------------------------------------ detail

  /** @param {number} node */
  async describe(node) {
    const tree = /** @type {Tree} */ (this.tree), number = tree.number[node];
    this.described = number;
    let detail;
    try {
      detail = await body(ask(`dashboard/tree/${number}?model=${encodeURIComponent(this.model())}`));
    } catch (error) {
      if (this.described === number) fill(byId("node"), el("p", { class: "hint" }, /** @type {Error} */ (error).message));
      return;
    }
    if (this.described !== number) return;
    if (detail.gone) { fill(byId("node"), el("p", { class: "hint" }, detail.message)); return; }
    const row = (/** @type {string} */ name, /** @type {string|number} */ value) => [el("dt", {}, name), el("dd", {}, value)];
    const rows = [
      ...row("tokens", `${count(detail.start)} – ${count(detail.end)}`), ...row("memory", bytes(detail.bytes)),
      ...row("with branches", bytes(tree.total[node])), ...row("tenant", tenantName(detail)), ...row("last used", `${duration(detail.idle_s)} ago`),
      ...row("hits", count(detail.hits)), ...row("running requests", count(detail.leases)), ...row("branches", count(detail.children)),
    ];
    const parts = [el("dl", {}, ...rows)];
    if (detail.checkpoints.length) {
      parts.push(el("h3", {}, "Checkpoints"), table([["at", "n"], ["kind"], ["memory", "n"], ["hits", "n"]], detail.checkpoints.slice(-12).map(
        (/** @type {any} */ each) => el("tr", {}, el("td", { class: "n" }, count(each.position)), el("td", {}, each.kind), el("td", { class: "n" }, bytes(each.bytes)), el("td", { class: "n" }, count(each.hits))),
      ), "Checkpoints of the node"));
    }
    const more = detail.tail.length ? " … " : "";
    if (detail.text != null) parts.push(el("h3", {}, "Text"), el("p", { class: "tokens mono", tabindex: "0", role: "group", "aria-label": "Text of the node" }, detail.text + more + (detail.tail_text ?? "")));
    if (detail.withheld) parts.push(el("p", { class: "hint" }, "Token ids are shown to a key of the tenant, and to the operator."));
    else parts.push(el("h3", {}, "Token ids"), el("p", { class: "tokens mono", tabindex: "0", role: "group", "aria-label": "Token ids of the node" }, detail.head.join(" ") + more + detail.tail.join(" ")));
    const buttons = this.actions(detail);
    if (buttons.length) parts.push(el("div", { class: "actions" }, ...buttons));
    fill(byId("node"), ...parts);
  }

  showTable() {
    const tree = this.tree, box = /** @type {HTMLDetailsElement} */ (byId("tree-table"));
    if (!box.open || !tree) return;
    const nodes = Array.from({ length: tree.size }, (_, i) => i);
    nodes.sort((a, b) => tree.total[b] - tree.total[a]);
    const rows = nodes.slice(0, TABLE_ROWS).map((node) => el("tr", {},
      el("td", {}, el("button", { type: "button", class: "stop", onclick: () => { this.select(node); this.view.fitNode(node); } }, `${count(tree.start[node])} – ${count(tree.end[node])}`)),
      el("td", { class: "n" }, bytes(tree.total[node])), el("td", { class: "n below" }, tree.first[node + 1] - tree.first[node]),
      el("td", { class: "wraps of" }, short(tenantName(tree.head.roots[tree.root[node]]))), el("td", { class: "n" }, `${duration(tree.idle[node])} ago`)));
    fill(/** @type {HTMLElement} */ (box.querySelector(".scroll")), table([["tokens"], ["memory", "n"], ["branches", "n"], ["tenant"], ["used", "n"]], rows, "The largest branches of the prefix tree", "branches"));
  }
}

/** A colour of the style sheet as the browser resolves it for the theme. @param {string} name */
function resolved(name) {
  const probe = el("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

const rgb = (/** @type {string} */ colour) => (colour.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
const luminance = (/** @type {string} */ colour) => { const [r, g, b] = rgb(colour); return (0.3 * r + 0.59 * g + 0.11 * b) / 255; };
/** The ink that is read best on a colour. @param {string} colour */
function inkOn(colour) {
  const probe = el("i");
  probe.style.color = colour;
  document.body.append(probe);
  const linear = rgb(getComputedStyle(probe).color).map((part) => part / 255).map((part) => part <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  probe.remove();
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#0b120e" : "#ffffff"; // equal contrast to both
}

/** @param {number[]} from @param {number[]} to @param {number} share @param {number} strength */
const mixed = (from, to, share, strength) => `rgb(${from.map((value, k) => Math.round(to[k] + (value - to[k]) * (1 - share) * strength)).join(", ")})`;
