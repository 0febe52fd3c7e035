// @ts-check
// The weights of a model under Hugging Face's names, and the same as the parameters of the paper's network; and back.
//
//     transformer.h.0.attn.c_attn.weight = [w_q of all heads | w_k of all heads | w_v of all heads]      lm_head.weight = w_11ᵗ

import { EngineError } from "./errors.js";
import { columns, concat_columns, t } from "./matrix.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./attention.js").Head} Head */
/** @typedef {{ n_vocab: number, n_context: number, d_model: number, n_heads: number, n_blocks: number, d_hidden: number,
 *   d_rho: number, d_head: number, activation: import("./activation.js").Name, eps: number, causal: boolean, tied: boolean,
 *   key_bias: boolean }} Config */
/** Parameters of a block, or their gradients. What a model does not have is null.
 * @typedef {{ w_1: Matrix, b_1: Matrix | null, heads: Head[], w_3: Matrix, b_3: Matrix | null, w_5: Matrix, b_5: Matrix | null,
 *   w_6: Matrix, b_6: Matrix | null, w_8: Matrix, b_8: Matrix | null }} Block */
/** Parameters of the network, or their gradients. Without w_11 the head is tied: w_11 = w_tokᵗ (R9).
 * @typedef {{ w_tok: Matrix, w_pos: Matrix, blocks: Block[], w_10: Matrix, b_10: Matrix | null, w_11: Matrix | null,
 *   b_11: Matrix | null }} Network */
/** @typedef {{ config: Config, weights: Map<string, Matrix>, network: Network }} Model */

/** The layers of a block: the number of their parameters, and their names. */
const LAYERS = { 1: "ln_1", 3: "attn.c_proj", 5: "ln_2", 6: "mlp.c_fc", 8: "mlp.c_proj" };
const LETTERS = /** @type {("q" | "k" | "v")[]} */ (["q", "k", "v"]);

/** @param {Config} config @param {Map<string, Matrix>} weights @returns {Model} */
export function loadModel(config, weights) {
  const of = (/** @type {string} */ name) => {
    const found = weights.get(name);
    if (!found) throw new EngineError(`the weights have no ${name}`);
    return found;
  };
  const optional = (/** @type {string} */ name) => weights.get(name) ?? null;
  const blocks = Array.from({ length: config.n_blocks }, (_, i) => {
    const here = `transformer.h.${i}.`;
    /** @type {any} */
    const block = { heads: heads_of(config, of(`${here}attn.c_attn.weight`), optional(`${here}attn.c_attn.bias`)) };
    for (const [number, layer] of Object.entries(LAYERS)) {
      block[`w_${number}`] = of(`${here}${layer}.weight`);
      block[`b_${number}`] = optional(`${here}${layer}.bias`);
    }
    return /** @type {Block} */ (block);
  });
  const network = {
    w_tok: of("transformer.wte.weight"),
    w_pos: of("transformer.wpe.weight"),
    blocks,
    w_10: of("transformer.ln_f.weight"),
    b_10: optional("transformer.ln_f.bias"),
    w_11: config.tied ? null : t(of("lm_head.weight")),
    b_11: optional("lm_head.bias"),
  };
  return { config, weights, network };
}

/** Cut [w_q | w_k | w_v] and [b_q | b_k | b_v], or [b_q | b_v] without b_k, into heads.
 * @param {Config} config @param {Matrix} w @param {Matrix | null} b @returns {Head[]} */
function heads_of({ n_heads, d_rho, d_head, key_bias }, w, b) {
  const widths = { q: d_rho, k: d_rho, v: d_head };
  const starts = { q: 0, k: n_heads * d_rho, v: 2 * n_heads * d_rho };
  const left_out = key_bias ? 0 : n_heads * d_rho;
  return Array.from({ length: n_heads }, (_, h) => {
    /** @type {any} */
    const head = {};
    for (const letter of LETTERS) {
      const from = starts[letter] + h * widths[letter];
      head[`w_${letter}`] = columns(w, from, from + widths[letter]);
      const start = from - (letter === "v" ? left_out : 0);
      head[`b_${letter}`] =
        b === null || (letter === "k" && left_out) ? null : columns(b, start, start + widths[letter]);
    }
    return /** @type {Head} */ (head);
  });
}

/** The parameters, or their gradients, under Hugging Face's names. @param {Network} network @returns {Map<string, Matrix>} */
export function named(network) {
  const found = new Map();
  const put = (/** @type {string} */ name, /** @type {Matrix | null} */ x) => x && found.set(name, x);
  put("transformer.wte.weight", network.w_tok);
  put("transformer.wpe.weight", network.w_pos);
  network.blocks.forEach((/** @type {any} */ block, i) => {
    const here = `transformer.h.${i}.`;
    const beside = LETTERS.map((letter) => side_by_side(block.heads, `w_${letter}`));
    const biases = LETTERS.map((letter) => side_by_side(block.heads, `b_${letter}`));
    put(`${here}attn.c_attn.weight`, join(beside));
    put(`${here}attn.c_attn.bias`, join(biases));
    for (const [number, layer] of Object.entries(LAYERS)) {
      put(`${here}${layer}.weight`, block[`w_${number}`]);
      put(`${here}${layer}.bias`, block[`b_${number}`]);
    }
  });
  put("transformer.ln_f.weight", network.w_10);
  put("transformer.ln_f.bias", network.b_10);
  put("lm_head.weight", network.w_11 && t(network.w_11));
  put("lm_head.bias", network.b_11);
  return found;
}

/** The gradients under their names in a trace: grad_w_tok, blocks.0.grad_w_q of all heads side by side.
 * @param {Network} grads @returns {Map<string, Matrix>} */
export function symbols(grads) {
  const found = new Map();
  const put = (/** @type {string} */ name, /** @type {Matrix | null} */ x) => x && found.set(name, x);
  put("grad_w_tok", grads.w_tok);
  put("grad_w_pos", grads.w_pos);
  grads.blocks.forEach((/** @type {any} */ block, i) => {
    for (const letter of LETTERS)
      for (const kind of ["w", "b"])
        put(`blocks.${i}.grad_${kind}_${letter}`, side_by_side(block.heads, `${kind}_${letter}`));
    for (const number of Object.keys(LAYERS))
      for (const kind of ["w", "b"]) put(`blocks.${i}.grad_${kind}_${number}`, block[`${kind}_${number}`]);
  });
  for (const name of /** @type {const} */ (["w_10", "b_10", "w_11", "b_11"])) put(`grad_${name}`, grads[name]);
  return found;
}

/** One parameter of all heads. @param {any[]} heads @param {string} name @returns {Matrix | null} */
const side_by_side = (heads, name) => join(heads.map((head) => head[name]));

/** @param {(Matrix | null)[]} parts @returns {Matrix | null} */
function join(parts) {
  const there = parts.filter((part) => part !== null);
  return there.length ? concat_columns(there) : null;
}
