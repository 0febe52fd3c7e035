// @ts-check
// One station: its matrices, its parameters with their gradients, and at the loss every position, as views/station.py.

import { t as turned } from "../engine/matrix.js";
import { quote } from "../format.js";
import { aboutActivations, aboutError, aboutGradients, aboutLoss, aboutPush, aboutScores } from "./captions.js";
import { logChances, positionOf } from "./chances.js";
import { byHand } from "./by_hand.js";
import { absolute, columnOf, columnsOf, largest, norm, rowNorms, rowOf, rowsOf, top } from "./matrices.js";
import { isOverVocabulary } from "./network.js";
import { signal, symbol } from "./notation.js";
import { COLUMNS, picture, ROWS, statistics } from "./pictures.js";
import { bestSwaps, estimates } from "./swaps.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./network.js").Station} Station */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

const VOCABULARY_COLUMNS = 64; // of a matrix with a column for every token of the vocabulary
const VOCABULARY_ROWS = 32; // of a gradient with a row or a column for every token of the vocabulary
/** @type {Record<string, number>} */
const VOCABULARY_AXIS = { grad_w_tok: 0, grad_w_11: 1 };

/** @param {Session} session @param {Traced} sentence @param {{ station: string }} given */
export function atStation(session, sentence, { station: id }) {
  const station = session.station(id);
  /** @type {any} */
  const view = { id, maps: [], parameters: [], frozen: [], parameters_caption: "" };
  if (station.kind === "loss") {
    view.positions = positions(session, sentence);
    const targets = sentence.targets.slice(0, -1).map((target) => session.tokenText(target));
    const losses = view.positions.slice(0, -1).map((/** @type {any} */ row) => row.loss);
    view.loss_caption = aboutLoss(session.labels(sentence), targets, losses);
  }
  const deltas = station.incoming.length ? station.incoming : station.outgoing; // none arrives at the loss
  station.a.forEach((name, i) =>
    view.maps.push(activation(session, sentence, station, name), error(session, sentence, station, deltas[i])),
  );
  if (station.kind === "tokens") {
    const change = estimates(session, sentence);
    [view.swaps, view.swaps_caption] = bestSwaps(session, sentence, change);
    view.maps = [swapMap(session, sentence, change, view.swaps_caption)];
  }
  if (station.parameters.length) {
    view.parameters = station.parameters.map((parameter) => parameterOf(session, sentence, parameter));
    const of = (/** @type {string} */ field) => new Map(view.parameters.map((/** @type {any} */ p) => [p.symbol, p[field]]));
    view.parameters_caption = aboutGradients(of("grad_norm"), of("norm"));
  }
  view.by_hand = byHand(session, sentence, station);
  return view;
}

/** @param {Session} session @param {Traced} sentence @param {Station} station @param {string} name */
function activation(session, sentence, station, name) {
  const x = sentence.trace.get(name),
    labels = session.labels(sentence);
  const { matrix, part } = shown(session, sentence, x, isOverVocabulary(station));
  const what = station.kind === "loss" ? "probability" : "score";
  const caption = isOverVocabulary(station)
    ? aboutScores(x, labels, (i) => session.tokenText(i), what)
    : aboutActivations(x, labels);
  return { ...matrix, kind: "a", name, symbol: symbol(name), caption, python: `trace['${name}']${part}` };
}

/** @param {Session} session @param {Traced} sentence @param {Station} station @param {string} name */
function error(session, sentence, station, name) {
  const x = sentence.trace.get(name);
  const { matrix, part } = shown(session, sentence, x, isOverVocabulary(station));
  const caption = aboutError(x, session.labels(sentence), dependsOn(session, sentence, station));
  return { ...matrix, kind: "delta", name, symbol: symbol(name), caption, python: `trace['${name}']${part}` };
}

/** The estimated change of the objective if another token stood at a position. @param {Session} session
 * @param {Traced} sentence @param {Matrix} change @param {string} caption */
function swapMap(session, sentence, change, caption) {
  const { matrix, part } = shown(session, sentence, change, true);
  const delta = `(trace['${signal(session.network.start)}'] @ model.embed.w.T)`;
  const python = `(${delta}[:, :${change.cols}] - ${delta}.gather(1, trace['a_0'][:, None]))${part}`;
  return { ...matrix, kind: "delta", name: "swaps", symbol: "Δ₀ − Δ₀[own]", caption, python };
}

/** A matrix as the page draws it, and the index of what is drawn: of one over the vocabulary only some columns.
 * @param {Session} session @param {Traced} sentence @param {Matrix} x @param {boolean} overVocabulary */
