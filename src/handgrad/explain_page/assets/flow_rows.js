// @ts-check
// The rows of the gradient flow: how they are labeled, and what each cell shows in each mode.

/** @typedef {{ station: string, inside: number | null, label: string, a_label: string }} Place
 * @typedef {Place & { a: number[], delta: number[], share: number[] }} Row */

/** Δ₄ = Δ₅ of block 1 → 1·Δ₄=Δ₅; Δ_gate, Δ_up of block 1 → 1·Δ_gate,up @param {string} label */
export function shortLabel(label) {
  const [, symbols, block] = /^(.*?)(?: of block (\d+))?$/.exec(label) ?? ["", label];
  return `${block ? `${block}·` : ""}${symbols.replaceAll(" ", "").replaceAll(",Δ_", ",")}`;
}

/** Which rows are shown: all of them, or the ends of the blocks and, if one is unfolded, all rows of that block.
 * @param {{ inside: number | null }[]} rows @param {string} unfolded  "all", "none", or the number of a block, from 0 */
export const shownRows = (rows, unfolded) =>
  [...rows.keys()].filter((i) => unfolded === "all" || String(rows[i].inside ?? unfolded) === unfolded);

/** The lines of Python that make only some of the rows. @param {string} lines @param {number[]} rows */
export function pythonRows(lines, rows) {
  const last = lines.lastIndexOf("\n") + 1;
  return `${lines.slice(0, last)}(${lines.slice(last)})[[${rows.join(", ")}]]`;
}

/** What a mode shows of a row. @param {Row} row @param {string} mode */
export function cellsOfRow({ a, delta, share }, mode) {
  if (mode === "product") return a.map((x, i) => x * delta[i]);
  return { a, delta, share }[mode] ?? [];
}

/** The share of each token, averaged over the rows. @param {Row[]} rows */
export const meanShares = (rows) =>
  rows[0].share.map((_, t) => rows.reduce((sum, row) => sum + row.share[t], 0) / rows.length);

/** The lengths of the first and of the last row, all tokens together. @param {Row[]} rows @param {"a" | "delta"} key */
export const growth = (rows, key) => [rows[0], rows[rows.length - 1]].map((row) => Math.hypot(...row[key]));

/** The largest entry, which may be one of very many. @param {number[][]} rows */
export const largestOf = (rows) => rows.flat().reduce((most, x) => Math.max(most, x), 1e-300);

/** Values on a logarithmic scale of at most four decades, from 0 to 1; 0 stays 0. @param {number[][]} rows */
export function logarithmic(rows) {
  const positive = rows.flat().filter((x) => x > 0);
  if (!positive.length) return { least: 0, most: 0, shares: rows, clipped: false };
  const most = Math.log10(largestOf(rows)),
    smallest = positive.reduce((least, x) => Math.min(least, x), Infinity),
    least = Math.max(Math.log10(smallest), most - 4);
  const share = (/** @type {number} */ x) =>
    x > 0 ? Math.max(0.03, (Math.log10(x) - least) / (most - least || 1)) : 0;
  return { least, most, shares: rows.map((row) => row.map(share)), clipped: smallest < 10 ** least };
}
