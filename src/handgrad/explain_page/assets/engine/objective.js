// @ts-check
// What is differentiated, and its Δ_12: the mean loss of the sentence, the loss of one target, or a difference of logits.
// As model/passes/objective.py. 1/(number of targets) enters here and nowhere else.

import { EngineError } from "./errors.js";
import * as loss from "./loss.js";
import { matrix, scaled } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** `target` is the token whose loss is meant, if not the one that follows in the text.
 * @typedef {{ kind: "sentence" } | { kind: "position", position: number, target?: number }
 *   | { kind: "difference", position: number, token: number, against: number }} Objective */

/** Raise if an objective does not fit the tokens. @param {Objective} objective @param {number[]} ids @param {number} n_vocab */
export function check(objective, ids, n_vocab) {
  if (objective.kind === "sentence") return;
  const { kind, position } = objective;
  if (kind !== "position" && kind !== "difference")
    throw new EngineError(`unknown objective '${kind}': choose one of sentence, position, difference`);
  const inside = (/** @type {number} */ x, /** @type {number} */ end) => Number.isInteger(x) && 0 <= x && x < end;
  if (!inside(position, ids.length))
    throw new EngineError(`position must be a row from 0 to ${ids.length - 1}, not ${position}`);
  if (kind === "position" && objective.target === undefined && position === ids.length - 1)
    throw new EngineError(`position ${position} has no target, so there is no loss: choose another position`);
  if (kind === "position") return;
  const { token, against } = objective;
  for (const [name, id] of /** @type {[string, number][]} */ (Object.entries({ token, against })))
    if (!inside(id, n_vocab)) throw new EngineError(`${name} must be a token id from 0 to ${n_vocab - 1}, not ${id}`);
  if (token === against)
    throw new EngineError(`token and against are both ${token}: the difference is 0; choose two tokens`);
}

/** The targets that an objective reads. @param {Objective} objective @param {number[]} ids */
function select(objective, ids) {
  const targets = loss.next_tokens(ids);
  if (objective.kind !== "position") return targets;
  return targets.map((id, t) => (t === objective.position ? (objective.target ?? id) : loss.NO_TARGET));
}

/** @param {number[]} targets */
const count = (targets) => targets.filter((id) => id !== loss.NO_TARGET).length;

/** The number that is differentiated. @param {Objective} objective @param {Matrix} a_12 @param {number[]} ids */
export function forward(objective, a_12, ids) {
  if (objective.kind === "difference") {
    const row = objective.position * a_12.cols;
    return a_12.data[row + objective.token] - a_12.data[row + objective.against];
  }
  const targets = select(objective, ids);
  return loss.forward(a_12, targets) / count(targets);
}

/** Δ_12 @param {Objective} objective @param {Matrix} y_pred @param {number[]} ids */
export function delta_logits(objective, y_pred, ids) {
  if (objective.kind === "difference") {
    const delta = matrix(y_pred.rows, y_pred.cols);
    delta.data[objective.position * y_pred.cols + objective.token] = 1;
    delta.data[objective.position * y_pred.cols + objective.against] = -1;
    return delta;
  }
  const targets = select(objective, ids);
  return scaled(1 / count(targets), loss.delta_logits(y_pred, targets));
}
