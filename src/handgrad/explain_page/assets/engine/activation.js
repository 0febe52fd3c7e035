// @ts-check
// Activation: a_8 = g(a_7), Δ_7 = Δ_8 ∘ g'(a_7) (Table 2). GPT-2 uses the tanh form (R39). As paper/activation.py.

import { map, times } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {"relu" | "gelu" | "gelu_tanh" | "relu2"} Name */

/** relu: max(x, 0).  gelu: x Φ(x).  gelu_tanh: x/2 (1 + tanh(√(2/π)(x + 0.044715 x³))).  relu2: max(x, 0)².
 * @param {Matrix} x @param {Name} name */
export const g = (x, name) => map(x, G[name]);

/** relu: 1 where x > 0, and 0 at x = 0 (R39).  gelu: Φ + xφ.  gelu_tanh: (1+t)/2 + x/2 (1−t²) u', t = tanh(u).
 * relu2: 2 max(x, 0), which is 0 at x = 0 without a choice. @param {Matrix} x @param {Name} name */
export const g_prime = (x, name) => map(x, G_PRIME[name]);

/** Δ_{i−1} = Δ_i ∘ g'(a_{i−1}) @param {Matrix} delta @param {Matrix} x @param {Name} name */
export const delta_prev = (delta, x, name) => times(delta, g_prime(x, name));

/** @type {Record<Name, (x: number) => number>} */
const G = {
  relu: (x) => (x < 0 ? 0 : x),
  gelu: (x) => x * cdf(x),
  gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(inner(x))),
  relu2: (x) => (x < 0 ? 0 : x * x),
};

/** @type {Record<Name, (x: number) => number>} */
const G_PRIME = {
  relu: (x) => (x > 0 ? 1 : 0),
  gelu: (x) => cdf(x) + (x * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI),
  gelu_tanh: (x) => {
    const t = Math.tanh(inner(x));
    return (1 + t) / 2 + (x / 2) * (1 - t * t) * Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * x * x);
  },
  relu2: (x) => (x < 0 ? 0 : 2 * x),
};

/** @param {number} x */
const cdf = (x) => (1 + erf(x / Math.SQRT2)) / 2;

/** @param {number} x */
const inner = (x) => Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x);

/** JavaScript has no error function: below 3 the series 2/√π e^(−x²) Σ 2ⁿ x^(2n+1)/(2n+1)!!, all of whose terms have one
 * sign; above it a continued fraction of 1 − erf(x). @param {number} x */
function erf(x) {
  const z = Math.abs(x);
  if (z < 3) {
    let [sum, term] = [x, x];
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
    return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
  }
  let f = z;
  for (let k = 60; k > 0; k--) f = z + k / 2 / f;
  return Math.sign(x) * (1 - Math.exp(-x * x) / (Math.sqrt(Math.PI) * f));
}
