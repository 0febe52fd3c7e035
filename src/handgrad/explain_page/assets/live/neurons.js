// @ts-check
// The neurons of a feed-forward layer with the largest blame, what they write, and what they should write, as
// views/neurons.py.

import { product, t as turned, matrix } from "../engine/matrix.js";
import { quote } from "../format.js";
import { RequestError } from "../request_error.js";
import { asWords } from "./lens.js";
import { absolute, argmax, columnOf, columnsOf, dot, norm, rowOf, rowsOf, sum, top } from "./matrices.js";
import { grouped, letterOf, percent, signal, typeset } from "./notation.js";

/** @typedef {import("./session.js").Session} Session */

const NEURONS = 8,
  WORDS = 6;

/** @param {Session} session @param {import("./session.js").Traced} sentence
 * @param {{ block: number, position?: number }} given */
export function neurons(session, sentence, { block, position }) {
  const { trace, ids } = sentence,
    { n_blocks: blocks } = session.config;
  if (!(block >= 0 && block < blocks))
    throw new RequestError(`there is no block ${block}: blocks go from 0 to ${blocks - 1}`);
  if (position !== undefined && !(position >= 0 && position < ids.length))
    throw new RequestError(`the sentence has ${ids.length} tokens: there is no position ${position}`);
  const step = session.network.find(block, "activation"),
    [contract] = session.network.readers(step.outputs[0]);
  const [a] = step.outputs,
    [x] = step.inputs;
  const [a_8, delta_8, delta_9, a_7, delta_7] = [a, signal(a), signal(contract.outputs[0]), x, signal(x)].map((name) =>
    trace.get(name),
  );
  const parts = matrix(a_8.rows, a_8.cols, a_8.data.map((value, k) => value * delta_8.data[k]));
  const blame = position === undefined ? sumOfRows(parts) : rowOf(parts, position);
  const chosen = top(absolute(blame), NEURONS);
  const model = session.modelAt(sentence.version);
  const rows = rowsOf(model.network.blocks[block].w_8, chosen);
  const seen = position === undefined ? ids.map((_, t) => t) : [position];
  const wanted = product(turned(rowsOf(columnsOf(a_8, chosen), seen)), rowsOf(delta_9, seen));
  wanted.data.forEach((value, k) => (wanted.data[k] = -value));
  const [writes, would] = [rows, wanted].map((one) => words(session, asWords(model, one)));
  const labels = session.labels(sentence);
  const found = chosen.map((j, i) => ({
    neuron: j,
    blame: blame[j],
    by_token: [...columnOf(parts, j)],
    values: [...columnOf(a_8, j)],
    inputs: { [letterOf(x)]: { values: [...columnOf(a_7, j)], push: [...columnOf(delta_7, j)].map((value) => -value) } },
    writes: writes[i],
    would_write: would[i],
    cosine: cosine(rowOf(rows, i), rowOf(wanted, i)),
  }));
  const whole = sum(absolute(blame));
  const share = whole ? sum(chosen.map((j) => Math.abs(blame[j]))) / whole : 0;
  return {
    block,
    position: position ?? null,
    tokens: labels,
    neurons: found,
    count: blame.length,
    share,
    caption: caption(found, labels, share, blame.length),
    python: `(trace['${a}'] * trace['${signal(a)}'])${position === undefined ? ".sum(0)" : `[${position}]`}`,
  };
}

/** @param {import("../engine/matrix.js").Matrix} x */
function sumOfRows(x) {
  const found = new Float64Array(x.cols);
  for (let i = 0; i < x.rows; i++) rowOf(x, i).forEach((value, j) => (found[j] += value));
  return found;
}

/** The tokens that each row makes more and less likely. @param {Session} session
 * @param {import("../engine/matrix.js").Matrix} logits */
function words(session, logits) {
  return Array.from({ length: logits.rows }, (_, i) => {
    const row = rowOf(logits, i);
    const of = (/** @type {number[]} */ ids) => ids.map((id) => ({ word: session.tokenText(id), logit: row[id] }));
    return { more: of(top(row, WORDS)), less: of(top(row.map((x) => -x), WORDS)) };
  });
}

/** @param {Float64Array} x @param {Float64Array} y */
function cosine(x, y) {
  const size = norm(x) * norm(y);
  return size ? dot(x, y) / size : 0;
}

/** @param {any[]} found @param {string[]} labels @param {number} share @param {number} count */
function caption(found, labels, share, count) {
  const [first] = found;
  if (!first.blame) return "No error reaches the neurons of this block.";
  const t = argmax(first.by_token.map(Math.abs));
  const verb = first.blame > 0 ? "raises" : "lowers";
  return (
    `${found.length} of ${grouped(count)} neurons have ${percent(share)} of the blame, summed without signs. Neuron` +
    ` ${first.neuron} ${verb} the objective most, by ${typeset(Math.abs(first.blame))} to first order, mainly` +
    ` at ${quote(labels[t])} (position ${t + 1}). It writes ${quote(first.writes.more[0].word)}; the` +
    ` gradient would have it write ${quote(first.would_write.more[0].word)}.`
  );
}
