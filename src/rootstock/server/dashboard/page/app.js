/** The page: its session, the models, the theme, and the panels that the feed fills. */

import { ServerError, ask, post, useToken } from "./api.js";
import { Chat } from "./chat.js";
import { byId, confirmed, el, fill, toast } from "./dom.js";
import { Feed } from "./feed.js";
import { count } from "./format.js";
import { showMisses, showVolatile } from "./misses.js";
import { showMemory, showRates } from "./overview.js";
import { Pins } from "./pins.js";
import { Requests } from "./requests.js";
import { TreePanel } from "./tree_panel.js";

const models = /** @type {HTMLSelectElement} */ (byId("model"));
const theme = /** @type {HTMLSelectElement} */ (byId("theme"));
/** @type {any} */
let session = {};
/** @type {any} */
let latest = { sections: {} };

const model = () => models.value;
const requests = new Requests(model);
const pins = new Pins(model, () => tree.load());
const tree = new TreePanel(model, (node) => pins.buttons(node));
new Chat(model, () => latest.sections.requests ?? {});

const feed = new Feed((state, changed) => {
  latest = state;
  const { sections } = state;
  if (changed.has("health")) status(sections.health.alive ? "ok" : "bad", sections.health.alive ? "live" : sections.health.detail);
  if (changed.has("pool") || (changed.has("health") && session.sees !== "all")) showMemory(sections.pool);
  if (changed.has("rates")) showRates(sections.rates);
  if (changed.has("requests")) requests.show(state);
  if (changed.has("misses")) showMisses(state);
  if (changed.has("volatile")) showVolatile(sections.volatile);
}, (kind) => {
  if (kind === "lost") status("bad", "the server is away: connecting again");
  if (kind === "full") status("bad", "too many pages watch this server: trying again");
  if (kind === "gone") status("bad", "the model is not loaded now: a request loads it");
}, begin);

/** @param {"ok"|"bad"} kind @param {string} text */
function status(kind, text) {
  byId("status").className = kind;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
}

/** Asks for the session, and shows the panels or the login. @returns {Promise<boolean>} whether there is a session */
async function begin() {
  const told = await (await ask("dashboard/session")).json();
  useSession(told);
  return !told.login;
}

/** @param {any} told */
function useSession(told) {
  const wasOut = byId("panels").hidden;
  session = told;
  useToken(told.csrf);
  byId("version").textContent = told.version ?? "";
  byId("login").hidden = !told.login;
  byId("panels").hidden = told.login;
  byId("logout").hidden = !told.csrf;
  if (told.login) {
    feed.close();
    tree.stop();
    status("bad", "not logged in");
    byId("key").focus();
    return;
  }
  const before = models.value;
  fill(models, ...told.models.map((/** @type {string} */ name) => el("option", { value: name }, name)));
  if (told.models.includes(before)) models.value = before;
  const notes = { all: "", tenant: `You see the prefixes and requests of ${told.tenant}.`, nothing: "This key is bound to no tenant: it shows no prefixes or requests. The operator's key shows all." };
  const note = notes[/** @type {"all"} */ (told.sees)];
  byId("note").textContent = note;
  byId("note").hidden = !note;
  /** @type {HTMLButtonElement} */ (byId("clear")).disabled = told.sees === "nothing";
  if (!told.models.length) {
    feed.close();
    tree.stop();
    status("bad", "no model is loaded: a request loads one");
  } else if (wasOut || before !== models.value) {
    watch();
  }
}

function watch() {
  tree.serial = null;
  feed.open(model());
  tree.load();
  pins.load(session.sees !== "nothing");
}

models.addEventListener("change", watch);

byId("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const box = /** @type {HTMLInputElement} */ (byId("key"));
  byId("login-error").textContent = "";
  try {
    await post("dashboard/login", undefined, box.value.trim());
    await begin();
    byId("main").focus({ preventScroll: true });
  } catch (error) {
    const failed = /** @type {ServerError} */ (error);
    byId("login-error").textContent = failed.status === 401 ? "The server does not know this key." : failed.message;
  } finally {
    box.value = "";
  }
});

byId("logout").addEventListener("click", async () => {
  await post("dashboard/logout").catch(() => undefined);
  latest = { sections: {} };
  location.reload();
});

byId("clear").addEventListener("click", async () => {
  const whose = session.sees === "all" ? "all cached prefixes of all tenants and models, in memory and in the tiers" : `the cached prefixes of ${session.tenant}`;
  if (!(await confirmed("Clear the cache?", `This removes ${whose}, as far as no running request uses them. Later prompts are computed again.`, "Clear"))) return;
  try {
    const cleared = await (await post("v1/cache/clear", {})).json();
    toast(`${count(cleared.blocks)} blocks are free again.`);
    tree.load();
  } catch (error) {
    toast(/** @type {Error} */ (error).message);
  }
});

theme.value = localStorage.getItem("rootstock-theme") ?? "auto";
function useTheme() {
  localStorage.setItem("rootstock-theme", theme.value);
  if (theme.value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  tree.recolour();
}
theme.addEventListener("change", useTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => tree.recolour());
useTheme();
document.addEventListener("visibilitychange", () => {
  if (document.hidden) feed.close();
  else if (session.models?.length) { feed.open(model()); tree.load(); }
});

// Models are loaded and unloaded while the page is open.
setInterval(() => { if (!document.hidden && session.models) begin().catch(() => undefined); }, 20_000);

begin().catch(() => { status("bad", "the server is away: reload the page"); setTimeout(() => location.reload(), 5000); });
