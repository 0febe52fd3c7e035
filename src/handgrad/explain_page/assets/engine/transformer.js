// @ts-check
// Section 7: the minimal transformer. `forward` is Table 2 from top to bottom, `backward` is Table 2 from bottom to top with
// the gradients of Table 3: a block's a_10 is the next block's a_1, and its Δ_10 is the next block's Δ_1. As
// paper/transformer.py.
//
//     a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
//                                → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
//             → a_11 norm → a_12 logits → y_pred

import * as activation from "./activation.js";
import * as attention from "./attention.js";
import * as embedding from "./embedding.js";
import { EngineError } from "./errors.js";
import * as layernorm from "./layernorm.js";
import * as linear from "./linear.js";
import * as loss from "./loss.js";
import { matrix, plus, t } from "./matrix.js";
import { named, symbols } from "./model.js";
import { softmax } from "./notation.js";
import * as objectives from "./objective.js";
import { Recorder, Trace } from "./trace.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./model.js").Block} Block */
/** @typedef {import("./model.js").Config} Config */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").Network} Network */
/** @typedef {import("./objective.js").Objective} Objective */
/** @typedef {ReturnType<typeof forward_block>} BlockForward */
/** @typedef {ReturnType<typeof forward>} Forward */

// ── Table 2, forward ────────────────────────────────────────────────────────────────────────────────────────────────

/** @param {Matrix} x @param {Block} p @param {Config} o @param {number} i the number of the block @param {Recorder} record */
export function forward_block(x, p, o, i, record) {
  const { at, at_head, note } = within(record, i);
  const a_1 = at("a_1", x);
  const norm_1 = layernorm.forward(a_1, p.w_1, p.b_1, o.eps);
  note({ mu_1: norm_1.mu, sigma_1: norm_1.sigma, a_bar_1: norm_1.a_bar });
  const a_2 = at("a_2", norm_1.a); // (38)
  const heads = attention.forward_heads(a_2, p.heads, o.causal, at_head); // (34)
  const a_3 = at("a_3", heads.a);
  const a_4 = at("a_4", linear.forward(a_3, p.w_3, p.b_3));
  const a_5 = at("a_5", plus(at("skip_5", a_1), a_4));
  const norm_5 = layernorm.forward(a_5, p.w_5, p.b_5, o.eps);
  note({ mu_5: norm_5.mu, sigma_5: norm_5.sigma, a_bar_5: norm_5.a_bar });
  const a_6 = at("a_6", norm_5.a); // (38)
  const a_7 = at("a_7", linear.forward(a_6, p.w_6, p.b_6));
  const a_8 = at("a_8", activation.g(a_7, o.activation));
  const a_9 = at("a_9", linear.forward(a_8, p.w_8, p.b_8));
  const a_10 = at("a_10", plus(at("skip_10", a_5), a_9));
  return { a_1, norm_1, a_2, heads, a_3, a_4, a_5, norm_5, a_6, a_7, a_8, a_9, a_10 };
}

/** w_11, or w_tokᵗ in a tied network. (d, n_vocab) @param {Network} p */
export const head_weight = (p) => p.w_11 ?? t(p.w_tok);

/** `start`: the block to begin with, and its input; what is before is left out.
 * @param {number[]} a_0 @param {Network} p @param {Config} o @param {Recorder} record @param {{ block: number, a_1: Matrix }} [start] */
export function forward(a_0, p, o, record, start) {
  record.note("a_0", matrix(a_0.length, 1, a_0));
  const positions = a_0.map((_, t) => t);
  let a_10 = start ? start.a_1 : plus(embedding.forward(a_0, p.w_tok), embedding.forward(positions, p.w_pos)); // (2)
  /** @type {BlockForward[]} */
  const blocks = [];
  for (let i = start?.block ?? 0; i < p.blocks.length; i++) {
    blocks[i] = forward_block(a_10, p.blocks[i], o, i, record);
    a_10 = blocks[i].a_10;
  }
  const norm_10 = layernorm.forward(a_10, p.w_10, p.b_10, o.eps);
  for (const name of /** @type {const} */ (["mu", "sigma", "a_bar"])) record.note(`${name}_10`, norm_10[name]);
  const a_11 = record.at("a_11", norm_10.a); // (38)
  const a_12 = record.at("a_12", linear.forward(a_11, head_weight(p), p.b_11));
  const y_pred = softmax(a_12);
  record.note("y_pred", y_pred);
  return { a_0, positions, blocks, norm_10, a_11, a_12, y_pred };
}

