// @ts-check
// Matrices of float64 numbers by rows, and what the formulas do with them. A vector of features is a matrix of one row, a
// number per token a matrix of one column.

/** @typedef {{ rows: number, cols: number, data: Float64Array }} Matrix */

/** @param {number} rows @param {number} cols @param {ArrayLike<number>} [data] @returns {Matrix} */
export function matrix(rows, cols, data) {
  if (data && data.length !== rows * cols) throw new Error(`${data.length} numbers for a matrix ${rows} × ${cols}`);
  return { rows, cols, data: data instanceof Float64Array ? data : data ? Float64Array.from(data) : new Float64Array(rows * cols) };
}

/** @param {Matrix} a */
export const copy = (a) => matrix(a.rows, a.cols, a.data.slice());

/** @param {Matrix} a @param {Matrix} b */
export const same_shape = (a, b) => a.rows === b.rows && a.cols === b.cols;

/** a b: four rows of b are added to a row of the result at a time.
 * @param {Matrix} a @param {Matrix} b */
export function product(a, b) {
  if (a.cols !== b.rows) throw new Error(`a product of ${a.rows} × ${a.cols} and ${b.rows} × ${b.cols}`);
  const out = matrix(a.rows, b.cols);
  const [x, y, z, m, n] = [a.data, b.data, out.data, a.cols, b.cols];
  for (let i = 0; i < a.rows; i++) {
    const at = i * m;
    const row = i * n;
    let k = 0;
    for (; k + 4 <= m; k += 4) {
      const [x0, x1, x2, x3] = [x[at + k], x[at + k + 1], x[at + k + 2], x[at + k + 3]];
      const [y0, y1, y2, y3] = [k * n, (k + 1) * n, (k + 2) * n, (k + 3) * n];
      for (let j = 0; j < n; j++) z[row + j] += x0 * y[y0 + j] + x1 * y[y1 + j] + x2 * y[y2 + j] + x3 * y[y3 + j];
    }
    for (; k < m; k++) {
      const x0 = x[at + k];
      for (let j = 0; j < n; j++) z[row + j] += x0 * y[k * n + j];
    }
  }
  return out;
}

/** aᵗ @param {Matrix} a */
export function t(a) {
  const out = matrix(a.cols, a.rows);
  for (let i = 0; i < a.rows; i++) for (let j = 0; j < a.cols; j++) out.data[j * a.rows + i] = a.data[i * a.cols + j];
  return out;
}

/** Each entry by a function of it. @param {Matrix} a @param {(x: number) => number} f */
export function map(a, f) {
  const out = matrix(a.rows, a.cols);
  for (let i = 0; i < out.data.length; i++) out.data[i] = f(a.data[i]);
  return out;
}

/** Each entry by a function of those of two matrices. @param {Matrix} a @param {Matrix} b @param {(x: number, y: number) => number} f */
function entrywise(a, b, f) {
  if (!same_shape(a, b)) throw new Error(`entries of ${a.rows} × ${a.cols} and ${b.rows} × ${b.cols}`);
  const out = matrix(a.rows, a.cols);
  for (let i = 0; i < out.data.length; i++) out.data[i] = f(a.data[i], b.data[i]);
  return out;
}

/** a + b @param {Matrix} a @param {Matrix} b */
export const plus = (a, b) => entrywise(a, b, (x, y) => x + y);

/** a − b @param {Matrix} a @param {Matrix} b */
export const minus = (a, b) => entrywise(a, b, (x, y) => x - y);

/** a ∘ b @param {Matrix} a @param {Matrix} b */
export const times = (a, b) => entrywise(a, b, (x, y) => x * y);

/** s a @param {number} s @param {Matrix} a */
export const scaled = (s, a) => map(a, (x) => s * x);

/** The sum of several matrices. @param {Matrix[]} parts */
export const total = (parts) => parts.reduce(plus);

/** diag(c) a: row i times the i-th entry of c, whether c is a row or a column. @param {Matrix} c @param {Matrix} a */
export function diag_left(c, a) {
  const out = matrix(a.rows, a.cols);
  for (let i = 0; i < a.rows; i++) for (let j = 0; j < a.cols; j++) out.data[i * a.cols + j] = c.data[i] * a.data[i * a.cols + j];
  return out;
}

/** a diag(w): column j times the j-th entry of w. @param {Matrix} a @param {Matrix} w */
export function diag_right(a, w) {
  const out = matrix(a.rows, a.cols);
  for (let i = 0; i < a.rows; i++) for (let j = 0; j < a.cols; j++) out.data[i * a.cols + j] = a.data[i * a.cols + j] * w.data[j];
  return out;
}

/** Columns `from` to `to`, without the last. @param {Matrix} a @param {number} from @param {number} to */
export function columns(a, from, to) {
  const out = matrix(a.rows, to - from);
  for (let i = 0; i < a.rows; i++) out.data.set(a.data.subarray(i * a.cols + from, i * a.cols + to), i * (to - from));
  return out;
}

/** Matrices side by side. @param {Matrix[]} parts */
export function concat_columns(parts) {
  const out = matrix(parts[0].rows, parts.reduce((sum, part) => sum + part.cols, 0));
  let from = 0;
  for (const part of parts) {
    for (let i = 0; i < out.rows; i++) out.data.set(part.data.subarray(i * part.cols, (i + 1) * part.cols), i * out.cols + from);
    from += part.cols;
  }
  return out;
}
