/** Requests to the server. A change carries the session's CSRF token; the session itself is an HttpOnly cookie. */

let csrf = "";

/** An error of the server, in its own words. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) { super(message); this.status = status; }
}

/** @param {string|null|undefined} token */
export const useToken = (token) => { csrf = token ?? ""; };

/**
 * @param {string} path relative to the page @param {RequestInit & {json?: any, key?: string}} [options]
 * @returns {Promise<Response>}
 */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const { json, key, ...rest } = options;
  if (json !== undefined) { headers.set("Content-Type", "application/json"); rest.body = JSON.stringify(json); }
  if (key) headers.set("X-API-Key", key);
  else if (csrf && rest.method && rest.method !== "GET") headers.set("X-CSRF-Token", csrf);
  const response = await fetch(path, { ...rest, headers, credentials: "same-origin" });
  if (!response.ok) throw new ServerError(response.status, await messageOf(response));
  return response;
}

/** @param {string} path @param {any} [json] @param {string} [key] */
export const post = (path, json, key) => ask(path, { method: "POST", json, key });

/** The body of an answer. `gone: true` and a message stand for a thing that is gone meanwhile. @param {Promise<Response>} asked */
export const body = async (asked) => (await asked).json();

/** @param {Response} response */
async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
