// @ts-check
// Matrices of float64 numbers by rows, and what the formulas do with them. A vector of features is a matrix of one row, a
// number per token a matrix of one column.

/** @typedef {{ rows: number, cols: number, data: Float64Array }} Matrix */

/** @param {number} rows @param {number} cols @param {ArrayLike<number>} [data] @returns {Matrix} */
export function matrix(rows, cols, data) {
  if (data && data.length !== rows * cols) throw new Error(`${data.length} numbers for a matrix ${rows} × ${cols}`);
  return {
    rows,
    cols,
    data: data instanceof Float64Array ? data : data ? Float64Array.from(data) : new Float64Array(rows * cols),
  };
}

/** @param {Matrix} a */
export const copy = (a) => matrix(a.rows, a.cols, a.data.slice());

/** @param {Matrix} a @param {Matrix} b */
export const same_shape = (a, b) => a.rows === b.rows && a.cols === b.cols;

/** a b: for two rows of a at a time, four rows of b are added to two rows of the result.
 * @param {Matrix} a @param {Matrix} b */
export function product(a, b) {
  if (a.cols !== b.rows) throw new Error(`a product of ${a.rows} × ${a.cols} and ${b.rows} × ${b.cols}`);
  const out = matrix(a.rows, b.cols);
  const [x, y, z, m, n] = [a.data, b.data, out.data, a.cols, b.cols];
  for (let i = 0; i < a.rows; i += 2) {
    const rows = Math.min(2, a.rows - i);
    let k = 0;
    for (; rows === 2 && k + 4 <= m; k += 4) {
      const [p, q] = [i * m + k, (i + 1) * m + k];
      const [p0, p1, p2, p3] = [x[p], x[p + 1], x[p + 2], x[p + 3]];
      const [q0, q1, q2, q3] = [x[q], x[q + 1], x[q + 2], x[q + 3]];
      for (let j = 0, at = k * n, first = i * n, second = first + n; j < n; j++, at++, first++, second++) {
        const y0 = y[at];
        const y1 = y[at + n];
        const y2 = y[at + 2 * n];
        const y3 = y[at + 3 * n];
        z[first] += p0 * y0 + p1 * y1 + p2 * y2 + p3 * y3;
        z[second] += q0 * y0 + q1 * y1 + q2 * y2 + q3 * y3;
      }
    }
    for (let row = i; row < i + rows; row++)
      for (let rest = k; rest < m; rest++)
        for (let j = 0; j < n; j++) z[row * n + j] += x[row * m + rest] * y[rest * n + j];
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
  for (let i = 0; i < a.rows; i++)
    for (let j = 0; j < a.cols; j++) out.data[i * a.cols + j] = c.data[i] * a.data[i * a.cols + j];
  return out;
}

/** a diag(w): column j times the j-th entry of w. @param {Matrix} a @param {Matrix} w */
export function diag_right(a, w) {
  const out = matrix(a.rows, a.cols);
  for (let i = 0; i < a.rows; i++)
    for (let j = 0; j < a.cols; j++) out.data[i * a.cols + j] = a.data[i * a.cols + j] * w.data[j];
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
  const out = matrix(
    parts[0].rows,
    parts.reduce((sum, part) => sum + part.cols, 0),
  );
  let from = 0;
  for (const part of parts) {
    for (let i = 0; i < out.rows; i++)
      out.data.set(part.data.subarray(i * part.cols, (i + 1) * part.cols), i * out.cols + from);
    from += part.cols;
  }
  return out;
}
