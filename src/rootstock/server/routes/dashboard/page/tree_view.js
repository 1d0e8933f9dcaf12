/** The drawing of the prefix tree on a canvas: what is not seen, and what is thinner than a pixel, is not drawn. */

import { CHECKPOINT, LIVE, firstAt, nodeAt } from "./tree_data.js";

/** @typedef {import("./tree_data.js").Tree} Tree */
/** @typedef {{x: number, y: number, w: number, h: number}} Window the visible part: x from 0 to 1, y in tokens */

const THIN = 0.8; // pixels: a branch that is thinner is one column
const CLOSEST = 1e-9;
const LABEL = 60; // pixels of the narrowest node with words on it
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class TreeView {
  /** @param {HTMLCanvasElement} canvas @param {(node: number) => string[]} labels words, the longest first */
  constructor(canvas, labels) {
    this.canvas = canvas;
    this.labels = labels;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { alpha: false }));
    /** @type {Tree|null} */
    this.tree = null;
    /** @type {Window} */
    this.window = { x: 0, y: 0, w: 1, h: 1 };
    this.selected = -1;
    this.hovered = -1;
    /** @type {Uint8Array} */
    this.colourOf = new Uint8Array(0);
    /** @type {string[]} */
    this.palette = ["#888"];
    this.inks = ["#000"]; // of the words on each colour
    this.look = { page: "#fff", line: "#000", text: "#000", select: "#f00", dot: "#000" };
    this.frame = 0;
    this.flight = 0;
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  /** @param {Tree} tree */
  show(tree) {
    const before = this.tree;
    this.tree = tree;
    this.hovered = -1;
    if (!before?.size) this.window = { x: 0, y: 0, w: 1, h: tree.depth };
    else if (this.window.w === 1) this.window.h = tree.depth; // all was shown, and is shown again
    this.redraw();
  }

  redraw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const { canvas, context, tree, window: view } = this;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    context.fillStyle = this.look.page;
    context.fillRect(0, 0, width, height);
    if (!tree?.size) return;
    const sx = width / view.w, sy = height / view.h, edge = ratio;
    const right = view.x + view.w, bottom = view.y + view.h;
    const { x0, x1, start, end, deepest, first, children, flags } = tree;
    /** @type {number[][]} */
    const boxes = this.palette.map(() => []);
    /** @type {number[]} */
    const wide = [];
    const drawnTo = new Float32Array(width + 1).fill(-1); // the lowest pixel of thin branches, by column
    /** @type {[Int32Array, number, number][]} */
    const stack = [[tree.tops, 0, tree.tops.length]];
    let next;
    while ((next = stack.pop())) {
      const [nodes, from, to] = next;
      for (let k = firstAt(tree, nodes, from, to, view.x); k < to; k++) {
        const node = nodes[k];
        if (x0[node] > right) break;
        if (start[node] > bottom || deepest[node] < view.y) continue;
        const left = (x0[node] - view.x) * sx, w = (x1[node] - x0[node]) * sx;
        const top = (start[node] - view.y) * sy;
        if (w < THIN) {
          const column = Math.max(0, Math.min(width, left | 0)), low = (deepest[node] - view.y) * sy;
          if (low > drawnTo[column]) {
            boxes[this.colourOf[node]].push(column, top, 1, low - top);
            drawnTo[column] = low;
          }
          continue;
        }
        if (end[node] >= view.y) {
          const gap = w > 5 * edge ? edge : w > 2.5 ? 0.5 : 0, h = Math.max(1, (end[node] - start[node]) * sy - (gap ? edge : 0));
          boxes[this.colourOf[node]].push(left + gap / 2, top, w - gap, h);
          if (w > 5) wide.push(node);
        }
        if (first[node] < first[node + 1]) stack.push([children, first[node], first[node + 1]]);
      }
    }
    boxes.forEach((of, colour) => {
      context.fillStyle = this.palette[colour];
      for (let i = 0; i < of.length; i += 4) context.fillRect(of[i], of[i + 1], of[i + 2], of[i + 3]);
    });
    this.drawMarks(wide, flags, sx, sy, ratio, width);
    this.canvas.dataset.drawn = String(boxes.reduce((sum, of) => sum + of.length / 4, 0));
  }

  /** @param {number[]} wide @param {Uint8Array} flags @param {number} sx @param {number} sy @param {number} ratio @param {number} width */
  drawMarks(wide, flags, sx, sy, ratio, width) {
    const tree = /** @type {Tree} */ (this.tree), { context, window: view } = this;
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "top";
    for (const node of wide) {
      const left = (tree.x0[node] - view.x) * sx, w = (tree.x1[node] - tree.x0[node]) * sx;
      const top = (tree.start[node] - view.y) * sy, h = (tree.end[node] - tree.start[node]) * sy;
      if (flags[node] & LIVE) {
        context.fillStyle = this.look.select;
        context.fillRect(Math.max(0, left), top, Math.min(3 * ratio, w / 3), h);
      }
      if (flags[node] & CHECKPOINT && w > 7 * ratio) {
        context.fillStyle = this.look.dot;
        context.beginPath();
        context.arc(left + w / 2, top + h - 4 * ratio, Math.min(3.2 * ratio, w / 4), 0, 7);
        context.fill();
      }
      const from = Math.max(0, left), room = Math.min(width, left + w) - from;
      if (room > LABEL * ratio && h > 16 * ratio && top + 16 * ratio > 0) {
        const label = this.labels(node).find((words) => context.measureText(words).width <= room - 12 * ratio);
        context.fillStyle = this.inks[this.colourOf[node]];
        if (label) context.fillText(label, from + 6 * ratio, Math.max(top, 0) + 3 * ratio);
      }
    }
    for (const [node, line] of /** @type {[number, number][]} */ ([[this.hovered, 1], [this.selected, 2]])) {
      if (node < 0) continue;
      context.strokeStyle = this.look.select;
      context.lineWidth = line * ratio;
      const w = Math.max(2, (tree.x1[node] - tree.x0[node]) * sx);
      context.strokeRect((tree.x0[node] - view.x) * sx, (tree.start[node] - view.y) * sy, w, Math.max(2, (tree.end[node] - tree.start[node]) * sy));
    }
  }

  /** The node under a place of the page; -1: none. @param {{clientX: number, clientY: number}} event */
  pick(event) {
    if (!this.tree) return -1;
    const box = this.canvas.getBoundingClientRect(), view = this.window;
    return nodeAt(this.tree, view.x + ((event.clientX - box.left) / box.width) * view.w, view.y + ((event.clientY - box.top) / box.height) * view.h);
  }

  /** Zooms around a place, given as shares of the canvas. @param {number} factor @param {boolean} along the tokens */
  zoom(factor, along = false, atX = 0.5, atY = 0.5) {
    const view = this.window;
    if (along) this.move({ ...view, y: view.y + view.h * atY * (1 - factor), h: view.h * factor });
    else this.move({ ...view, x: view.x + view.w * atX * (1 - factor), w: view.w * factor });
  }

  /** @param {number} dx @param {number} dy shares of the canvas */
  pan(dx, dy) {
    const view = this.window;
    this.move({ ...view, x: view.x + dx * view.w, y: view.y + dy * view.h });
  }

  /** @param {Window} to */
  move(to) {
    const depth = this.tree?.depth ?? 1;
    const w = Math.min(1, Math.max(CLOSEST, to.w)), h = Math.min(depth, Math.max(4, to.h));
    this.window = { w, h, x: Math.min(1 - w, Math.max(0, to.x)), y: Math.min(depth - h, Math.max(0, to.y)) };
    this.redraw();
  }

  fit() {
    this.fly({ x: 0, y: 0, w: 1, h: this.tree?.depth ?? 1 });
  }

  /** Zooms to the branch of a node. @param {number} node */
  fitNode(node) {
    const tree = this.tree;
    if (!tree || node < 0) return;
    const w = (tree.x1[node] - tree.x0[node]) * 1.1, h = (tree.deepest[node] - tree.start[node]) * 1.08;
    this.fly({ x: tree.x0[node] - w * 0.045, y: tree.start[node] - h * 0.03, w, h });
  }

  /** Brings a node into the visible part if it is outside, or too thin. @param {number} node */
  reveal(node) {
    const tree = this.tree, view = this.window;
    if (!tree || node < 0) return;
    const w = tree.x1[node] - tree.x0[node], middle = tree.x0[node] + w / 2;
    const isIn = middle > view.x && middle < view.x + view.w && tree.end[node] > view.y && tree.start[node] < view.y + view.h;
    if (!isIn || (w / view.w) * this.canvas.clientWidth < 3) {
      const target = Math.max(w * 8, Math.min(view.w, w * this.canvas.clientWidth / 6));
      const h = Math.max(view.h, tree.end[node] - tree.start[node]);
      this.fly({ x: middle - target / 2, y: isIn ? view.y : tree.start[node] - h / 4, w: target, h });
    }
  }

  /** @param {Window} to */
  fly(to) {
    const flight = ++this.flight, from = this.window, began = performance.now();
    if (still.matches || document.hidden) { this.move(to); return; }
    const step = () => {
      if (flight !== this.flight) return;
      const t = Math.min(1, (performance.now() - began) / 260), eased = t * (2 - t);
      const w = from.w * (to.w / from.w) ** eased; // a zoom by equal factors looks even
      const share = to.w === from.w ? eased : (w - from.w) / (to.w - from.w);
      this.move({ w, x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * eased, h: from.h + (to.h - from.h) * eased });
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }
}
