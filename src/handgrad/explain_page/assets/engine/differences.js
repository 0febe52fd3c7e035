// @ts-check
// The formulas checked on the spot: every error signal and gradient against finite differences of the objective, and
// identities that hold for any numbers. As proof/oracles.py and explain_page/proofs/checks.py.
//
// Along a direction u, ⟨∂, u⟩ is predicted and (L(x + εu) − L(x − εu))/2ε is measured; only forward passes measure.

import { EngineError } from "./errors.js";
import { map, matrix, plus, scaled, t } from "./matrix.js";
import { loadModel } from "./model.js";
import { frobenius, sum_tokens } from "./notation.js";
import { run } from "./transformer.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./trace.js").Trace} Trace */
/** `error` is |predicted − measured| relative to ‖∂‖, or to a share of the largest ‖∂‖ of its kind.
 * @typedef {{ name: string, predicted: number, measured: number, step: number, error: number, limit: number,
 *   passed: boolean }} Difference */
/** @typedef {{ name: string, what: string, error: number, limit: number, passed: boolean }} Identity */
/** @typedef {() => number} Random  a number of the normal distribution */

// As in tolerances.py
const LIMIT = 1e-6;
const RELU_LIMIT = 1e-4; // the step must be small enough not to cross a kink, so rounding is larger
const STEPS = [1e-3, 1e-4, 1e-5, 1e-6]; // the best one depends on the curvature; a wrong gradient agrees with none
const RELU_STEPS = [1e-6];
const DIFFERENCE_FLOOR = 1e-3;
const IDENTITY_LIMIT = 1e-10;

/** Normal random numbers that are the same for the same seed. @param {number} seed @returns {Random} */
export function normal(seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return (((x ^ (x >>> 14)) >>> 0) + 0.5) / 2 ** 32;
  };
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}

/** The error signals of a trace. @param {Trace} trace */
export const signals = (trace) => trace.names().filter((name) => /(^|\.)delta_/.test(name));

/** What an error signal is the derivative by: delta_5 → a_5, delta_rho → rho, delta_skip_5 → skip_5. @param {string} name */
export const activation_of = (name) => name.replace(/delta_(\d+)$/, "a_$1").replace("delta_", "");

/** Check one error signal of a trace without edits.
 * @param {Trace} trace @param {string} name @param {Random} random @returns {Difference} */
export function check_signal(trace, name, random) {
  const { model, ids, objective } = trace;
  const claimed = parts(trace, name);
  const start = from_block(trace, name);
  const f = (/** @type {Matrix[]} */ moved) => {
    const edits = new Map([[activation_of(name), (/** @type {Matrix} */ x, head = 0) => plus(x, moved[head])]]);
    return run(model, ids, { objective, edits, forwardOnly: true, start }).value;
  };
  const largest = Math.max(...signals(trace).map((one) => length(parts(trace, one))));
  return compare(name, f, claimed, random, largest, model.config.activation);
}

/** Check the gradients of several parameters together, by Hugging Face's names. @param {Trace} trace @param {string[]} names
 * @param {Random} random @returns {Difference} */
export function check_parameters(trace, names, random) {
  const { model, ids, objective } = trace;
  const claimed = names.map((name) => trace.grads.get(name) ?? fail(`there is no gradient of '${name}'`));
  const before = /** @type {Matrix[]} */ (names.map((name) => model.weights.get(name)));
  const blocks = names.map((name) => from_block(trace, name.replace("transformer.h.", "blocks.")));
  const start = blocks.includes(undefined) ? undefined : blocks.reduce((x, y) => (x && y && x.block < y.block ? x : y));
  const f = (/** @type {Matrix[]} */ moved) => {
    const weights = new Map(model.weights);
    names.forEach((name, i) => weights.set(name, plus(before[i], moved[i])));
    return run(loadModel(model.config, weights), ids, { objective, forwardOnly: true, start }).value;
  };
  const largest = Math.max(...[...trace.grads.values()].map((grad) => length([grad])));
  return compare(names.join(", "), f, claimed, random, largest, model.config.activation);
}

/** Compare ⟨∂, u⟩ with differences of f along u: a random direction plus that of ∂, because along an orthogonal one the
 * derivative would be mere rounding. @param {string} name @param {(moved: Matrix[]) => number} f @param {Matrix[]} claimed
 * @param {Random} random @param {number} largest @param {string} activation @returns {Difference} */
function compare(name, f, claimed, random, largest, activation) {
  const noise = claimed.map((part) => map(part, random));
  const [of_noise, size] = [length(noise), length(claimed)];
  const u = claimed.map((part, k) => plus(scaled(1 / of_noise, noise[k]), scaled(size ? 1 / size : 0, part)));
  const predicted = u.reduce((sum, part, k) => sum + frobenius(part, claimed[k]), 0);
  const scale = Math.max(size, DIFFERENCE_FLOOR * largest) || 1;
  const relu = activation === "relu";
  const limit = relu ? RELU_LIMIT : LIMIT;
  let best = { measured: NaN, step: NaN, error: Infinity };
  for (const step of relu ? RELU_STEPS : STEPS) {
    const [up, down] = [step, -step].map((s) => f(u.map((part) => scaled(s, part))));
    const measured = (up - down) / (2 * step);
    const error = Math.abs(predicted - measured) / scale;
    if (error < best.error) best = { measured, step, error };
    if (error < limit / 10) break;
  }
  return { name, predicted, ...best, limit, passed: best.error <= limit };
}

