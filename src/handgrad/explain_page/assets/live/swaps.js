// @ts-check
// If another token stood at a position, how would the objective change? Estimated by Δ_0 and measured, as views/swaps.py.

import { delta_one_hot } from "../engine/embedding.js";
import { matrix } from "../engine/matrix.js";
import { RequestError } from "../request_error.js";
import { aboutSwaps } from "./captions.js";
import { rowOf, top } from "./matrices.js";
import { signal } from "./notation.js";
import { valueOf } from "./objectives.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

const SWAPS = 4; // candidates per position

/** Δ_0 = Δ_1 w_tokᵗ (n, V) @param {Session} session @param {Traced} sentence */
export const relaxedSignal = (session, { trace, version }) =>
  delta_one_hot(trace.get(signal(session.network.start)), session.modelAt(version).network.w_tok);

/** Δ_0[t, j] − Δ_0[t, own] @param {Session} session @param {Traced} sentence */
export function estimates(session, sentence) {
  const delta = relaxedSignal(session, sentence);
  return matrix(delta.rows, delta.cols, delta.data.map((x, k) => {
    const t = Math.floor(k / delta.cols);
    return x - delta.data[t * delta.cols + sentence.ids[t]];
  }));
}

/** The most promising tokens of every position, and a caption; those of the best position are measured.
 * @param {Session} session @param {Traced} sentence @param {Matrix} change @returns {[any[], string]} */
export function bestSwaps(session, sentence, change) {
  const rows = sentence.ids.map((id, t) => ({ id, swaps: best(session, rowOf(change, t)) }));
  const promising = rows.flatMap(({ swaps }, t) => (swaps.length ? [t] : []));
  if (!promising.length) return [rows, "No other token would lower the objective, to first order."];
  const t = promising.reduce((a, b) => (rows[b].swaps[0].change < rows[a].swaps[0].change ? b : a));
  const [measured] = measure(session, sentence, t, rows[t].swaps);
  const [{ word, change: expected }] = rows[t].swaps;
  return [rows, aboutSwaps(session.labels(sentence), t, word, expected, measured)];
}

/** The most promising tokens of one position, measured. @param {Session} session @param {Traced} sentence
 * @param {{ position: number }} given */
export function swapsAt(session, sentence, { position }) {
  if (!(position >= 0 && position < sentence.ids.length))
    throw new RequestError(`the sentence has ${sentence.ids.length} tokens: there is no position ${position}`);
  const found = best(session, rowOf(estimates(session, sentence), position));
  const lower = measure(session, sentence, position, found).filter((change) => change < 0).length;
  const text = `${lower} of ${found.length} replacements lower the objective when they are measured.`;
  return { position, swaps: found, caption: found.length ? text : "No estimate is below 0 here." };
}

/** @param {Session} session @param {Float64Array} change @returns {any[]} */
const best = (session, change) =>
  top(change.map((x) => -x), SWAPS)
    .filter((id) => change[id] < 0)
    .map((id) => ({ id, word: session.tokenText(id), change: change[id], measured: null }));

/** Add the measured change of the objective to each swap at position t; what has to be predicted stays.
 * @param {Session} session @param {Traced} sentence @param {number} t @param {any[]} found @returns {number[]} */
function measure(session, sentence, t, found) {
  return found.map((swap) => {
    const ids = sentence.ids.map((id, i) => (i === t ? swap.id : id));
    const logits = session.run(sentence.version, ids, { forwardOnly: true }).get("a_12");
    swap.measured = valueOf(sentence.objective, logits, sentence.targets) - sentence.trace.value;
    return swap.measured;
  });
}
