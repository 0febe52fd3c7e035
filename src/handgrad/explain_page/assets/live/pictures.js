// @ts-check
// Reduce matrices to a size that can be drawn, as presentation/pictures.py.

import { matrix, t } from "../engine/matrix.js";
import { absolute, largest, norm, sum } from "./matrices.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

export const ROWS = 128; // most cells of a picture
export const COLUMNS = 256;

/** What the page needs to draw a part of a matrix. A cell covers `pool` entries and has the value of the one furthest from 0.
 * @param {Matrix} x
 * @param {{ rows?: number[], columns?: number[], limit?: number, rowsLimit?: number, fullRange?: boolean, scale?: number }} how
 */
export function picture(x, { rows, columns, limit = COLUMNS, rowsLimit = ROWS, fullRange = false, scale } = {}) {
  const [r0, r1] = rows ?? [0, x.rows],
    [c0, c1] = columns ?? [0, x.cols];
  const part = matrix(r1 - r0, c1 - c0);
  for (let i = r0; i < r1; i++) part.data.set(x.data.subarray(i * x.cols + c0, i * x.cols + c1), (i - r0) * part.cols);
  const [pooled, poolRows] = pool(part, rowsLimit);
  const [turned, poolColumns] = pool(t(pooled), limit);
  const cells = t(turned);
  const most = largest(cells.data);
  scale ??= fullRange ? most : Math.max(quantile(absolute(cells.data), 0.995), most / 30);
  const factor = scale ? 127 / scale : 0;
  const q = Int8Array.from(cells.data, (value) => Math.max(-127, Math.min(127, Math.round(value * factor))));
  return {
    shape: [x.rows, x.cols],
    rows: [r0, r1],
    columns: [c0, c1],
    cells: [cells.rows, cells.cols],
    pool: [poolRows, poolColumns],
    scale,
    largest: most,
    q: base64(q),
  };
}

/** At most `limit` rows: of neighboring rows the entry furthest from 0. @param {Matrix} x @param {number} limit
 * @returns {[Matrix, number]} */
function pool(x, limit) {
  const size = Math.ceil(x.rows / limit);
  if (size <= 1) return [x, 1];
  const found = matrix(Math.ceil(x.rows / size), x.cols);
  for (let i = 0; i < found.rows; i++)
    for (let j = 0; j < x.cols; j++) {
      let low = Infinity,
        high = -Infinity;
      for (let k = i * size; k < Math.min(x.rows, (i + 1) * size); k++) {
        low = Math.min(low, x.data[k * x.cols + j]);
        high = Math.max(high, x.data[k * x.cols + j]);
      }
      found.data[i * x.cols + j] = high >= -low ? high : low;
    }
  return [found, size];
}

/** @param {Float64Array} values @param {number} share */
function quantile(values, share) {
  const sorted = values.slice().sort(),
    place = share * (sorted.length - 1),
    below = Math.floor(place);
  const next = sorted[Math.min(below + 1, sorted.length - 1)];
  return sorted[below] + (place - below) * (next - sorted[below]);
}

/** @param {Int8Array} bytes */
function base64(bytes) {
  const codes = new Uint8Array(bytes.buffer);
  let text = "";
  for (let i = 0; i < codes.length; i += 8192) text += String.fromCharCode(...codes.subarray(i, i + 8192));
  return btoa(text);
}

/** Norm, mean, spread, minimum and maximum of all entries. @param {Matrix} x */
export function statistics({ data }) {
  const mean = sum(data) / data.length;
  let squares = 0,
    least = Infinity,
    most = -Infinity;
  for (const value of data) {
    squares += (value - mean) ** 2;
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  return { norm: norm(data), mean, spread: Math.sqrt(squares / data.length), least, most };
}
