// @ts-check
// Section 3: one head of causal self-attention (Table 1), and Section 4: many heads. As paper/attention.py.
//
// a_{i−1}     (n_T, d)
// w_q, w_k    (d, d_ρ)    b_q, b_k  (1, d_ρ)
// w_v         (d, d_h)    b_v       (1, d_h)      (R7)
// q, k        (n_T, d_ρ)  v, a_i^h  (n_T, d_h)
// raw, scaled, causal, ρ and their Δ   (n_T, n_T)
//
// `at` sees a tensor under its name in a trace and returns the one to go on with, so that a reader's edit has one place.

import * as linear from "./linear.js";
import { columns, concat_columns, matrix, minus, map, product, scaled, t, times, total } from "./matrix.js";
import { row_dot, softmax, sum_tokens, tilde_columns } from "./notation.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./trace.js").At} At */
/** The parameters of one head. b_k has no effect (19).
 * @typedef {{ w_q: Matrix, b_q: Matrix | null, w_k: Matrix, b_k: Matrix | null, w_v: Matrix, b_v: Matrix | null }} Head */
/** `softmax` is ρ before an edit: its derivative is taken there.
 * @typedef {{ q: Matrix, k: Matrix, v: Matrix, softmax: Matrix, rho: Matrix, a: Matrix }} Forward */
/** @typedef {{ delta: Matrix, grads: Head }} Backward */

/** ρ_scaled = ρ_raw / √d_ρ; the backward pass divides by it too. @param {Matrix} raw @param {number} d_rho */
export const scale = (raw, d_rho) => scaled(1 / Math.sqrt(d_rho), raw); // (12), (28)

/** −∞ above the diagonal. The 0/1 product printed as (13) leaves exp(0) = 1 on every future token (R1). @param {Matrix} s */
export function mask(s) {
  const out = matrix(s.rows, s.cols, s.data.slice());
  for (let i = 0; i < s.rows; i++) out.data.fill(-Infinity, i * s.cols + i + 1, (i + 1) * s.cols); // (13)
  return out;
}

/** a_i^h = softmax(mask(q kᵗ / √d_ρ)) v   (18) @param {Matrix} a @param {Head} head @param {boolean} causal @param {At} at
 * @returns {Forward} */
export function forward(a, head, causal, at) {
  const q = at("q", linear.forward(a, head.w_q, head.b_q)); // (9.a)
  const k = at("k", linear.forward(a, head.w_k, head.b_k)); // (9.b)
  const v = at("v", linear.forward(a, head.w_v, head.b_v)); // (4)
  const raw = at("raw", product(q, t(k))); // (10)
  const scaled = scale(raw, q.cols); // (12)
  const masked = at("causal", causal ? mask(scaled) : scaled); // (13)
  const weights = softmax(masked); // (15)
  const rho = at("rho", weights);
  return { q, k, v, softmax: weights, rho, a: product(rho, v) }; // (16)
}

/** Δ_causal = [Δ_ρ − ~(Δ_ρ ⊖ ρ)] ∘ ρ with Δ_ρ = Δ_i^h vᵗ. Each row sums to 0 (26). @param {Matrix} delta_rho @param {Matrix} rho */
export const delta_causal = (delta_rho, rho) =>
  times(minus(delta_rho, tilde_columns(row_dot(delta_rho, rho), rho.cols)), rho); // (25)

/** Δ_i^h (n_T, d_h) → Δ^h_{i−1} (n_T, d) and the gradients of the head's parameters. Here Δ_v, Δ_q and Δ_k are the error
 * signals of v, q and k, as in a trace; times w_vᵗ, w_qᵗ and w_kᵗ they are the paper's three branches.
 * @param {Matrix} delta @param {Matrix} a @param {Head} head @param {Forward} saved @param {At} at @returns {Backward} */
export function backward(delta, a, head, saved, at) {
  const { q, k, v, softmax, rho } = saved;

  // values:  Δ·da = (Δ vᵗ)·dρ + (ρᵗ Δ)·dv
  const delta_v = at("delta_v", product(t(rho), delta)); // (22)

  // attention weights: softmax, mask, scale. ρ is already 0 where the mask is, so Δ_scaled = Δ_causal (R2).
  const delta_rho = at("delta_rho", product(delta, t(v)));
  const causal = at("delta_causal", delta_causal(delta_rho, softmax)); // (25)
  const delta_scaled = causal; // (27)
  const delta_raw = at("delta_raw", scale(delta_scaled, q.cols)); // (28)

  // queries and keys:  Δ_raw·d(q kᵗ) = (Δ_raw k)·dq + (Δ_rawᵗ q)·dk
  const delta_q = at("delta_q", product(delta_raw, k)); // (30.a)
  const delta_k = at("delta_k", product(t(delta_raw), q)); // (30.b)

  const grads = {
    w_q: linear.grad_w(delta_q, a), // (31.a)
    b_q: head.b_q && sum_tokens(delta_q), // (32.a)
    w_k: linear.grad_w(delta_k, a), // (31.b)
    b_k: head.b_k && map(head.b_k, () => 0), // (32.b): exactly 0, by (29); R32
    w_v: linear.grad_w(delta_v, a), // (23)
    b_v: head.b_v && sum_tokens(delta_v), // (24), by (21)
  };
  const branches = [
    linear.delta_prev(delta_v, head.w_v),
    linear.delta_prev(delta_q, head.w_q),
    linear.delta_prev(delta_k, head.w_k),
  ];
  return { delta: total(branches), grads }; // (33)
}

// ── many heads ──────────────────────────────────────────────────────────────────────────────────────────────────────

/** @typedef {{ heads: Forward[], a: Matrix }} ManyForward */
/** @typedef {{ heads: Backward[], delta: Matrix }} ManyBackward */
/** @typedef {(h: number) => At} AtHead */

/** a_i = concat_columns[a_i^1 … a_i^{n_h}]: independent heads on the same input.
 * @param {Matrix} a @param {Head[]} heads @param {boolean} causal @param {AtHead} at @returns {ManyForward} */
export function forward_heads(a, heads, causal, at) {
  const outs = heads.map((head, h) => forward(a, head, causal, at(h)));
  return { heads: outs, a: concat_columns(outs.map((out) => out.a)) }; // (34)
}

/** Δ_i split into the columns of each head, Δ_i^h ∈ (n_T, d_h) @param {Matrix} delta @param {Head[]} heads */
export function slice_heads(delta, heads) {
  let from = 0;
  return heads.map((head) => columns(delta, from, (from += head.w_v.cols)));
}

/** Δ_{i−1} = Σ_h Δ^h_{i−1} @param {Matrix} delta @param {Matrix} a @param {Head[]} heads @param {ManyForward} saved
 * @param {AtHead} at @returns {ManyBackward} */
export function backward_heads(delta, a, heads, saved, at) {
  const slices = slice_heads(delta, heads);
  const backs = heads.map((head, h) => backward(slices[h], a, head, saved.heads[h], at(h)));
  return { heads: backs, delta: total(backs.map((back) => back.delta)) }; // (35)
}
