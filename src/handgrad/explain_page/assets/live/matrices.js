// @ts-check
// What the views need of matrices {rows, cols, data} besides the engine's products.

import { matrix } from "../engine/matrix.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */
/** @typedef {ArrayLike<number>} Values */

/** Row i, not copied. @param {Matrix} x @param {number} i */
export const rowOf = (x, i) => x.data.subarray(i * x.cols, (i + 1) * x.cols);

/** @param {Matrix} x @param {number} j */
export const columnOf = (x, j) => Float64Array.from({ length: x.rows }, (_, i) => x.data[i * x.cols + j]);

/** Some columns, in that order. @param {Matrix} x @param {number[]} ids */
export function columnsOf(x, ids) {
  const found = matrix(x.rows, ids.length);
  for (let i = 0; i < x.rows; i++) ids.forEach((j, k) => (found.data[i * ids.length + k] = x.data[i * x.cols + j]));
  return found;
}

/** Some rows, in that order. @param {Matrix} x @param {number[]} ids */
export function rowsOf(x, ids) {
  const found = matrix(ids.length, x.cols);
  ids.forEach((i, k) => found.data.set(rowOf(x, i), k * x.cols));
  return found;
}

/** @param {Values} x */
export function sum(x) {
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i];
  return total;
}

/** @param {Values} x @param {Values} y */
export function dot(x, y) {
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i] * y[i];
  return total;
}

/** ‖x‖, also where the squares of the entries would be rounded to 0 or overflow. @param {Values} x */
export function norm(x) {
  const size = Math.sqrt(dot(x, x));
  if (size > 1e-150 && size < Infinity) return size;
  const most = largest(x);
  if (!most || !Number.isFinite(most)) return most;
  let total = 0;
  for (let i = 0; i < x.length; i++) total += (x[i] / most) ** 2;
  return most * Math.sqrt(total);
}

/** The largest entry without its sign. @param {Values} x */
export function largest(x) {
  let most = 0;
  for (let i = 0; i < x.length; i++) if (!(Math.abs(x[i]) <= most)) most = Math.abs(x[i]);
  return most;
}

/** The length of every row. @param {Matrix} x */
export const rowNorms = (x) => Array.from({ length: x.rows }, (_, i) => norm(rowOf(x, i)));

/** The first index of the largest value. @param {Values} x */
export function argmax(x) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (x[i] > x[best]) best = i;
  return best;
}

/** The first index of the entry furthest from 0. @param {Values} x */
export function furthest(x) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (Math.abs(x[i]) > Math.abs(x[best])) best = i;
  return best;
}

/** The indices of the largest values, the largest first. @param {Values} x @param {number} count */
export const top = (x, count) => sortedDown(x).slice(0, count);

/** All indices, the largest value first; equal values keep their order. @param {Values} x */
export const sortedDown = (x) => [...Array(x.length).keys()].sort((i, j) => x[j] - x[i] || i - j);

/** @param {Values} x @returns {Float64Array} */
export const absolute = (x) => Float64Array.from(x, Math.abs);

/** 0 … n − 1 @param {number} n */
export const range = (n) => [...Array(n).keys()];