function shown(session, sentence, x, overVocabulary) {
  const columns = overVocabulary ? vocabularyColumns(sentence, x) : null;
  const drawn = columns ? picture(columnsOf(x, columns), { limit: VOCABULARY_COLUMNS }) : picture(x);
  const matrix = {
    shape: [x.rows, x.cols],
    picture: drawn,
    vocabulary: columns ? vocabulary(session, columns) : null,
    statistics: statistics(x),
    lengths: rowNorms(x),
  };
  return { matrix, part: columns ? `[:, [${columns.join(", ")}]]` : "" };
}

/** The ids and the texts of the tokens whose columns or rows are shown. @param {Session} session @param {number[]} ids */
export const vocabulary = (session, ids, axis = 1) => ({ ids, words: ids.map((id) => session.tokenText(id)), axis });

/** The columns of a matrix over the vocabulary that are worth showing: the targets, then those with the largest entries.
 * @param {Traced} sentence @param {Matrix} x */
export function vocabularyColumns(sentence, x, most = VOCABULARY_COLUMNS) {
  const targets = [...new Set(sentence.targets.slice(0, -1))].slice(0, most);
  const size = Float64Array.from({ length: x.cols }, (_, j) => largest(columnOf(x, j)));
  for (const target of targets) size[target] = -1;
  return [...targets, ...top(size, most).filter((id) => !targets.includes(id))].slice(0, most);
}

/** A parameter and its gradient; of a gradient over the vocabulary the rows or columns of some tokens.
 * @param {Session} session @param {Traced} sentence @param {import("./network.js").Parameter} parameter */
function parameterOf(session, sentence, { symbol, gradient }) {
  const value = session.parameter(sentence.version, gradient),
    grad = sentence.trace.get(gradient),
    axis = VOCABULARY_AXIS[gradient];
  let [drawn, part] = [grad, ""],
    words = null;
  if (axis !== undefined) {
    const ids = vocabularyColumns(sentence, axis ? grad : turned(grad), VOCABULARY_ROWS);
    [drawn, part] = axis ? [columnsOf(grad, ids), `[:, [${ids.join(", ")}]]`] : [rowsOf(grad, ids), `[[${ids.join(", ")}]]`];
    words = vocabulary(session, ids, axis);
  }
  return {
    symbol,
    shape: value.rows === 1 ? [value.cols] : [value.rows, value.cols],
    norm: norm(value.data),
    name: gradient,
    grad_norm: norm(grad.data),
    picture: picture(drawn, { limit: COLUMNS / 2, rowsLimit: ROWS }),
    vocabulary: words,
    python: `trace['${gradient}']${part}`,
  };
}

/** Whether what is explained depends on a row of this station: at the end, on the rows whose targets it reads; before each
 * attention, on all rows that these can see. @param {Session} session @param {Traced} sentence @param {Station} station */
function dependsOn({ stations, config }, { ids, objective }, station) {
  const { position } = objective;
  const above = stations.slice(stations.indexOf(station) + 1).some((after) => after.kind === "attention");
  const last = above && !config.causal ? ids.length - 1 : (position ?? ids.length - 2);
  return (/** @type {number} */ row) => (above || position === undefined ? row <= last : row === last);
}

/** For every position the target, the most probable tokens, and the largest entries of Δ_12. @param {Session} session
 * @param {Traced} sentence */
function positions(session, sentence) {
  const [logits, delta] = ["a_12", "delta_12"].map((name) => sentence.trace.get(name));
  return sentence.targets.map((target, t) => {
    const row = positionOf(session, logChances(rowOf(logits, t)), sentence.ids[t], target, 5),
      changes = rowOf(delta, t);
    const strongest = top(absolute(changes), 6).filter((id) => changes[id]);
    return {
      ...row,
      push: strongest.map((id) => ({ word: session.tokenText(id), delta: changes[id], target: id === target })),
      caption: caption(session, sentence, t, row),
    };
  });
}

/** @param {Session} session @param {Traced} sentence @param {number} t @param {any} row */
function caption(session, sentence, t, row) {
  const { kind, position, token = 0, against = 0 } = sentence.objective,
    after = `After ${quote(row.token)}`;
  if (position !== undefined && position !== t)
    return `${after}: what is explained does not depend on this position, so its row of Δ₁₂ is 0.`;
  if (kind === "difference") {
    const [word, other] = [token, against].map((id) => quote(session.tokenText(id)));
    return (
      `${after}: the logit of ${word} minus that of ${other} is differentiated, so Δ₁₂ is 1 for ${word}, −1 for ${other}` +
      " and 0 for every other token."
    );
  }
  if (row.target === null) return "The last token has no target, so its row of Δ₁₂ is 0.";
  const push = Math.abs(rowOf(sentence.trace.get("delta_12"), t)[sentence.targets[t]]);
  return aboutPush(row, push, kind === "sentence" ? sentence.ids.length - 1 : 1);
}