/** Identities that hold for any numbers, each with the tensor that it is about. @param {Trace} trace @returns {Identity[]} */
export function identities(trace) {
  const { model, ids, objective } = trace;
  const { network, config } = model;
  /** @type {Identity[]} */
  const found = [];
  const add = (/** @type {string} */ name, /** @type {string} */ what, /** @type {number} */ error) =>
    found.push({ name, what, error, limit: IDENTITY_LIMIT, passed: error <= IDENTITY_LIMIT });
  const rows_are_0 = (/** @type {string} */ name, floor = 0) =>
    add(name, "each row sums to 0", largest_row_sum(parts(trace, name), floor));
  rows_are_0("delta_12");
  network.blocks.forEach((_, i) => {
    const here = `blocks.${i}.`;
    for (const name of ["delta_10", "delta_5", "delta_1"]) rows_are_0(here + name); // a LayerNorm ignores shifts of a row
    const size = largest_entry([trace.get(`${here}delta_3`)]) * largest_entry(parts(trace, `${here}v`));
    add(
      `${here}delta_causal`,
      "each row sums to 0 (26)",
      largest_row_sum(parts(trace, `${here}delta_causal`), 1e-4 * size),
    );
    const rho = parts(trace, `${here}rho`);
    add(
      `${here}rho`,
      "each row sums to 1 (14)",
      largest_entry(rho.map((x) => map(sum_tokens(t(x)), (sum) => sum - 1))),
    );
    if (config.causal) add(`${here}rho`, "0 above the diagonal", largest_entry(rho.map(above)));
    const columns = parts(trace, `${here}delta_k`).map(t); // ∂b_k is 0 as it stands, because its terms always cancel
    if (network.blocks[i].heads[0].b_k)
      add(`${here}delta_k`, "each column sums to 0, so ∂b_k is 0 (29)", largest_row_sum(columns, 1e-4 * size));
  });
  if (!network.w_11) add("grad_w_tok", "the sum of the gradients of both uses (R9)", tied_error(trace));
  const after = objective.kind === "sentence" ? ids.length - 1 : objective.position + 1;
  if (config.causal && after < ids.length)
    for (const name of signals(trace).filter((one) => !trace.heads(one)))
      add(name, about_rows_after(objective), largest_entry([below(trace.get(name), after)]));
  return found;
}

/** Why the error signal of the last rows is 0. @param {import("./objective.js").Objective} objective */
const about_rows_after = (objective) =>
  objective.kind === "sentence"
    ? "the last row is 0, because the last token has no target"
    : `the rows after position ${objective.position + 1} are 0: the objective does not depend on them`;

/** Relative error of ∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11, summed token by token. @param {Trace} trace */
function tied_error({ ids, grads, ...trace }) {
  const get = (/** @type {string} */ name) => /** @type {Matrix} */ (trace.values.get(name));
  const [delta_1, delta_12, a_11] = ["blocks.0.delta_1", "delta_12", "a_11"].map(get);
  const grad = /** @type {Matrix} */ (grads.get("transformer.wte.weight"));
  const rest = grad.data.slice();
  const d = grad.cols;
  ids.forEach((id, row) => {
    for (let j = 0; j < d; j++) rest[id * d + j] -= delta_1.data[row * d + j];
    for (let v = 0; v < grad.rows; v++)
      for (let j = 0; j < d; j++) rest[v * d + j] -= delta_12.data[row * grad.rows + v] * a_11.data[row * d + j];
  });
  return largest_entry([matrix(1, rest.length, rest)]) / (largest_entry([grad]) || 1);
}

/** A tensor as a list of matrices: one, or those of the heads. @param {Trace} trace @param {string} name */
const parts = (trace, name) =>
  trace.heads(name) ? Array.from({ length: trace.heads(name) }, (_, h) => trace.get(name, h)) : [trace.get(name)];

/** The block in which a tensor is, and its input; what is before does not change with the tensor. Undefined if that is all.
 * @param {Trace} trace @param {string} name */
function from_block(trace, name) {
  const found = /^blocks\.(\d+)\./.exec(name);
  const n = trace.model.config.n_blocks;
  if (found) return { block: Number(found[1]), a_1: trace.get(`blocks.${found[1]}.a_1`) };
  return /^transformer\.w[tp]e\./.test(name) ? undefined : { block: n, a_1: trace.get(`blocks.${n - 1}.a_10`) };
}

/** @param {Matrix[]} x */
const length = (x) => Math.sqrt(x.reduce((sum, part) => sum + frobenius(part, part), 0));

/** @param {Matrix[]} x */
const largest_entry = (x) =>
  Math.max(...x.map((part) => part.data.reduce((most, entry) => Math.max(most, Math.abs(entry)), 0)));

/** The largest |row sum|, relative to the largest sum of |entries| of a row or to `floor`.
 * @param {Matrix[]} x @param {number} floor */
function largest_row_sum(x, floor) {
  const sums = largest_entry(x.map((part) => sum_tokens(t(part))));
  return sums / Math.max(largest_entry(x.map((part) => sum_tokens(t(map(part, Math.abs))))), floor, 1e-300);
}

/** @param {Matrix} x */
const above = (x) =>
  matrix(
    x.rows,
    x.cols,
    x.data.map((entry, i) => (i % x.cols > Math.floor(i / x.cols) ? entry : 0)),
  );

/** The rows from this one on. @param {Matrix} x @param {number} row */
const below = (x, row) => matrix(x.rows - row, x.cols, x.data.slice(row * x.cols));

/** @param {string} message @returns {never} */
function fail(message) {
  throw new EngineError(message);
}
