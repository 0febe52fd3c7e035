// @ts-check
// The numbers of the prologue: a linear layer, a softmax and a loss, computed from the small integers given here.

/** @typedef {number[][]} Matrix */

export const TOKENS = ["tick", "tock"];
const GIVEN = {
  a1: [[1, 2], [2, 1]],
  w: [[2, 1], [0, 1]],
  b: [-1, 0],
  delta2: [[1, -1], [0, 2]], // an error to practice with
  deltaY: [[0, 1], [6, 2]], // another
  targets: [1, 0], // the token that follows
  rate: 0.1,
};

/** @param {Matrix} a @returns {Matrix} */
export const transpose = (a) => a[0].map((_, j) => a.map((row) => row[j]));
/** @param {Matrix} a @param {Matrix} b @returns {Matrix} */
export const product = (a, b) => a.map((row) => transpose(b).map((column) => dot(row, column)));
/** @param {Matrix} a @param {Matrix} b @param {(x: number, y: number) => number} f @returns {Matrix} */
export const elementwise = (a, b, f) => a.map((row, i) => row.map((x, j) => f(x, b[i][j])));
/** One number for every row. @param {Matrix} a @param {Matrix} b */
export const rowDot = (a, b) => a.map((row, i) => dot(row, b[i]));
/** @param {Matrix} a @returns {Matrix} */
export const softmax = (a) =>
  a.map((row) => {
    const e = row.map((x) => Math.exp(x - Math.max(...row))),
      total = e.reduce((x, y) => x + y);
    return e.map((x) => x / total);
  });
/** @param {number[]} ids @param {number} n @returns {Matrix} */
export const oneHot = (ids, n) => ids.map((id) => Array.from({ length: n }, (_, j) => (j === id ? 1 : 0)));

const dot = (/** @type {number[]} */ x, /** @type {number[]} */ y) => x.reduce((sum, a, k) => sum + a * y[k], 0);
const rows = (/** @type {number[]} */ b, /** @type {number} */ n) => Array.from({ length: n }, () => [...b]);
const columns = (/** @type {number[]} */ c, /** @type {number} */ n) => c.map((x) => Array.from({ length: n }, () => x));
const add = (/** @type {number} */ x, /** @type {number} */ y) => x + y;
const minus = (/** @type {number} */ x, /** @type {number} */ y) => x - y;
const times = (/** @type {number} */ x, /** @type {number} */ y) => x * y;

/** Everything that the prologue shows and asks for. */
export function numbers({ a1, w, b, delta2, deltaY, targets, rate } = GIVEN) {
  const n = a1.length,
    wide = w[0].length;
  const forward = (/** @type {Matrix} */ w) => {
    const a2 = elementwise(product(a1, w), rows(b, n), add),
      y = softmax(a2),
      losses = targets.map((id, t) => -Math.log(y[t][id]));
    return { a2, y, losses, loss: losses.reduce(add) };
  };
  const { a2, y, losses, loss } = forward(w);
  const yGt = oneHot(targets, wide),
    inner = rowDot(deltaY, y),
    delta = elementwise(y, yGt, minus),
    grad = product(transpose(a1), delta);
  const after = forward(elementwise(w, grad, (x, g) => x - rate * g)).loss;
  return {
    a1, w, b: [b], delta2, deltaY, targets, rate, a2, y, losses, loss, yGt, delta, grad, after,
    a1w: product(a1, w), bRows: rows(b, n), a1t: transpose(a1), wt: transpose(w),
    gradPracticed: product(transpose(a1), delta2), delta1: product(delta2, transpose(w)),
    gradB: [delta2.reduce((sum, row) => sum.map((x, j) => x + row[j]))],
    inner: inner.map((x) => [x]), innerColumns: columns(inner, wide),
    deltaA: elementwise(y, elementwise(deltaY, columns(inner, wide), minus), times),
    predicted: -rate * grad.flat().reduce((sum, x) => sum + x * x, 0),
  };
}