// ── Table 2, backward, with Table 3 ─────────────────────────────────────────────────────────────────────────────────

/** Δ_10 of a block → its Δ_1 and the gradients of its parameters.
 * @param {Matrix} delta @param {Block} p @param {BlockForward} f @param {Config} o @param {number} i @param {Recorder} record */
export function backward_block(delta, p, f, o, i, record) {
  const { at, at_head } = within(record, i);
  const delta_10 = at("delta_10", delta);
  const delta_9 = at("delta_9", delta_10);
  const delta_8 = at("delta_8", linear.delta_prev(delta_9, p.w_8));
  const delta_7 = at("delta_7", activation.delta_prev(delta_8, f.a_7, o.activation));
  const delta_6 = at("delta_6", linear.delta_prev(delta_7, p.w_6));
  const through_5 = layernorm.delta_prev(delta_6, f.norm_5.a_bar, f.norm_5.sigma, p.w_5); // (40)
  const delta_5 = at("delta_5", plus(at("delta_skip_10", delta_10), through_5));
  const delta_4 = at("delta_4", delta_5);
  const delta_3 = at("delta_3", linear.delta_prev(delta_4, p.w_3));
  const heads = attention.backward_heads(delta_3, f.a_2, p.heads, f.heads, at_head); // (35)
  const delta_2 = at("delta_2", heads.delta);
  const through_1 = layernorm.delta_prev(delta_2, f.norm_1.a_bar, f.norm_1.sigma, p.w_1); // (40)
  const delta_1 = at("delta_1", plus(at("delta_skip_5", delta_5), through_1));
  /** @type {Block} */
  const grads = {
    w_1: layernorm.grad_w(delta_2, f.norm_1.a_bar), // (41)
    b_1: p.b_1 && layernorm.grad_b(delta_2), // (42)
    heads: heads.heads.map((head) => head.grads), // (23), (24), (31), (32)
    w_3: linear.grad_w(delta_4, f.a_3),
    b_3: p.b_3 && linear.grad_b(delta_4),
    w_5: layernorm.grad_w(delta_6, f.norm_5.a_bar), // (41)
    b_5: p.b_5 && layernorm.grad_b(delta_6), // (42)
    w_6: linear.grad_w(delta_7, f.a_6),
    b_6: p.b_6 && linear.grad_b(delta_7),
    w_8: linear.grad_w(delta_9, f.a_8),
    b_8: p.b_8 && linear.grad_b(delta_9),
  };
  return { delta_1, grads };
}

/** ∂w_tok = ohe(a_0)ᵗ Δ_1, plus Δ_12ᵗ a_11 when the head is tied: one matrix used twice gets the sum (R9)
 * @param {Matrix} delta_1 @param {Matrix} delta_12 @param {Forward} f @param {Network} p */
export function grad_w_tok(delta_1, delta_12, f, p) {
  const grad = embedding.grad_w(delta_1, f.a_0, p.w_tok.rows); // (3)
  return p.w_11 ? grad : plus(grad, t(linear.grad_w(delta_12, f.a_11)));
}

/** Δ_12 → the gradients of every parameter. @param {Matrix} delta @param {Network} p @param {Forward} f @param {Config} o
 * @param {Recorder} record @returns {Network} */
