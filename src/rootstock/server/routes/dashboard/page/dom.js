/** Small helpers for the page's elements. Text always goes in as text: nothing is parsed as HTML. */

/** @param {string} id @returns {HTMLElement} */
export const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * Makes an element. Properties that begin with "on" are listeners; `class`, `role`, `aria-…` are attributes.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Node|string|number|null|undefined)} children
 * @returns {HTMLElement}
 */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  for (const child of children) if (child != null) made.append(child instanceof Node ? child : String(child));
  return made;
}

/** @param {HTMLElement} parent @param {...Node} children */
export const fill = (parent, ...children) => parent.replaceChildren(...children);

/**
 * A table with a head. One with a class of its own may be laid out as blocks on a narrow screen: roles keep it a table for
 * screen readers. @param {[string, string?][]} head @param {HTMLElement[]} rows @param {string} caption @param {string} [kind]
 */
export function table(head, rows, caption, kind) {
  const cells = head.map(([text, kind]) => el("th", { scope: "col", class: kind }, text));
  const made = el("table", { class: kind }, el("caption", { class: "sr" }, caption), el("thead", {}, el("tr", {}, ...cells)), el("tbody", {}, ...rows));
  if (kind) {
    const roles = [["thead, tbody", "rowgroup"], ["tr", "row"], ["th", "columnheader"], ["td", "cell"]];
    made.setAttribute("role", "table");
    for (const [where, role] of roles) for (const one of made.querySelectorAll(where)) one.setAttribute("role", role);
  }
  return made;
}

/** A legend of colours. @param {HTMLElement} list @param {[string, string][]} entries class or colour, and name */
export function legend(list, entries) {
  fill(list, ...entries.map(([look, name]) => {
    const key = el("i", look.startsWith("rgb") || look.startsWith("hsl") ? {} : { class: look });
    if (!key.className) key.style.background = look;
    return el("li", {}, key, name);
  }));
}

let timer = 0;
/** Shows a short message. @param {string} text */
export function toast(text) {
  byId("toast").textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => { byId("toast").textContent = ""; }, 6000);
}

/**
 * Asks before something is changed. @param {string} title @param {string} text @param {string} action
 * @returns {Promise<boolean>}
 */
export function confirmed(title, text, action) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("confirm"));
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = action;
  return new Promise((resolve) => {
    const end = (/** @type {boolean} */ answer) => { dialog.close(); resolve(answer); };
    byId("confirm-yes").onclick = () => end(true);
    byId("confirm-no").onclick = () => end(false);
    dialog.oncancel = () => resolve(false);
    dialog.showModal();
    byId("confirm-no").focus();
  });
}
