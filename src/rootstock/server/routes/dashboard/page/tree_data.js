/** The prefix tree as columns: decoded from the server's bytes, and laid out once. */

export const LIVE = 1, CHECKPOINT = 2;
const GAP = 0.006; // of the width, between two namespaces

/**
 * @typedef {object} Tree
 * @property {any} head
 * @property {number} size
 * @property {Uint32Array} number  @property {Int32Array} parent  @property {Int32Array} start  @property {Int32Array} end
 * @property {Float32Array} bytes  @property {Float32Array} idle  @property {Uint16Array} root  @property {Uint8Array} flags
 * @property {Uint32Array} session  0: several, or none
 * @property {Float64Array} total  bytes of a node and of all below it
 * @property {Int32Array} deepest  the largest end of a node and of all below it
 * @property {Float64Array} x0  @property {Float64Array} x1  from 0 to 1
 * @property {Int32Array} first  places of a node's children in `children`: first[i] … first[i + 1] - 1
 * @property {Int32Array} children
 * @property {Int32Array} tops  the nodes that begin their namespaces
 * @property {number} depth  the largest end of all
 */

/** @param {ArrayBuffer} buffer @returns {Tree} */
export function decode(buffer) {
  const headBytes = Number(new DataView(buffer).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headBytes)));
  const kinds = { Uint32: Uint32Array, Int32: Int32Array, Float32: Float32Array, Uint16: Uint16Array, Uint8: Uint8Array };
  let at = padded(8 + headBytes);
  /** @type {any} */
  const tree = { head, size: head.nodes };
  for (const [name, kind] of head.columns) {
    tree[name] = new kinds[/** @type {"Int32"} */ (kind)](buffer, at, head.nodes);
    at = padded(at + tree[name].byteLength);
  }
  return laidOut(tree);
}

const padded = (/** @type {number} */ at) => Math.ceil(at / 8) * 8;

/** Gives each node a place: its width is the memory of its branch, and children lie within their parent's width. */
function laidOut(/** @type {Tree} */ tree) {
  const { size, parent, number, end } = tree;
  const total = tree.total = Float64Array.from(tree.bytes);
  const deepest = tree.deepest = Int32Array.from(end);
  let sum = 0;
  for (let i = 0; i < size; i++) sum += tree.bytes[i];
  const least = sum > 0 ? (sum / size) * 0.02 : 1; // a node without bytes of its own can still be seen
  const counts = new Int32Array(size + 1);
  let tops = 0;
  for (let i = size - 1; i >= 0; i--) {
    total[i] += least;
    const above = parent[i];
    if (above < 0) { tops += 1; continue; }
    total[above] += total[i];
    if (deepest[i] > deepest[above]) deepest[above] = deepest[i];
    counts[above] += 1;
  }
  const first = tree.first = new Int32Array(size + 1);
  for (let i = 0; i < size; i++) first[i + 1] = first[i] + counts[i];
  // By number, which is the order in which nodes were first seen: branches keep their places in the next picture.
  const order = new Float64Array(size);
  for (let i = 0; i < size; i++) order[i] = number[i] * 2 ** 20 + i;
  order.sort();
  tree.children = new Int32Array(size - tops);
  tree.tops = new Int32Array(tops);
  const place = first.slice();
  let top = 0;
  for (let k = 0; k < size; k++) {
    const i = order[k] % 2 ** 20;
    if (parent[i] < 0) tree.tops[top++] = i;
    else tree.children[place[parent[i]]++] = i;
  }
  placed(tree);
  tree.depth = 1;
  for (const i of tree.tops) tree.depth = Math.max(tree.depth, deepest[i]);
  return tree;
}

/** @param {Tree} tree */
function placed(tree) {
  const { size, total, root, tops, first, children } = tree;
  const x0 = tree.x0 = new Float64Array(size), x1 = tree.x1 = new Float64Array(size);
  tops.sort((a, b) => root[a] - root[b]);
  let all = 0, groups = 0;
  for (let k = 0; k < tops.length; k++) {
    all += total[tops[k]];
    if (k && root[tops[k]] !== root[tops[k - 1]]) groups += 1;
  }
  const gap = groups ? Math.min(GAP, 0.2 / groups) : 0;
  const scale = all > 0 ? (1 - gap * groups) / all : 0;
  let x = 0;
  for (let k = 0; k < tops.length; k++) {
    const i = tops[k];
    if (k && root[i] !== root[tops[k - 1]]) x += gap;
    x0[i] = x;
    x1[i] = x += total[i] * scale;
  }
  // Rows of parents come before those of their children.
  const by = new Int32Array(size);
  let count = 0;
  for (const i of tops) by[count++] = i;
  for (let k = 0; k < count; k++) {
    const i = by[k];
    let below = 0;
    for (let c = first[i]; c < first[i + 1]; c++) below += total[children[c]];
    let at = (x0[i] + x1[i] - below * scale) / 2; // the node's own memory is the margin on both sides
    for (let c = first[i]; c < first[i + 1]; c++) {
      const child = children[c];
      x0[child] = at;
      x1[child] = at += total[child] * scale;
      by[count++] = child;
    }
  }
}

/**
 * Finds the first of some nodes, which lie side by side, that ends at `x` or behind it.
 * @param {Tree} tree @param {Int32Array} nodes @param {number} from @param {number} to @param {number} x
 */
export function firstAt(tree, nodes, from, to, x) {
  let low = from, high = to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tree.x1[nodes[middle]] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The node at a place; -1: none. @param {Tree} tree @param {number} x @param {number} y in tokens */
export function nodeAt(tree, x, y) {
  let nodes = tree.tops, from = 0, to = tree.tops.length;
  for (;;) {
    const place = firstAt(tree, nodes, from, to, x);
    if (place >= to) return -1;
    const node = nodes[place];
    if (tree.x0[node] > x || y < tree.start[node]) return -1;
    if (y < tree.end[node]) return node;
    nodes = tree.children; from = tree.first[node]; to = tree.first[node + 1];
  }
}

/** The row of a node's number; -1: it is not here. @param {Tree} tree @param {number} number */
export const rowOf = (tree, number) => tree.number.indexOf(number);

/** The siblings of a node, itself included. @param {Tree} tree @param {number} node */
export function siblings(tree, node) {
  const above = tree.parent[node];
  return above < 0 ? tree.tops : tree.children.subarray(tree.first[above], tree.first[above + 1]);
}
