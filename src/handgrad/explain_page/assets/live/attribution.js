// @ts-check
// Which tokens a chosen word depends on, estimated twice and measured, as views/attribution.py and inference/attribution.py.

import { matrix, minus, plus, scaled, times } from "../engine/matrix.js";
import { quote } from "../format.js";
import { RequestError } from "../request_error.js";
import { lossesOf } from "./chances.js";
import { absolute, argmax, range, rowOf, sortedDown, sum } from "./matrices.js";
import { percent, typeset } from "./notation.js";
import { tokenId } from "./objectives.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

const STEPS = 32,
  MAX_STEPS = 256,
  REMOVED = 24, // most tokens that are removed one at a time
  CONTEXT = 3; // tokens before the word that is explained by default, if the sentence is long enough

/** @param {Session} session @param {Traced} sentence
 * @param {{ position?: number, word?: number, against?: number, steps?: number }} given */
export function attribution(session, sentence, { position, word, against, steps = STEPS }) {
  const { ids, targets, objective: o } = sentence;
  const unchanged = (position === undefined || position === o.position) && word === undefined && against === undefined;
  if (o.kind === "difference" && unchanged) ({ position, token: word, against } = o);
  position ??= chosenPosition(sentence);
  if (!(position >= 0 && position < ids.length))
    throw new RequestError(`the sentence has ${ids.length} tokens: there is no position ${position}`);
  if (!(steps >= 1 && steps <= MAX_STEPS)) throw new RequestError(`steps must be between 1 and ${MAX_STEPS}, not ${steps}`);
  if (word === undefined && targets[position] < 0)
    throw new RequestError("the last token has no target: choose the word that could follow it");
  const target = word === undefined ? targets[position] : tokenId(session, word);
  const rival = against === undefined ? null : tokenId(session, against);
  if (!session.config.causal) throw new RequestError("attribution needs a causal model (causal=True)");
  const found = attribute(session, sentence.version, ids.slice(0, position + 1), target, rival, steps);
  const labels = [...ids.slice(0, position + 1), target].map((id) => session.tokenText(id));
  const rows = range(position + 1).map((t) => ({
    id: ids[t],
    label: labels[t],
    score: found.scores[t],
    integrated: found.integrated[t],
    removed: found.removed.get(t) ?? null,
  }));
  const versus = rival === null ? null : { id: rival, word: session.tokenText(rival) };
  const more = rival === null ? "" : `, against=${rival}`;
  return {
    position,
    word: { id: target, word: labels[position + 1] },
    against: versus,
    value: found.value,
    after: labels[position],
    steps,
    gap: found.gap,
    total: sum(found.integrated),
    rows,
    caption: caption(found, labels, rows, versus?.word),
    python: `hg.attribute(model, [${[...ids.slice(0, position + 1), target].join(", ")}]${more}, steps=${steps}, remove=${REMOVED})`,
  };
}

/** @param {Traced} sentence */
function chosenPosition({ objective, trace, targets }) {
  if (objective.position !== undefined) return objective.position;
  const losses = lossesOf(trace.get("a_12"), targets);
  const first = losses.length > 2 * CONTEXT ? CONTEXT : 0; // a word at the beginning depends on almost nothing
  return first + argmax(losses.slice(first));
}

/** L, the log-probability of the target after these tokens, or its logit minus that of another token; gradient · input,
 * integrated gradients with what they miss, and L minus L without a token. @param {Session} session @param {number} version
 * @param {number[]} ids @param {number} target @param {number | null} against @param {number} steps */
