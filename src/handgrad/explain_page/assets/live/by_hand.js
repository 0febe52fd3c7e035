// @ts-check
// What can be computed by hand at a station: its results, with a few of their entries, as views/by_hand.py.

import { symbolOf } from "./follow.js";
import { hereOf } from "./network.js";
import { signal, split } from "./notation.js";
import { Tensors } from "./tensors.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */
/** @typedef {import("./network.js").Step} Step */
/** @typedef {import("./network.js").Station} Station */

const SMALL = 1e-4; // of the largest: not worth computing
const FEW = 2; // the first rows of attention see too little to be an exercise

/** @param {import("./session.js").Session} session @param {import("./session.js").Traced} sentence @param {Station} station */
export function byHand(session, sentence, station) {
  const t = new Tensors(session, sentence);
  return resultsOf(t, station).flatMap(([way, name]) => {
    const heads = t.heads(name);
    const parts = heads ? Array.from({ length: heads }, (_, h) => t.get(name, h)) : [t.get(name)];
    const cells = entries(parts, Boolean(heads)).map((cell) => ({ ...cell, terms: null }));
    const [{ rows, cols }] = parts;
    const symbol = symbolOf(split(name)[1]);
    return cells.length ? [{ way, name, symbol, shape: [rows, cols], heads: heads || null, cells }] : [];
  });
}

/** @param {Tensors} t @param {Station} station @returns {[string, string][]} */
function resultsOf(t, station) {
  if (station.kind === "tokens") return [["backward", "delta_0"]];
  const step = /** @type {Step} */ (t.network.maker(station.a[0])),
    here = hereOf(step),
    [n] = step.layers;
  const before = { norm: [`a_bar_${n}`], attention: ["q", "k", "v", "score", "sum_e", "rho"], loss: ["sum_e"] }[step.kind] ?? [];
  const inside =
    {
      norm: [`G_${n}`, `mean_G_${n}`, `mean_Ga_${n}`],
      attention: ["delta_v", "delta_causal", "delta_raw", "delta_q", "delta_k"],
    }[step.kind] ?? [];
  const sent = step.inputs.filter((x) => x !== "a_0").map(signal);
  return [
    ...[...before.map((x) => here + x), ...step.outputs].map((x) => /** @type {[string, string]} */ (["forward", x])),
    ...[...inside.map((x) => here + x), ...sent].map((x) => /** @type {[string, string]} */ (["backward", x])),
    ...station.parameters.map((p) => /** @type {[string, string]} */ (["gradient", p.gradient])),
  ];
}

/** The entry furthest from 0, that furthest with the other sign, and that furthest in other rows and columns, if they are not
 * nearly 0. @param {Matrix[]} parts  of every head @param {boolean} between  whether these are heads */
function entries(parts, between) {
  const first = between && parts[0].rows > FEW ? FEW : 0;
  const found = [];
  /** @param {Matrix} x @param {(value: number, i: number, j: number) => boolean} chosen */
  const furthest = (x, chosen) => {
    let best = { row: -1, column: -1, value: 0 };
    for (let i = first; i < x.rows; i++)
      for (let j = 0; j < x.cols; j++) {
        const value = x.data[i * x.cols + j];
        if (chosen(value, i, j) && Math.abs(value) > Math.abs(best.value)) best = { row: i, column: j, value };
      }
    return best;
  };
  let head = 0,
    best = furthest(parts[0], () => true);
  parts.forEach((x, h) => {
    const here = furthest(x, () => true);
    if (Math.abs(here.value) > Math.abs(best.value)) [head, best] = [h, here];
  });
  if (!best.value) return [];
  const least = SMALL * Math.abs(best.value);
  const add = ({ row, column, value }) => value && Math.abs(value) > least && found.push({ row, column, head: between ? head : null });
  add(best);
  const other = furthest(parts[head], (value) => value * best.value < 0),
    known = Math.abs(other.value) > least ? [best, other] : [best];
  if (known.length > 1) add(other);
  add(furthest(parts[head], (_, i, j) => known.every(({ row, column }) => i !== row && j !== column)));
  return found;
}
