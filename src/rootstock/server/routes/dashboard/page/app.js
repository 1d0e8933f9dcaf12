/** The page: its session, the models, the theme, and the panels that the feed fills. */

import { ServerError, ask, post, useToken } from "./api.js";
import { Chat } from "./chat.js";
import { byId, confirmed, el, fill, toast } from "./dom.js";
import { Feed } from "./feed.js";
import { count } from "./format.js";
import { ageMisses, showMisses, showVolatile } from "./misses.js";
import { Models, hasCache } from "./models.js";
import { showMemory, showRates } from "./overview.js";
import { Pins } from "./pins.js";
import { Requests } from "./requests.js";
import { Sessions } from "./sessions.js";
import { TreePanel } from "./tree_panel.js";

const NOT_LOADED = "not loaded"; // the state of a model that has no figures now
const AGAIN_MS = 20_000; // between two looks at the login and the pins
const SESSIONS_MS = 5_000; // between two looks at the sessions of requests
const chosen = /** @type {HTMLSelectElement} */ (byId("model"));
const theme = /** @type {HTMLSelectElement} */ (byId("theme"));
/** @type {any} */
let session = {};
/** @type {any} */
let latest = { sections: {} };
let drains = false;

const model = () => chosen.value;
const requests = new Requests(model);
const pins = new Pins(model, () => tree.load());
const sessions = new Sessions(model);
const tree = new TreePanel(model, (node) => pins.buttons(node));
const chat = new Chat(model, () => latest.sections.requests ?? {});
const models = new Models(model, (name) => { chosen.value = name; watch(); });

const feed = new Feed((state, changed) => {
  latest = state;
  const { sections } = state;
  if (changed.has("server")) useServer(sections.server);
  if (changed.has("health") || changed.has("server")) showHealth(sections.health);
  if (changed.has("pool") || (changed.has("health") && session.sees !== "all")) showMemory(sections.pool);
  if (changed.has("rates")) showRates(sections.rates, sections.pool);
  if (changed.has("requests") || changed.has("open") || changed.has("rates")) requests.show(state);
  if (changed.has("misses")) showMisses(state);
  if (changed.has("volatile")) showVolatile(sections.volatile);
}, (kind, server) => {
  if (server) useServer(server);
  if (kind === "lost") away();
  if (kind === "full") status("bad", "too many pages", "Too many pages watch this server. This one tries again.");
  if (kind === "gone") status("warn", NOT_LOADED, models.absence(model()) || "The model is being loaded.");
}, begin);

/**
 * Shows the state of the server in the head, and what is wrong in a banner that stays in view.
 * @param {"ok"|"warn"|"bad"} kind @param {string} text @param {string} [banner]
 */
function status(kind, text, banner = "") {
  byId("status").className = kind;
  for (const [id, words] of [["status-text", text], ["banner", banner]]) if (byId(id).textContent !== words) byId(id).textContent = words;
  byId("banner").className = kind;
  byId("banner").hidden = !banner;
  byId("panels").classList.toggle("stale", kind === "bad");
  byId("panels").classList.toggle("absent", text === NOT_LOADED);
  const rests = kind === "bad" || drains;
  /** @type {HTMLButtonElement} */ (byId("clear")).disabled = rests || session.sees === "nothing";
  chat.rest(drains || text === "away");
}

function away() {
  status("bad", "away", "The server is away: the page shows its last state, and connects again when it answers.");
}

/** @param {any} health */
function showHealth(health) {
  if (!health) return;
  const absent = models.absence(model());
  if (!health.alive) status(absent ? "warn" : "bad", absent ? NOT_LOADED : "stopped", absent || `The engine does not work: ${health.detail}.`);
  else if (drains) status("warn", "draining", "The server is draining: it ends when the running requests have ended, and takes no new ones.");
  else status("ok", "live");
}

/** Takes the models and the state of the whole server. @param {any} server */
function useServer(server) {
  drains = server.draining;
  const before = chosen.value;
  const shown = server.models.filter(hasCache);
  const options = shown.map((/** @type {any} */ one) => [one.name, one.status === "loaded" ? one.name : `${one.name} (not loaded)`]);
  if (JSON.stringify(options) !== chosen.dataset.options) {
    chosen.dataset.options = JSON.stringify(options);
    fill(chosen, ...options.map((/** @type {string[]} */ [value, text]) => el("option", { value }, text)));
    const first = shown.find((/** @type {any} */ one) => one.status === "loaded") ?? shown[0];
    chosen.value = shown.some((/** @type {any} */ one) => one.name === before) ? before : first?.name ?? "";
  }
  models.update(server, session.sees === "all");
}

/** Asks for the session, and shows the panels or the login. @returns {Promise<boolean>} whether there is a session */
async function begin() {
  const told = await (await ask("dashboard/session")).json();
  if (session.version && told.version !== session.version) location.reload(); // these are another version's files
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
  const notes = { all: "", tenant: `You see the prefixes and requests of ${told.tenant}.`, nothing: "This key is bound to no tenant: it shows no prefixes or requests. The operator's key shows all." };
  const note = notes[/** @type {"all"} */ (told.sees)];
  byId("note").textContent = note;
  byId("note").hidden = !note;
  const before = chosen.value;
  useServer(told.server);
  if (!model()) {
    feed.close();
    tree.stop();
    status("ok", "live", "This server has no model that generates text: there is no cache to show.");
  } else if (wasOut || before !== model()) {
    watch();
  }
}

function watch() {
  tree.clear();
  feed.open(model(), session.page);
  tree.load();
  pins.load(session.sees !== "nothing");
  sessions.load(session.sees !== "nothing");
  models.update({ models: models.all, draining: drains }, session.sees === "all");
}

chosen.addEventListener("change", watch);

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
  else if (model() && !session.login) { feed.open(model(), session.page); tree.load(); }
});

setInterval(() => { if (!document.hidden && latest.at) ageMisses(latest); }, 1000);

// Sessions end, and pins are dropped, while the page is open.
setInterval(() => {
  if (document.hidden || !session.server) return;
  begin().then((is) => { if (is) pins.load(session.sees !== "nothing"); }).catch(() => undefined);
}, AGAIN_MS);

setInterval(() => {
  if (!document.hidden && session.server && !session.login) sessions.load(session.sees !== "nothing");
}, SESSIONS_MS);

function first() {
  begin().catch(() => { away(); setTimeout(first, 2000); });
}
first();