function attribute(session, version, ids, target, against, steps) {
  const sign = against === null ? -1 : 1;
  const objective = (/** @type {number} */ position) =>
    against === null ? { kind: "position", position, target } : { kind: "difference", position, token: target, against };
  const last = ids.length - 1;
  const pass = (/** @type {Matrix | null} */ a_1, /** @type {boolean} */ forwardOnly = false) =>
    session.run(version, ids, {
      objective: objective(last),
      forwardOnly,
      edits: new Map(a_1 ? [["blocks.0.a_1", () => a_1]] : []),
    });
  const whole = pass(null),
    a_1 = whole.get("blocks.0.a_1");
  const scores = rowSums(scaled(sign, times(whole.get("blocks.0.delta_1"), a_1)));
  const baseline = baselineOf(session.modelAt(version).network.w_tok, ids, a_1),
    way = minus(a_1, baseline);
  let total = matrix(a_1.rows, a_1.cols);
  for (let k = 0; k < steps; k++)
    total = plus(total, pass(plus(baseline, scaled((k + 0.5) / steps, way))).get("blocks.0.delta_1"));
  const integrated = rowSums(scaled(sign / steps, times(total, way)));
  const gap = sum(integrated) - sign * (whole.value - pass(baseline, true).value);
  const removed = new Map();
  for (const t of sortedDown(absolute(scores)).filter((t) => t > 0 || last > 0).slice(0, REMOVED)) {
    const left = ids.filter((_, i) => i !== t);
    const value = session.run(version, left, { objective: objective(last - 1), forwardOnly: true }).value;
    removed.set(t, sign * (whole.value - value));
  }
  return { value: sign * whole.value, scores, integrated, gap, removed };
}

/** The embeddings with the mean row of the token table in the place of every token but the first; positions stay.
 * @param {Matrix} w_tok @param {number[]} ids @param {Matrix} a_1 */
function baselineOf(w_tok, ids, a_1) {
  const mean = new Float64Array(w_tok.cols);
  for (const id of range(w_tok.rows)) rowOf(w_tok, id).forEach((x, j) => (mean[j] += x / w_tok.rows));
  const shift = (/** @type {number} */ t, /** @type {number} */ j) => (t ? mean[j] - rowOf(w_tok, ids[t])[j] : 0);
  return matrix(a_1.rows, a_1.cols, a_1.data.map((x, k) => x + shift(Math.floor(k / a_1.cols), k % a_1.cols)));
}

/** @param {Matrix} x */
const rowSums = (x) => range(x.rows).map((t) => sum(rowOf(x, t)));

/** @param {any} found @param {string[]} labels @param {any[]} rows @param {string} [versus] */
function caption({ gap, integrated }, labels, rows, versus) {
  const measured = rows.flatMap((row, t) => (row.removed === null ? [] : [t]));
  const word = quote(labels[labels.length - 1]),
    total = sum(integrated);
  const text =
    `Completeness gap of the integrated gradients: ${typeset(gap)}` +
    (total ? `, ${percent(Math.abs(gap) / Math.abs(total))} of their sum.` : ".");
  if (!measured.length) return `No token can be removed here. ${text}`;
  const t = measured.reduce((a, b) => (Math.abs(rows[b].removed) > Math.abs(rows[a].removed) ? b : a)),
    most = rows[t].removed;
  if (!most) return `Removing any one of the ${measured.length} tokens that were removed changes nothing. ${text}`;
  const what = versus ? `the logit of ${word} minus that of ${quote(versus)}` : `the log-probability of ${word}`;
  const agree = (/** @type {string} */ key, /** @type {number[]} */ which) =>
    which.filter((i) => rows[i][key] * rows[i].removed > 0).length;
  const path = measured.filter((i) => i); // the baseline of integrated gradients keeps the first token
  return (
    `Of the ${measured.length} tokens that were removed one at a time, ${quote(labels[t])} (position ${t + 1}) matters` +
    ` most: without it, ${what} ${most > 0 ? "falls" : "rises"} by ${typeset(Math.abs(most))}. The sign of gradient × input` +
    ` agrees with the measurement for ${agree("score", measured)} of ${measured.length} tokens, that of integrated` +
    ` gradients, which keep the first token, for ${agree("integrated", path)} of ${path.length}. ${text}`
  );
}
