// Judges a page as it is drawn: an expression that gives a list of what is wrong with it (screens.py).
(() => {
  const found = [], root = document.documentElement;
  const name = (node) => {
    const words = (node.innerText ?? "").trim().slice(0, 24).replace(/\s+/g, " ");
    return `${node.tagName.toLowerCase()}${node.id ? "#" + node.id : ""}${[...node.classList].map((each) => "." + each).join("")}${words ? ` "${words}"` : ""}`;
  };
  const styles = new Map(), styleOf = (node) => { if (!styles.has(node)) styles.set(node, getComputedStyle(node)); return styles.get(node); };
  const boxOf = (node) => node.getBoundingClientRect();
  const isSeen = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest(".sr, .skip, thead") && boxOf(node).width > 0;
  const scrolls = (node) => /auto|scroll/.test(styleOf(node).overflowY);
  const add = (problem, node) => found.push(`${problem}: ${name(node)}`);
  const seen = [...document.body.querySelectorAll("*")].filter(isSeen);

  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} px wide on a screen of ${root.clientWidth} px`);
  for (const node of seen) {
    const box = boxOf(node), style = styleOf(node);
    if (box.right > root.clientWidth + 0.5 || box.left < -0.5) add("outside of the screen", node);
    const card = node.closest(".card");
    if (card && card !== node) {
      const outer = boxOf(card);
      if (box.right > outer.right + 0.5 || box.left < outer.left - 0.5) add("outside of its panel on a side", node);
      let above = node.parentElement, hidden = false;
      for (; above && above !== card; above = above.parentElement) if (scrolls(above) || styleOf(above).overflow === "hidden") hidden = true;
      if (!hidden && (box.bottom > outer.bottom + 0.5 || box.top < outer.top - 0.5)) add("above or below its panel", node);
    }
    // A bar is cut off on purpose; a list scrolls up and down.
    const bounds = /hidden|clip|auto|scroll/.test(style.overflowX) && !node.matches(".stack, .line, select, textarea, input, canvas");
    if (bounds && node.scrollWidth > node.clientWidth + 1) add(`its content is ${node.scrollWidth} px wide in ${node.clientWidth} px`, node);
    if (style.overflowY === "hidden" && !node.matches(".stack, .line, .canvas-box") && node.scrollHeight > node.clientHeight + 1) add("clipped below", node);
    if (node.matches("button, select, input, textarea, summary, a[href]") && (box.width < 24 || box.height < 24)) add(`${Math.round(box.width)} × ${Math.round(box.height)} px to press`, node);
    if (parseFloat(style.fontSize) < 11) add(`letters of ${style.fontSize}`, node);
  }

  // Lines of text that lie over each other. Of what scrolls, the visible part counts.
  const lines = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (!text.data.trim() || !isSeen(parent) || parent.closest("option, script, style, noscript")) continue;
    if (/undefined|NaN|\[object|null/.test(text.data)) add(`reads "${text.data.trim().slice(0, 40)}"`, parent);
    const range = document.createRange();
    range.selectNodeContents(text);
    const clips = [];
    for (let above = parent; above; above = above.parentElement) if (styleOf(above).overflow !== "visible") clips.push(boxOf(above));
    for (const box of range.getClientRects()) {
      const cut = clips.reduce((one, clip) => ({ left: Math.max(one.left, clip.left), right: Math.min(one.right, clip.right), top: Math.max(one.top, clip.top), bottom: Math.min(one.bottom, clip.bottom) }), box);
      if (cut.right - cut.left > 2 && cut.bottom - cut.top > 2) lines.push({ ...cut, left: cut.left, right: cut.right, top: cut.top, bottom: cut.bottom, parent, layer: parent.closest("#banner, #toast, dialog, th") ?? null });
    }
  }
  lines.sort((a, b) => a.top - b.top);
  for (let i = 0; i < lines.length; i++) for (let k = i + 1; k < lines.length && lines[k].top < lines[i].bottom - 3; k++) {
    const a = lines[i], b = lines[k];
    if (a.layer !== b.layer || a.parent === b.parent || a.parent.contains(b.parent) || b.parent.contains(a.parent)) continue;
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2) found.push(`text over text: ${name(a.parent)} and ${name(b.parent)}`);
  }

  // Panels: none over another one, none much narrower than its place, and no holes between them.
  const cards = [...document.querySelectorAll(".card, #note")].filter(isSeen), boxes = cards.map(boxOf);
  for (let i = 0; i < cards.length; i++) for (let k = 0; k < i; k++) {
    const a = boxes[i], b = boxes[k];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1) found.push(`panel over panel: ${name(cards[i])} and ${name(cards[k])}`);
  }
  const panels = document.getElementById("panels");
  if (panels && isSeen(panels)) {
    const whole = boxOf(panels), gap = 14;
    const filled = boxes.reduce((sum, box) => sum + (box.width + gap) * (box.height + gap), 0);
    const share = filled / ((whole.width + gap) * (whole.height + gap));
    if (share < 0.97) found.push(`panels fill ${Math.round(100 * share)} % of their space`);
    if (cards[0]?.id !== "note" && document.getElementById("note").checkVisibility()) found.push("the note is not the first");
  }
  const canvas = document.getElementById("tree");
  if (canvas && isSeen(panels) && !isSeen(canvas) && !panels.classList.contains("absent")) found.push("there is no canvas");
  if (canvas && isSeen(canvas)) {
    const card = boxOf(canvas.closest(".card")).width, least = root.clientWidth < 992 ? 0.88 : 0.6;
    const width = boxOf(canvas).width;
    if (width < least * card) found.push(`the canvas is ${Math.round(width)} px wide in a panel of ${Math.round(card)} px`);
  }
  return [...new Set(found)];
})()
