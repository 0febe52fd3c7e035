// @ts-check
// The rows of the gradient flow: how they are labelled, and what each cell shows in each mode.

/** @typedef {{ station: string, label: string, a: number[], delta: number[], share: number[] }} Row  of an overview's
 * flow */

/** Δ₄ = Δ₅ of block 1 → 1·Δ₄=Δ₅ @param {string} label */
export function shortLabel(label) {
  const [, symbols, block] = /^(.*?)(?: of block (\d+))?$/.exec(label) ?? ["", label];
  return `${block ? `${block}·` : ""}${symbols.replaceAll(" ", "")}`;
}

/** What a mode shows of a row. @param {Row} row @param {string} mode */
export function cellsOfRow({ a, delta, share }, mode) {
  if (mode === "product") return a.map((x, i) => x * delta[i]);
  return { a, delta, share }[mode] ?? [];
}

/** Values on a logarithmic scale of at most four decades, from 0 to 1; 0 stays 0. @param {number[][]} rows */
export function logarithmic(rows) {
  const logs = rows
    .flat()
    .filter((x) => x > 0)
    .map(Math.log10);
  const most = Math.max(...logs),
    least = Math.max(Math.min(...logs), most - 4);
  const share = (/** @type {number} */ x) =>
    x > 0 ? Math.max(0.03, (Math.log10(x) - least) / (most - least || 1)) : 0;
  return { least, most, shares: rows.map((row) => row.map(share)) };
}
