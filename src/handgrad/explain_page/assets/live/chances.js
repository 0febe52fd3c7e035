// @ts-check
// Probabilities of the next token by their logarithms, and their ranks, as presentation/chances.py.

import { argmax, rowOf, top as best, sum } from "./matrices.js";

/** The logarithm of the probability of every token. @param {Float64Array} logits  of one position */
export function logChances(logits) {
  const first = argmax(logits),
    most = logits[first];
  const powers = logits.map((x) => Math.exp(x - most));
  const all = Math.log(sum(powers));
  const found = logits.map((x) => x - most - all);
  powers[first] = 0;
  const others = sum(powers); // p = 1/(1 + others), which near 1 has no digits for them
  if (others < 1) found[first] = -Math.log1p(others);
  return found;
}

/** The probability of a logarithm, above 0. @param {number} logP */
export const chance = (logP) => Math.max(Math.exp(logP), Number.MIN_VALUE);

/** The most probable tokens of a row of logarithms. @param {any} session @param {Float64Array} row @param {number} count */
export const predicted = (session, row, count) =>
  best(row, count).map((id) => ({ id, word: session.tokenText(id), p: chance(row[id]) }));

/** A target in a row of logarithms: its probability, its loss, its rank, and how many other tokens share the rank.
 * @param {any} session @param {Float64Array} row @param {number} target */
function standing(session, row, target) {
  if (target < 0) return { target: null, target_id: null, probability: null, loss: null, rank: null, ties: 0 };
  const logP = row[target];
  return {
    target: session.tokenText(target),
    target_id: target,
    probability: chance(logP),
    loss: -logP,
    rank: row.filter((x) => x > logP).length + 1,
    ties: row.filter((x) => x === logP).length - 1,
  };
}

/** A position with its token, its target if it has one, and the most probable tokens. @param {any} session
 * @param {Float64Array} row @param {number} id @param {number} target @param {number} count @returns {any} */
export const positionOf = (session, row, id, target, count) => ({
  ...standing(session, row, target),
  token: session.tokenText(id),
  top: predicted(session, row, count),
});

/** −log y_pred[target] of every row that has a target.
 * @param {import("../engine/matrix.js").Matrix} logits @param {number[]} targets */
export const lossesOf = (logits, targets) =>
  targets.flatMap((target, t) => (target < 0 ? [] : [-logChances(rowOf(logits, t))[target]]));
