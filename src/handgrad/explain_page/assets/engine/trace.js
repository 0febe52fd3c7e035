// @ts-check
// The tensors of one pass under the names that hg.trace gives them in Python, and edits that replace them on the way.
//
// An edited activation changes everything after it, and Δ passes it unchanged; an edited Δ changes everything below it.
// As model/inspect/trace.py and model/inspect/edits.py.

import { EngineError } from "./errors.js";
import { copy, same_shape } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** Sees a tensor and returns the one to go on with. @typedef {(name: string, x: Matrix) => Matrix} At */
/** Replaces a tensor; of one with heads, that of each head. @typedef {(x: Matrix, head?: number) => Matrix} Edit */
/** @typedef {Map<string, Edit>} Edits */

const SCORES = /\.(raw|causal)$/; // can be edited, but a trace has only ρ, from which they follow

/** Records every tensor, edited if there is an edit of its name. */
export class Recorder {
  /** @param {Edits} edits */
  constructor(edits) {
    this.edits = edits;
    /** @type {Map<string, Matrix | Matrix[]>} */
    this.values = new Map();
    /** @type {Set<string>} */
    this.seen = new Set(); // what can be edited
  }

  /** @param {string} name @param {Matrix} x @param {number} [head] */
  at(name, x, head) {
    this.seen.add(name);
    const edit = this.edits.get(name);
    if (edit) {
      const edited = edit(copy(x), head);
      if (!edited || !same_shape(edited, x))
        throw new EngineError(`the edit of ${name} must return a matrix ${x.rows} × ${x.cols}`);
      x = edited;
    }
    if (!SCORES.test(name)) this.note(name, x, head);
    return x;
  }

  /** Record a tensor that cannot be edited. @param {string} name @param {Matrix} x @param {number} [head] */
  note(name, x, head) {
    if (head === undefined) this.values.set(name, x);
    else {
      const heads = this.values.get(name) ?? [];
      if (Array.isArray(heads)) this.values.set(name, [...heads.slice(0, head), x]);
    }
  }

  /** Raise if an edit has a name that the pass did not meet. */
  check_names() {
    for (const name of this.edits.keys())
      if (!this.seen.has(name)) throw new EngineError(`there is nothing to edit at '${name}'`);
  }
}

/** The tensors of one pass.
 *
 * value    what was differentiated: what Python's trace calls loss
 * loss     the mean loss of the sentence
 * losses   of each position that has a target: all but the last
 * grads    gradients by Hugging Face's names of the parameters, vectors as 1 × d; empty after a forward pass alone
 */
export class Trace {
  /** @param {{ model: import("./model.js").Model, ids: number[], objective: import("./objective.js").Objective, value: number,
   *   loss: number, losses: number[], values: Map<string, Matrix | Matrix[]>, grads: Map<string, Matrix> }} fields */
  constructor({ model, ids, objective, value, loss, losses, values, grads }) {
    this.model = model;
    this.ids = ids;
    this.objective = objective;
    this.value = value;
    this.loss = loss;
    this.losses = losses;
    this.grads = grads;
    this.values = values;
  }

  names() {
    return [...this.values.keys()];
  }

  /** @param {string} name */
  has(name) {
    return this.values.has(name);
  }

  /** How many heads a tensor has; 0 if it is one matrix. @param {string} name */
  heads(name) {
    const found = this.values.get(name);
    return Array.isArray(found) ? found.length : 0;
  }

  /** A tensor by name; of q, k, v, ρ and their Δ that of one head. @param {string} name @param {number} [head] @returns {Matrix} */
  get(name, head) {
    const found = this.values.get(name);
    if (!found) throw new EngineError(`the trace has no '${name}'`);
    if (!Array.isArray(found)) return found;
    if (head === undefined || !found[head])
      throw new EngineError(`${name} has ${found.length} heads: choose one from 0 to ${found.length - 1}`);
    return found[head];
  }
}
