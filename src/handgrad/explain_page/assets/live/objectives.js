// @ts-check
// What is differentiated: from a request of the page, in words, and its value, as session/objectives.py.

import { quote } from "../format.js";
import { RequestError } from "../request_error.js";
import { lossesOf } from "./chances.js";
import { grouped, quoted } from "./notation.js";
import { rowOf, sum, top } from "./matrices.js";

/** @typedef {{ kind: string, position?: number, token?: number, against?: number }} Objective */

/** @type {Objective} */
export const SENTENCE = { kind: "sentence" };
const KINDS = ["sentence", "position", "difference"];

/** The objective that a request means; the token of a difference is the most probable one unless it is given.
 * @param {any} session @param {string} text @param {number} version @param {any} wanted @returns {Objective} */
export function objectiveOf(session, text, version, wanted) {
  const { kind = "sentence", position } = wanted;
  if (!KINDS.includes(kind)) throw new RequestError(`unknown objective '${kind}': choose one of ${KINDS.join(", ")}`);
  if (kind === "sentence") return SENTENCE;
  if (!Number.isInteger(position)) throw new RequestError("the objective needs the position of a token, counted from 0");
  const ids = session.encode(text);
  if (position < 0 || position >= ids.length)
    throw new RequestError(`the sentence has ${ids.length} tokens: there is no position ${position}`);
  if (kind === "position") {
    if (position === ids.length - 1)
      throw new RequestError(`position ${position} has no target, so there is no loss: choose another position`);
    return { kind, position };
  }
  if (wanted.against === undefined || wanted.against === null)
    throw new RequestError("a difference needs the word to compare with: against");
  const against = tokenId(session, wanted.against);
  const best = () => top(rowOf(session.sentence(text, version).trace.get("a_12"), position), 2).find((id) => id !== against);
  const token = wanted.token === undefined || wanted.token === null ? best() : tokenId(session, wanted.token);
  if (token === against)
    throw new RequestError(`token and against are both ${token}: the difference is 0; choose two tokens`);
  return { kind, position, token, against };
}

/** The id of a token that is given as an id, or as a text whose first token is meant. @param {any} session
 * @param {any} token @returns {number} */
export function tokenId(session, token) {
  if (Number.isInteger(token)) {
    const { n_vocab: n } = session.config;
    if (token < 0 || token >= n) throw new RequestError(`token id ${token} is outside the vocabulary of ${grouped(n)}`);
    return token;
  }
  if (typeof token !== "string" || !token || token.length > 200)
    throw new RequestError("a token is given as its id or as a text of at most 200 characters");
  const [id] = session.idsOf(token);
  if (id === undefined) throw new RequestError(`the tokenizer finds no token in ${quoted(token)}`);
  return id;
}

/** The value of an objective, from the logits. @param {Objective} objective @param {import("../engine/matrix.js").Matrix} logits
 * @param {number[]} targets */
export function valueOf({ kind, position = 0, token = 0, against = 0 }, logits, targets) {
  if (kind === "difference") return rowOf(logits, position)[token] - rowOf(logits, position)[against];
  const losses = lossesOf(logits, targets);
  return kind === "position" ? losses[position] : sum(losses) / losses.length;
}

/** The objective as the page shows it, with its value. @param {any} session @param {any} sentence @returns {any} */
export function describe(session, sentence) {
  const { kind, position, token, against } = sentence.objective;
  const word = (/** @type {number} */ id) => ({ id, word: session.tokenText(id) });
  const found = {
    kind,
    position: position ?? null,
    token: kind === "difference" ? word(token) : null,
    against: kind === "difference" ? word(against) : null,
    value: sentence.trace.value,
    label: "the mean loss of the sentence",
    python: "hg.trace(model, tokens, targets)",
  };
  if (kind === "sentence") return found;
  const place = `after ${quote(session.tokenText(sentence.ids[position]))} (position ${position + 1})`;
  const [first, second] = [found.token, found.against].map((x) => x && quote(x.word));
  found.label =
    kind === "difference"
      ? `the logit of ${first} minus that of ${second}, ${place}`
      : `the loss of ${quote(session.tokenText(sentence.targets[position]))}, ${place}`;
  found.python = `hg.trace(model, tokens, targets, objective=hg.${inPython(sentence.objective)})`;
  return found;
}

/** LogitDifference(position=3, token=5, against=7) @param {Objective} objective */
export function inPython({ kind, position, token, against }) {
  if (kind === "position") return `PositionLoss(position=${position})`;
  return `LogitDifference(position=${position}, token=${token}, against=${against})`;
}

/** The first row that the objective does not depend on. @param {any} sentence */
export const rowsAfter = ({ ids, objective }) => (objective.position === undefined ? ids.length - 1 : objective.position + 1);

/** Why the error signal of these rows is 0. @param {any} sentence */
export function aboutRowsAfter(sentence) {
  if (sentence.objective.kind === "sentence") return "the last row is 0, because the last token has no target";
  return `the rows after position ${rowsAfter(sentence)} are 0: the objective does not depend on them`;
}
