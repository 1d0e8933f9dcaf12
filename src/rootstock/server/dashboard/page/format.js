/** Numbers in words. */

const NUMBER = new Intl.NumberFormat("en-US");

/** @param {number} value */
export const count = (value) => NUMBER.format(Math.round(value));

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

/** @param {{tenant: string, adapter?: string}} root */
export const tenantName = (root) => (root.tenant || "no tenant") + (root.adapter ? ` · ${root.adapter}` : "");
