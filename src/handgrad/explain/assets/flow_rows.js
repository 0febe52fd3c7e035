// @ts-check
// The rows of the gradient flow: one per station, equal ones once, and what each cell shows in each mode.

/** @typedef {{ id: string, a: number[] | null, delta: number[] | null }} Flow */

/** Rows that have both lengths, with the name of their Δ; a row equal to the one before it is joined to it: an addition
 * passes the error on unchanged. @param {Flow[]} flows @param {any[]} stations */
export function flowRows(flows, stations) {
  /** @type {{ id: string, name: string, a: number[], delta: number[] }[]} */
  const rows = [];
  for (const flow of flows) {
    const station = stations.find((s) => s.id === flow.id);
    if (!flow.a || !flow.delta || !station || station.index >= 12) continue;
    const before = rows.at(-1);
    if (
      before &&
      station.block !== null &&
      before.delta.every((x, i) => x === /** @type {number[]} */ (flow.delta)[i])
    ) {
      before.name += `=${station.delta_symbol}`;
      Object.assign(before, { id: flow.id, a: flow.a });
    } else
      rows.push({
        id: flow.id,
        name: `${station.block === null ? "" : `${station.block + 1}·`}${station.delta_symbol}`,
        a: flow.a,
        delta: flow.delta,
      });
  }
  return rows;
}

/** What a mode shows of a row. @param {{ a: number[], delta: number[] }} row @param {string} mode */
export function cellsOfRow({ a, delta }, mode) {
  if (mode === "a") return a;
  if (mode === "delta") return delta;
  if (mode === "product") return a.map((x, i) => x * delta[i]);
  const total = Math.hypot(...delta);
  return delta.map((x) => (total ? (x / total) ** 2 : 0)); // share of the squared error of this row
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
