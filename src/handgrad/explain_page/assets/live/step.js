// @ts-check
// One optimizer step on the sentence: the loss that the gradient predicts, and the loss that is then measured, as
// views/step.py.

import { EngineError } from "../engine/errors.js";
import { takeStep } from "../engine/optimizers.js";
import { RequestError } from "../request_error.js";
import { chance, lossesOf } from "./chances.js";
import { largest } from "./matrices.js";
import { typeset } from "./notation.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */

/** Step from the sentence's version of the weights to a new one. @param {Session} session @param {Traced} sentence
 * @param {{ lr: number, optimizer?: string }} given */
export function step(session, sentence, { lr, optimizer = "SGD" }) {
  const { state, steps } = session.version(sentence.version),
    loss = sentence.trace.value;
  const made = stepped(sentence, lr, optimizer, state);
  const version = session.addVersion({ model: made.model, state: made.state, steps: steps + 1 });
  const after = session.sentence(sentence.text, version, sentence.objective),
    measured = after.trace.value;
  try {
    check(session, sentence, lr, measured);
  } catch (reason) {
    session.versions.delete(version);
    session.traced.delete(after.id);
    throw reason;
  }
  const [before, now] = [sentence, after].map(({ trace, targets }) => lossesOf(trace.get("a_12"), targets));
  return {
    id: after.id,
    version,
    steps: steps + 1,
    loss,
    predicted: loss + made.expected,
    measured,
    moves: before.map((p, t) => ({
      token: session.tokenText(sentence.ids[t]),
      target: session.tokenText(sentence.targets[t]),
      before: chance(-p),
      after: chance(-now[t]),
    })),
    rounding: Number.EPSILON * largest(sentence.trace.get("a_12").data), // a smaller change may be rounding
  };
}

/** @param {Traced} sentence @param {number} lr @param {string} optimizer @param {any} state */
function stepped({ trace }, lr, optimizer, state) {
  try {
    return takeStep(trace, lr, optimizer, state);
  } catch (reason) {
    throw reason instanceof EngineError ? new RequestError(reason.message) : reason;
  }
}

/** Raise if the loss rose beyond what can be shown. @param {Session} session @param {Traced} sentence @param {number} lr
 * @param {number} measured */
function check(session, { trace, objective }, lr, measured) {
  const rate = `a step with learning rate ${typeset(lr)}`;
  if (!Number.isFinite(measured)) throw new RequestError(`${rate} made the weights overflow: choose a smaller one`);
  if (measured <= Math.max(trace.value, 100 * Math.log(session.config.n_vocab))) return;
  const what = objective.kind === "difference" ? "the difference" : "the loss";
  throw new RequestError(`${rate} raised ${what} to ${typeset(measured)}: choose a smaller one`);
}
