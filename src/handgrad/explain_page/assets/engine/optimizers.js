// @ts-check
// One step of gradient descent or of Adam: a trace's model → a new one. As views/step.py, with torch.optim's formulas.
//
//     SGD    w − η ∂
//     Adam   w − η m̂ / (√v̂ + ε)      m = β₁ m + (1 − β₁) ∂      v = β₂ v + (1 − β₂) ∂²      m̂ = m/(1 − β₁ᵗ)      v̂ = v/(1 − β₂ᵗ)

import { EngineError } from "./errors.js";
import { matrix } from "./matrix.js";
import { loadModel } from "./model.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** What an optimizer remembers from step to step: of Adam, m and v of every parameter.
 * @typedef {{ optimizer: string, steps: number, moments: Map<string, { m: Float64Array, v: Float64Array }> }} State */

const BETAS = [0.9, 0.99];
const EPS = 1e-8;
const KINDS = { SGD: sgd, Adam: adam };

/** Step down the gradients of a trace. Returns the new model, the state for the next step, and ⟨∂, step⟩, the change of what
 * was differentiated to first order. The state of another optimizer is forgotten. A rate that is too large ends in infinite
 * weights and values that are NaN, not in an error.
 * @param {import("./trace.js").Trace} trace @param {number} lr @param {string} [optimizer] @param {State | null} [state] */
export function takeStep(trace, lr, optimizer = "SGD", state = null) {
  if (!Object.hasOwn(KINDS, optimizer)) throw new EngineError(`unknown optimizer '${optimizer}': choose SGD or Adam`);
  if (!(0 < lr && lr <= 100)) throw new EngineError(`the learning rate must be above 0 and at most 100, not ${lr}`);
  if (!trace.grads.size) throw new EngineError("a forward pass has no gradients: run the model without forwardOnly");
  const before = state?.optimizer === optimizer ? state : { optimizer, steps: 0, moments: new Map() };
  const after = { optimizer, steps: before.steps + 1, moments: new Map() };
  const weights = new Map();
  let expected = 0;
  for (const [name, w] of trace.model.weights) {
    const grad = /** @type {Matrix} */ (trace.grads.get(name));
    const next = KINDS[/** @type {keyof typeof KINDS} */ (optimizer)](name, w.data, grad.data, lr, before, after);
    for (let i = 0; i < next.length; i++) expected += grad.data[i] * (next[i] - w.data[i]);
    weights.set(name, matrix(w.rows, w.cols, next));
  }
  return { model: loadModel(trace.model.config, weights), state: after, expected };
}

/** @param {string} name @param {Float64Array} w @param {Float64Array} grad @param {number} lr */
function sgd(name, w, grad, lr) {
  return w.map((x, i) => x - lr * grad[i]);
}

/** @param {string} name @param {Float64Array} w @param {Float64Array} grad @param {number} lr @param {State} before @param {State} after */
function adam(name, w, grad, lr, before, after) {
  const [beta1, beta2] = BETAS;
  const zeros = () => new Float64Array(w.length);
  const old = before.moments.get(name) ?? { m: zeros(), v: zeros() };
  const m = old.m.map((x, i) => beta1 * x + (1 - beta1) * grad[i]);
  const v = old.v.map((x, i) => beta2 * x + (1 - beta2) * grad[i] * grad[i]);
  after.moments.set(name, { m, v });
  const [correction1, correction2] = BETAS.map((beta) => 1 - beta ** after.steps);
  return w.map((x, i) => x - (lr * (m[i] / correction1)) / (Math.sqrt(v[i] / correction2) + EPS));
}
