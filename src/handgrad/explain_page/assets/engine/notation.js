// @ts-check
// The paper's notation as functions: one-hot rows, products, broadcasts and the row-wise softmax. As paper/notation.py.

import { matrix } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */

/** One-hot rows: row t holds a single 1, in column ids[t] (n_T, n); a row without an id is 0.
 * @param {number[]} ids @param {number} n */
export function ohe(ids, n) {
  const out = matrix(ids.length, n);
  ids.forEach((id, t) => id >= 0 && (out.data[t * n + id] = 1));
  return out;
}

/** A·B = Σ_ij A_ij B_ij, one number. @param {Matrix} a @param {Matrix} b */
export function frobenius(a, b) {
  let sum = 0;
  for (let i = 0; i < a.data.length; i++) sum += a.data[i] * b.data[i];
  return sum;
}

/** A ⊖ B: the dot product of each row of A with the same row of B. (n, m), (n, m) → (n, 1) @param {Matrix} a @param {Matrix} b */
export function row_dot(a, b) {
  const out = matrix(a.rows, 1);
  for (let i = 0; i < a.data.length; i++) out.data[Math.floor(i / a.cols)] += a.data[i] * b.data[i];
  return out;
}

/** b~ of a feature vector: the same row for each of n tokens. (1, d) → (n, d) @param {Matrix} b @param {number} n */
export function tilde_rows(b, n) {
  const out = matrix(n, b.cols);
  for (let i = 0; i < n; i++) out.data.set(b.data, i * b.cols);
  return out;
}

/** ~c of one number per token: the same value across m columns (50). (n, 1) → (n, m) @param {Matrix} c @param {number} m */
export function tilde_columns(c, m) {
  const out = matrix(c.rows, m);
  for (let i = 0; i < c.rows; i++) out.data.fill(c.data[i], i * m, (i + 1) * m);
  return out;
}

/** Σ_tok: down the rows, one number per feature. (n, d) → (1, d) @param {Matrix} a */
export function sum_tokens(a) {
  const out = matrix(1, a.cols);
  for (let i = 0; i < a.rows; i++) for (let j = 0; j < a.cols; j++) out.data[j] += a.data[i * a.cols + j];
  return out;
}

/** Row-wise softmax, shifted by each row's maximum, which does not change it (54) and prevents overflow. @param {Matrix} s */
export function softmax(s) {
  const out = matrix(s.rows, s.cols);
  for (let i = 0; i < s.rows; i++) {
    const row = s.data.subarray(i * s.cols, (i + 1) * s.cols);
    const e = out.data.subarray(i * s.cols, (i + 1) * s.cols);
    const most = row.reduce((x, y) => Math.max(x, y), -Infinity);
    let sum = 0;
    for (let j = 0; j < s.cols; j++) sum += e[j] = Math.exp(row[j] - most);
    for (let j = 0; j < s.cols; j++) e[j] /= sum;
  }
  return out;
}
