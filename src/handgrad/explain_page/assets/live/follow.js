// @ts-check
// Follow one number: the sum of products that made a cell of an activation, an error signal or a gradient, as
// follow/follow.py.

import * as activations from "./forward.js";
import { absolute, sortedDown, sum } from "./matrices.js";
import { blockOf } from "./network.js";
import { grouped, percent, split, subscript, symbol, typeset } from "./notation.js";
import * as signals from "./signals.js";
import { Tensors } from "./tensors.js";
import { cellOf, valuesOf } from "./terms.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./tensors.js").Cell} Cell */
/** @typedef {import("./terms.js").Sum} Sum */

const VOCABULARY_ROWS = ["w_tok", "grad_w_tok"]; // tensors with a row, or a column, for every token of the vocabulary
const VOCABULARY_COLUMNS = ["a_12", "y_pred", "delta_12", "delta_0", "w_11", "grad_w_11"];
const [ALL, SHOWN] = [40, 12]; // a sum of at most ALL terms is listed whole; of others the largest SHOWN

/** The terms of one cell, largest first, with their sum beside the value on the screen. @param {Session} session
 * @param {Traced} sentence @param {{ name: string, head?: number, row: number, column: number }} given */
export function follow(session, sentence, { name, head, row, column }) {
  const t = new Tensors(session, sentence),
    cell = cellOf(name, row, column, head ?? null);
  const value = t.value(cell);
  const backward = /^(delta_|grad_|G_|mean_G)/.test(split(name)[1]);
  const { formula, sums } = (backward ? signals : activations).rule(t, cell);
  const parts = sums.map(valuesOf),
    every = Float64Array.from(parts.flatMap((x) => [...x]));
  const places = parts.flatMap((x, k) => [...x].map((_, i) => ({ part: sums[k], i }))); // of every term
  const order = sortedDown(absolute(every)),
    listed = order.length <= ALL ? order : order.slice(0, SHOWN);
  const terms = listed.map((k) => termOf(session, sentence, places[k].part, places[k].i, every[k]));
  const total = sums.length ? sum(every) : value;
  const rest = listed.length < order.length ? total - sum(terms.map((term) => term.value)) : 0;
  return {
    ...named(session, sentence, cell),
    value,
    formula,
    count: every.length,
    terms,
    rest: { count: every.length - listed.length, value: rest },
    sum: total,
    leaf: !sums.length,
    caption: caption(value, every, order, formula),
  };
}

/** @param {Session} session @param {Traced} sentence @param {Sum} part @param {number} i @param {number} value */
function termOf(session, sentence, part, i, value) {
  const factors = part.factors.map((factor) => {
    const k = factor.values.length > 1 ? i : 0,
      cell = factor.cell(k),
      name = cell && named(session, sentence, cell);
    return { value: factor.values[k], symbol: factor.symbol || (name?.symbol ?? ""), cell: name };
  });
  return { value, factors, scale: part.scale, ...placeOf(session, sentence, part, i) };
}

/** What tells a term from the others of its sum: the token that its factors belong to, with its position if it is one of the
 * sentence, or else the number of a feature. @param {Session} session @param {Traced} sentence @param {Sum} part
 * @param {number} i */
function placeOf(session, sentence, part, i) {
  /** @type {{ token: string | null, position: number | null, feature: number | null }} */
  const found = { token: null, position: null, feature: null };
  for (const { values, cell: of } of part.factors) {
    const [cell, other] = values.length > 1 ? [of(i), of(i ? 0 : 1)] : [null, null];
    if (!cell || !other) continue;
    const name = named(session, sentence, cell),
      byRow = cell.row !== other.row;
    const label = byRow ? name.row_label : name.column_label,
      index = byRow ? cell.row : cell.column;
    if (label === null) {
      found.feature = index;
      continue;
    }
    const overVocabulary = (byRow ? VOCABULARY_ROWS : VOCABULARY_COLUMNS).includes(split(cell.name)[1]);
    return { ...found, token: label, position: overVocabulary ? null : index + 1 };
  }
  return found;
}

/** A cell as the page shows it: with the symbol of its tensor, the block, and the words of its row and column.
 * @param {Session} session @param {Traced} sentence @param {Cell} cell */
function named(session, sentence, { name, row, column, head }) {
  const [, last] = split(name),
    { ids } = sentence;
  const between = ["rho", "score", "delta_causal", "delta_raw"].includes(last);
  const tokens = /^(a|delta|mu|sigma|G|mean)_|^sum_e|^[qkv]$/.test(last) || between || last === "y_pred";
  let rowLabel = tokens && row < ids.length ? session.tokenText(ids[row]) : null;
  if (VOCABULARY_ROWS.includes(last)) rowLabel = session.tokenText(row);
  const columnLabel = VOCABULARY_COLUMNS.includes(last)
    ? session.tokenText(column)
    : between
      ? session.tokenText(ids[column])
      : null;
  return {
    name,
    symbol: symbolOf(last),
    block: blockOf(name),
    head,
    row,
    column,
    row_label: rowLabel,
    column_label: columnLabel,
    python: pythonOf(sentence, { name, row, column, head }),
  };
}

/** @param {string} last */
export function symbolOf(last) {
  const inside = /^(G|mean_G|mean_Ga)_(\d+)$/.exec(last);
  if (inside) {
    const n = subscript(inside[2]);
    return { G: `G${n}`, mean_G: `mean(G${n})`, mean_Ga: `mean(G${n} ∘ ā${n})` }[inside[1]] ?? "";
  }
  const statistic = /^(sigma|mu)_(\d+)$/.exec(last);
  if (statistic) return { sigma: "σ", mu: "μ" }[statistic[1]] + subscript(statistic[2]);
  if (last.startsWith("a_bar_")) return `ā${subscript(last.slice(6))}`;
  if (last.startsWith("grad_")) return `∂${last.slice(5)}`;
  return { rho: "ρ", sum_e: "Σ e^x" }[last] ?? symbol(last);
}

/** The expression that reads this cell from a trace; null for what a trace does not record. @param {Traced} sentence
 * @param {Cell} cell */
function pythonOf({ trace }, { name, row, column, head }) {
  if (!trace.has(name)) return null;
  const [, last] = split(name);
  const vector = last === "a_0" || (last.startsWith("grad_") && trace.get(name).rows === 1);
  const index = vector ? [column] : head === null ? [row, column] : [head, row, column];
  return `trace['${name}'][${index.join(", ")}]`;
}

/** @param {number} value @param {Float64Array} every @param {number[]} order @param {string} formula */
function caption(value, every, order, formula) {
  if (!every.length) return formula;
  if (every.length === 1) return `One term makes this number: ${typeset(value)}.`;
  const size = sum(absolute(every));
  let [half, sofar] = [0, 0];
  while (half < order.length && sofar < size / 2) sofar += Math.abs(every[order[half++]]);
  const share = size ? percent(Math.abs(every[order[0]]) / size) : "0 %";
  const against = sum(every.filter((x) => x * value < 0));
  const text =
    `${grouped(every.length)} terms add up to ${typeset(value)}. The largest has ${share} of their total size` +
    (half > 1 ? `; ${half} of them have half of it.` : ".");
  if (!against || !Number.isFinite(against)) return text;
  return `${text} Terms of the other sign take away ${typeset(Math.abs(against))}.`;
}
