// @ts-check
// Fully connected layer: a_{i−1} (n_T, f_in), w (f_in, f_out), b (1, f_out), a_i (n_T, f_out). As paper/linear.py.

import { plus, product, t } from "./matrix.js";
import { sum_tokens, tilde_rows } from "./notation.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */

/** a_i = a_{i−1} w + b~ @param {Matrix} a @param {Matrix} w @param {Matrix | null} b */
export const forward = (a, w, b) => (b === null ? product(a, w) : plus(product(a, w), tilde_rows(b, a.rows)));

/** Δ_{i−1} = Δ_i wᵗ @param {Matrix} delta @param {Matrix} w */
export const delta_prev = (delta, w) => product(delta, t(w));

/** ∂w = a_{i−1}ᵗ Δ_i @param {Matrix} delta @param {Matrix} a */
export const grad_w = (delta, a) => product(t(a), delta);

/** ∂b = Σ_tok Δ_i @param {Matrix} delta */
export const grad_b = (delta) => sum_tokens(delta);
