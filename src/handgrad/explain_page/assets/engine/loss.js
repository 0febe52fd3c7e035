// @ts-check
// Section 1: softmax with cross-entropy over the next token. As paper/loss.py.
//
// a_12  logits (n_T, n_vocab)      targets  ids (n_T)      NO_TARGET where a row has none: at least the last one (R5)

import { diag_left, matrix, minus } from "./matrix.js";
import { ohe } from "./notation.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */

export const NO_TARGET = -100;

/** The target of position t is the id at the next position, not the id plus one (R6). The last row has none. @param {number[]} a_0 */
export const next_tokens = (a_0) => [...a_0.slice(1), NO_TARGET];

/** One-hot targets; the row of a token without a target is zero. (n_T, n_vocab) @param {number[]} targets @param {number} n_vocab */
export const y_gt = (targets, n_vocab) => ohe(targets, n_vocab);

/** ℓ = −y_gt ⊖ log y_pred, zero where there is no target. @param {Matrix} a_12 @param {number[]} targets */
export function token_losses(a_12, targets) {
  return targets.map((target, t) => {
    if (target === NO_TARGET) return 0;
    const row = a_12.data.subarray(t * a_12.cols, (t + 1) * a_12.cols);
    const most = row.reduce((x, y) => Math.max(x, y), -Infinity);
    return most + Math.log(row.reduce((sum, x) => sum + Math.exp(x - most), 0)) - row[target];
  });
}

/** L_seq = Σ_t ℓ(t) over the rows that have a target (R5) @param {Matrix} a_12 @param {number[]} targets */
export const forward = (a_12, targets) => token_losses(a_12, targets).reduce((sum, x) => sum + x, 0);

/** Δ_12 = y_pred − y_gt on the rows that have a target, 0 on the others (R5) @param {Matrix} y_pred @param {number[]} targets */
export function delta_logits(y_pred, targets) {
  const has_target = matrix(
    targets.length,
    1,
    targets.map((target) => (target === NO_TARGET ? 0 : 1)),
  );
  return diag_left(has_target, minus(y_pred, y_gt(targets, y_pred.cols)));
}
