// @ts-check
// What the residual stream at one station would predict, and where the error pushes it, as views/lens.py.

import { delta_prev, forward } from "../engine/layernorm.js";
import * as linear from "../engine/linear.js";
import { diag_right, map, matrix, scaled } from "../engine/matrix.js";
import { head_weight } from "../engine/transformer.js";
import { RequestError } from "../request_error.js";
import { aboutLens } from "./captions.js";
import { chance, logChances, predicted } from "./chances.js";
import { rowOf, top } from "./matrices.js";
import { isStream } from "./network.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

/** Rows of the stream through the last norm and the head, and how a step along −Δ changes the logits, to first order: −Δ
 * through the derivative of the norm, which is its backward pass with the gain on the other side, and then the head.
 * @param {import("../engine/model.js").Model} model @param {Matrix} a @param {Matrix} delta */
function readStream({ network, config }, a, delta) {
  const { w_10, b_10, b_11 } = network;
  const { a: a_11, a_bar, sigma } = forward(a, w_10, b_10, config.eps);
  const change = delta_prev(scaled(-1, delta), a_bar, sigma, map(w_10, () => 1));
  const w_11 = head_weight(network);
  return { logits: linear.forward(a_11, w_11, b_11), push: linear.forward(diag_right(change, w_10), w_11, null) };
}

/** @param {import("./session.js").Session} session @param {import("./session.js").Traced} sentence
 * @param {{ station: string }} given */
export function lens(session, sentence, { station: id }) {
  const station = session.station(id),
    { trace } = sentence;
  if (!isStream(station))
    throw new RequestError("the lens reads the residual stream only: choose the embedding or a skip connection");
  const names = [station.a[0], station.incoming[0]];
  const [a, delta] = names.map((name) => trace.get(name));
  const { logits, push } = readStream(session.modelAt(sentence.version), a, delta);
  const labels = session.labels(sentence);
  const pushed = (/** @type {Float64Array} */ row, /** @type {number} */ sign) =>
    top(row.map((x) => sign * x), 5)
      .filter((id) => sign * row[id] > 0)
      .map((id) => ({ word: session.tokenText(id), change: row[id] }));
  const rows = sentence.targets.map((target, t) => {
    const row = logChances(rowOf(logits, t)),
      predictions = predicted(session, row, 5);
    const word = target < 0 ? null : session.tokenText(target),
      share = target < 0 ? null : chance(row[target]);
    return {
      predictions,
      target: word,
      share,
      towards: pushed(rowOf(push, t), 1),
      away: pushed(rowOf(push, t), -1),
      caption: aboutLens(labels[t], predictions[0].word, predictions[0].p, word, share),
    };
  });
  const python =
    "from handgrad.explain_page.views.lens import read_stream\n" +
    `logits, push = read_stream(model, trace['${names[0]}'], trace['${names[1]}'])`;
  return { station: station.id, rows, python };
}

/** Rows in the space of the stream as words: through the last norm, without its bias, and the head; any length.
 * @param {import("../engine/model.js").Model} model @param {Matrix} rows @returns {Matrix} */
export function asWords({ network, config }, rows) {
  const unit = matrix(rows.rows, rows.cols);
  for (let i = 0; i < rows.rows; i++) {
    const row = rowOf(rows, i),
      size = Math.max(Math.sqrt(row.reduce((total, x) => total + x * x, 0)), 1e-30) / Math.sqrt(rows.cols);
    unit.data.set(row.map((x) => x / size), i * rows.cols);
  }
  return linear.forward(forward(unit, network.w_10, null, config.eps).a, head_weight(network), null);
}
