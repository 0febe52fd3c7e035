// @ts-check
// Sums of products, as the page follows them: which cells are multiplied, and what they add up to, as follow/terms.py.

import { columnOf, rowOf } from "./matrices.js";

/** @typedef {import("./tensors.js").Cell} Cell */
/** @typedef {import("./tensors.js").Tensors} Tensors */

/**
 * One factor of each term of a sum, the cell it comes from, if it is one, and a symbol instead of the cell's.
 * @typedef {{ values: ArrayLike<number>, cell: (k: number) => Cell | null, symbol: string }} Factor
 * Terms of a sum: products of factors.
 * @typedef {{ factors: Factor[], scale: number }} Sum
 * The formula, and the sums; no sum: a number that is not computed from others.
 * @typedef {{ formula: string, sums: Sum[] }} Answer
 */

/** @param {Factor[]} factors @param {number} scale @returns {Sum} */
export const product = (factors, scale = 1) => ({ factors, scale });

/** @param {string} formula @param {Sum[]} sums @returns {Answer} */
export const answer = (formula, ...sums) => ({ formula, sums });

/** @param {string} name @param {number} row @param {number} column @param {number | null} head @returns {Cell} */
export const cellOf = (name, row, column, head = null) => ({ name, row, column, head });

/** These terms of a sum. @param {Sum} sum @param {number[]} terms @returns {Sum} */
export const only = ({ factors, scale }, terms) => ({
  factors: factors.map(({ values, cell, symbol }) => ({
    values: terms.map((k) => values[k]),
    cell: (/** @type {number} */ k) => cell(terms[k]),
    symbol,
  })),
  scale,
});

/** The terms, in numbers. @param {Sum} sum */
export function valuesOf({ factors, scale }) {
  const count = Math.max(...factors.map(({ values }) => values.length));
  return Float64Array.from({ length: count }, (_, k) =>
    factors.reduce((total, { values }) => total * values[values.length > 1 ? k : 0], scale),
  );
}

/** The cells of a row. @param {Tensors} t @param {string} name @param {number} i @param {number | null} head @returns {Factor} */
export const row = (t, name, i, head = null) => ({
  values: rowOf(t.get(name, head), i),
  cell: (k) => cellOf(name, i, k, head),
  symbol: "",
});

/** The cells of a column. @param {Tensors} t @param {string} name @param {number} j @param {number | null} head
 * @returns {Factor} */
export const column = (t, name, j, head = null) => ({
  values: columnOf(t.get(name, head), j),
  cell: (k) => cellOf(name, k, j, head),
  symbol: "",
});

/** A single cell. @param {Tensors} t @param {string} name @param {number} i @param {number} j @param {number | null} head
 * @returns {Factor} */
export const one = (t, name, i, j, head = null) => ({
  values: [t.value(cellOf(name, i, j, head))],
  cell: () => cellOf(name, i, j, head),
  symbol: "",
});

/** Numbers that no tensor holds, with the symbol they are shown by; `cell` is what they were computed from.
 * @param {ArrayLike<number> | number} values @param {string} symbol @param {(k: number) => Cell | null} cell @returns {Factor} */
export const number = (values, symbol, cell = () => null) => ({
  values: typeof values === "number" ? [values] : values,
  cell,
  symbol,
});