export function backward(delta, p, f, o, record) {
  const delta_12 = record.at("delta_12", delta);
  const delta_11 = record.at("delta_11", linear.delta_prev(delta_12, head_weight(p)));
  let delta_10 = layernorm.delta_prev(delta_11, f.norm_10.a_bar, f.norm_10.sigma, p.w_10); // (40)
  /** @type {Block[]} */
  const blocks = [];
  for (let i = p.blocks.length - 1; i >= 0; i--) {
    const back = backward_block(delta_10, p.blocks[i], f.blocks[i], o, i, record);
    blocks[i] = back.grads;
    delta_10 = back.delta_1;
  }
  const delta_1 = delta_10;
  return {
    w_tok: grad_w_tok(delta_1, delta_12, f, p),
    w_pos: embedding.grad_w(delta_1, f.positions, p.w_pos.rows), // (3)
    blocks,
    w_10: layernorm.grad_w(delta_11, f.norm_10.a_bar), // (41)
    b_10: p.b_10 && layernorm.grad_b(delta_11), // (42)
    w_11: p.w_11 && linear.grad_w(delta_12, f.a_11),
    b_11: p.b_11 && linear.grad_b(delta_12),
  };
}

// ── one pass ────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Run a model forward and backward on the ids of a text, and record everything. As hg.trace(model, …, edit={}).
 *
 * objective     what to differentiate; the mean loss of the sentence unless another is given
 * edits         functions by name that replace tensors
 * forwardOnly   leave the backward pass out
 * start         the block to begin with, and its input: a forward pass that shares what is before
 *
 * @param {Model} model @param {number[]} ids
 * @param {{ objective?: Objective, edits?: import("./trace.js").Edits, forwardOnly?: boolean,
 *   start?: { block: number, a_1: Matrix } }} [options] */
export function run(
  model,
  ids,
  { objective = { kind: "sentence" }, edits = new Map(), forwardOnly = false, start } = {},
) {
  const { config, network } = model;
  check_ids(ids, config, objective);
  objectives.check(objective, ids, config.n_vocab);
  if (start && !forwardOnly) throw new Error("a pass that begins in the middle is a forward pass");
  const record = new Recorder(edits);
  const f = forward(ids, network, config, record, start);
  const losses = loss.token_losses(f.a_12, loss.next_tokens(ids)).slice(0, -1);
  let grads = new Map();
  if (!forwardOnly) {
    const found = backward(objectives.delta_logits(objective, f.y_pred, ids), network, f, config, record);
    grads = named(found);
    symbols(found).forEach((x, name) => record.note(name, x));
  }
  record.check_names();
  return new Trace({
    model,
    ids,
    objective,
    losses,
    grads,
    values: record.values,
    value: objectives.forward(objective, f.a_12, ids),
    loss: losses.reduce((sum, x) => sum + x, 0) / losses.length,
  });
}

/** @param {number[]} ids @param {Config} config @param {Objective} objective */
function check_ids(ids, { n_vocab, n_context }, { kind }) {
  if (ids.length < (kind === "sentence" ? 2 : 1))
    throw new EngineError("a sentence needs at least two tokens: one to read and one to predict");
  if (ids.length > n_context)
    throw new EngineError(`${ids.length} tokens do not fit into a context of ${n_context}: shorten the sequence`);
  const wrong = ids.find((id) => !(Number.isInteger(id) && 0 <= id && id < n_vocab));
  if (wrong !== undefined) throw new EngineError(`token id ${wrong} is outside the vocabulary of ${n_vocab}`);
}

/** How block i shows its tensors. @param {Recorder} record @param {number} i */
function within(record, i) {
  const here = `blocks.${i}.`;
  return {
    at: (/** @type {string} */ name, /** @type {Matrix} */ x) => record.at(here + name, x),
    at_head: (/** @type {number} */ h) => (/** @type {string} */ name, /** @type {Matrix} */ x) =>
      record.at(here + name, x, h),
    note: (/** @type {Record<string, Matrix>} */ named) => {
      for (const [name, x] of Object.entries(named)) record.note(here + name, x);
    },
  };
}
