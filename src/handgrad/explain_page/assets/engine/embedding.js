// @ts-check
// Section 2: embeddings, as a product with one-hot rows. Equations 1–3. As paper/embedding.py.
//
// a_{i−1}  ids (n_T)      w_emb  one row per id (n_V, d)      n_V = n_vocab for tokens, n_context for positions

import { product, t } from "./matrix.js";
import { ohe } from "./notation.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */

/** a_i = ohe(a_{i−1}) w_emb ∈ (n_T, d) @param {number[]} ids @param {Matrix} w_emb */
export const forward = (ids, w_emb) => product(ohe(ids, w_emb.rows), w_emb); // (2)

/** ∂w_emb = ohe(a_{i−1})ᵗ Δ_i ∈ (n_V, d): a token that occurs twice gets the sum of both rows of Δ_i.
 * @param {Matrix} delta @param {number[]} ids @param {number} n_rows */
export const grad_w = (delta, ids, n_rows) => product(t(ohe(ids, n_rows)), delta); // (3)

/** Δ_{i−1} = Δ_i w_embᵗ ∈ (n_T, n_V): the error signal of the one-hot input, if it were continuous.
 * @param {Matrix} delta @param {Matrix} w_emb */
export const delta_one_hot = (delta, w_emb) => product(delta, t(w_emb));
