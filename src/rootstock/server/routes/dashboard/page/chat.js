/** The chat box: streams an answer, and shows cached tokens and the time to the first token. */

import { ask } from "./api.js";
import { byId, el } from "./dom.js";
import { count, duration } from "./format.js";

export class Chat {
  /** @param {() => string} model @param {() => any} requests the live requests of the feed, by id */
  constructor(model, requests) {
    this.model = model;
    this.requests = requests;
    /** @type {{role: string, content: string}[]} */
    this.messages = [];
    /** @type {AbortController|null} */
    this.running = null;
    this.rests = false; // the server takes no requests now
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-new").addEventListener("click", () => { this.running?.abort(); this.messages = []; byId("chat-log").replaceChildren(); });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
  }

  async send() {
    const box = /** @type {HTMLTextAreaElement} */ (byId("chat-text"));
    const text = box.value.trim();
    if (!text || this.running || this.rests) return;
    box.value = "";
    const own = this.messages; // New chat replaces them
    own.push({ role: "user", content: text });
    this.append("user", text);
    const running = this.running = new AbortController();
    this.busy(true);
    const { bubble, words, figures } = this.append("assistant", "");
    const began = performance.now();
    const answer = { text: "", id: "", first: 0, pieces: 0, usage: /** @type {any} */ (null) };
    const tell = () => { figures.textContent = this.figures(answer, began); };
    const ticking = setInterval(tell, 200);
    try {
      const max = Number(/** @type {HTMLInputElement} */ (byId("chat-max")).value) || 256;
      const json = { model: this.model(), messages: own, stream: true, stream_options: { include_usage: true }, max_completion_tokens: max };
      const response = await ask("v1/chat/completions", { method: "POST", json, signal: running.signal });
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        answer.id = chunk.id ?? answer.id;
        answer.usage = chunk.usage ?? answer.usage;
        const delta = chunk.choices?.[0]?.delta ?? {};
        const piece = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (!piece) continue;
        answer.first ||= performance.now();
        answer.pieces += 1;
        answer.text += delta.content ?? "";
        words.append(piece);
        const log = byId("chat-log");
        log.scrollTop = log.scrollHeight;
      }
      byId("chat-live").textContent = "The answer is complete.";
    } catch (error) {
      const stopped = running.signal.aborted;
      bubble.append(el("span", { class: stopped ? "hint" : "error" }, stopped ? " (stopped)" : ` ${/** @type {Error} */ (error).message}`));
    } finally {
      clearInterval(ticking);
      tell();
      if (answer.text) own.push({ role: "assistant", content: answer.text });
      else own.pop(); // a question without an answer is not asked again
      if (this.running === running) { this.running = null; this.busy(false); }
      box.focus();
    }
  }

  /** @param {any} answer @param {number} began */
  figures(answer, began) {
    const live = Object.entries(this.requests()).find(([id]) => answer.id && id.startsWith(answer.id))?.[1];
    const cached = answer.usage?.prompt_tokens_details?.cached_tokens ?? live?.cached;
    const prompt = answer.usage?.prompt_tokens ?? live?.prompt;
    const parts = [answer.first ? `first token after ${duration((answer.first - began) / 1000)}` : `waiting ${duration((performance.now() - began) / 1000)}`];
    if (prompt != null) parts.push(`${cached == null ? "…" : count(cached)} of ${count(prompt)} prompt tokens cached`);
    const tokens = answer.usage?.completion_tokens ?? live?.completion ?? answer.pieces;
    if (tokens) parts.push(`${count(tokens)} tokens`);
    return parts.join(" · ");
  }

  /** @param {string} role @param {string} text */
  append(role, text) {
    const words = el("span", {}, text), figures = el("span", { class: "figures" });
    const bubble = el("div", { class: `message ${role}` }, el("span", { class: "sr" }, role === "user" ? "You: " : "Model: "), words);
    if (role === "assistant") bubble.append(figures);
    byId("chat-log").append(bubble);
    byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
    return { bubble, words, figures };
  }

  /** @param {boolean} is whether the server takes no requests now */
  rest(is) {
    this.rests = is;
    /** @type {HTMLButtonElement} */ (byId("chat-send")).disabled = is || this.running !== null;
  }

  /** @param {boolean} is */
  busy(is) {
    /** @type {HTMLButtonElement} */ (byId("chat-send")).disabled = is || this.rests;
    /** @type {HTMLButtonElement} */ (byId("chat-stop")).disabled = !is;
    byId("chat-log").setAttribute("aria-busy", String(is)); // a screen reader reads the whole answer at its end
  }
}

/** Yields the data of server-sent events. @param {Response} response */
async function* events(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
