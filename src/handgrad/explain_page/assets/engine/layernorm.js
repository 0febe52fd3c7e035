// @ts-check
// Section 5: layer normalization. Equations 36–38 forward, 40–42 backward. As paper/layernorm.py.
//
// a_{i−1}  (n_T, d)      w, b  (1, d)      μ, σ  (n_T, 1)      ā  (n_T, d)
//
// The paper has no ε (R8). With σ = √(var + ε) used both in ā and in 1/σ, its equation 40 is exact for every ε.

import { diag_left, diag_right, map, minus, plus, scaled, t, times } from "./matrix.js";
import { row_dot, sum_tokens, tilde_columns, tilde_rows } from "./notation.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {{ mu: Matrix, sigma: Matrix, a_bar: Matrix, a: Matrix }} Forward */

/** a_i = ā diag(w) + b~ with ā = diag(1/σ)(a_{i−1} − μ~); without b if a model has none.
 * @param {Matrix} a @param {Matrix} w @param {Matrix | null} b @param {number} eps @returns {Forward} */
export function forward(a, w, b, eps) {
  const d = a.cols;
  const mu = scaled(1 / d, t(sum_tokens(t(a))));
  const centered = minus(a, tilde_columns(mu, d));
  const sigma = map(row_dot(centered, centered), (x) => Math.sqrt(x / d + eps)); // population variance; ε: R8
  const a_bar = diag_left(
    map(sigma, (x) => 1 / x),
    centered,
  ); // (36)
  const gained = diag_right(a_bar, w);
  return { mu, sigma, a_bar, a: b === null ? gained : plus(gained, tilde_rows(b, a.rows)) }; // (37), (38)
}

/** Δ_{i−1} = diag(1/(dσ)) [d G − 1 Σ_feat G − āᵗ ∘ (1 Σ_feat(āᵗ ∘ G))]ᵗ with G = diag(w) Δ_iᵗ ∈ (d, n_T)
 * @param {Matrix} delta @param {Matrix} a_bar @param {Matrix} sigma @param {Matrix} w */
export function delta_prev(delta, a_bar, sigma, w) {
  const d = w.cols;
  const g = diag_left(w, t(delta));
  const mean_part = tilde_rows(sum_tokens(g), d); // the sums are broadcast over the d rows (R19)
  const spread_part = times(t(a_bar), tilde_rows(sum_tokens(times(t(a_bar), g)), d));
  return diag_left(
    map(sigma, (x) => 1 / (d * x)),
    t(minus(minus(scaled(d, g), mean_part), spread_part)),
  ); // (40)
}

/** ∂w = diag(āᵗ Δ_i): only the diagonal, which is Σ_tok ā ∘ Δ_i @param {Matrix} delta @param {Matrix} a_bar */
export const grad_w = (delta, a_bar) => sum_tokens(times(a_bar, delta)); // (41)

/** ∂b = Σ_tok Δ_i @param {Matrix} delta */
export const grad_b = (delta) => sum_tokens(delta); // (42)
