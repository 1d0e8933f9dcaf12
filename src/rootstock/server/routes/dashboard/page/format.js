/** Numbers in words. */

const NUMBER = new Intl.NumberFormat("en-US");

/** @param {number} value */
export const count = (value) => NUMBER.format(Math.round(value));

const LARGE = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });

/** A number in a narrow table. @param {number} value */
export const compact = (value) => value < 1e6 ? count(value) : LARGE.format(value);

/** @param {number} bytes */
export function bytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 && power < units.length - 1) { bytes /= 1024; power += 1; }
  return `${power === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[power]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

/** @param {number} part @param {number} whole */
export const percent = (part, whole) => whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";

const SHORT = 30, END = 11; // characters of a name, and of its end

/** A name in a table: a long one without its middle. @param {string} name */
export function short(name) {
  const letters = [...name];
  return letters.length <= SHORT ? name : `${letters.slice(0, SHORT - END - 1).join("")}…${letters.slice(-END).join("")}`;
}

/** @param {{tenant: string, adapter?: string}} root */
export const tenantName = (root) => (root.tenant || "no tenant") + (root.adapter ? ` · ${root.adapter}` : "");
