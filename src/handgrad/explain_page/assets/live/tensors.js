// @ts-check
// The tensors that a number can be followed into: those of the trace, weights, and what the trace does not record, as
// follow/tensors.py.
//
// blocks.0.score               q kᵗ/√d_ρ, the scores before the softmax     (n, n) of each head
// blocks.0.sum_e, sum_e        the sums of e^score of a row of attention, and of e^logit     (n, 1)
// blocks.0.G_1, mean_G_1, mean_Ga_1   inside a norm's backward pass: G = Δ diag(w), mean(G), mean(G ∘ ā)
// delta_0                      Δ_1 w_tokᵗ, of tokens relaxed to vectors     (n, V)
// blocks.0.w_8, b_8, w_11, w_tok   weights, oriented as in the paper

import { scale } from "../engine/attention.js";
import { diag_right, matrix, product, scaled, t as turned, times } from "../engine/matrix.js";
import { sum_tokens } from "../engine/notation.js";
import { RequestError } from "../request_error.js";
import { range, rowOf } from "./matrices.js";
import { hereOf, signalsOf } from "./network.js";
import { split } from "./notation.js";
import { relaxedSignal } from "./swaps.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */
/** One entry of a tensor. A vector has row 0. @typedef {{ name: string, row: number, column: number, head: number | null }} Cell */

/** A tensor of a trace; the ids of the tokens are a vector. @param {import("../engine/trace.js").Trace} trace
 * @param {string} name @param {number} [head] @returns {Matrix} */
export const tensorOf = (trace, name, head) => (name === "a_0" ? turned(trace.get(name)) : trace.get(name, head));

const LARGE_EXPONENT = 30;
const rowsOf = (/** @type {Matrix} */ x) => range(x.rows).map((i) => rowOf(x, i));

export class Tensors {
  /** @param {import("./session.js").Session} session @param {import("./session.js").Traced} sentence */
  constructor(session, sentence) {
    this.session = session;
    this.sentence = sentence;
    this.trace = sentence.trace;
    this.network = session.network;
    this.n = sentence.ids.length;
    this.blocks = new Set(session.network.steps.flatMap((step) => (step.block === null ? [] : [hereOf(step)])));
    /** @type {Map<string, Matrix>} */ this.made = new Map();
  }

  /** @param {string} name @param {number | null} [head] @returns {Matrix} */
  get(name, head = null) {
    const key = `${name} ${head}`;
    let found = this.made.get(key);
    if (!found) {
      found = this.trace.has(name) ? tensorOf(this.trace, name, head ?? undefined) : this.derived(name, head);
      this.made.set(key, found);
    }
    return found;
  }

  /** @param {string} name */
  heads(name) {
    const [here, last] = split(name);
    const made = this.blocks.has(here) && (last === "score" || last === "sum_e");
    return made ? this.session.config.n_heads : this.trace.heads(name);
  }

  /** @param {Cell} cell */
  value({ name, row, column, head }) {
    const heads = this.heads(name);
    if (heads && (head === null || !(head >= 0 && head < heads)))
      throw new RequestError(`${name} has ${heads} heads: pass head=0 to ${heads - 1}`);
    const x = this.get(name, heads ? head : null);
    if (!(row >= 0 && row < x.rows && column >= 0 && column < x.cols))
      throw new RequestError(`${name} is ${x.rows} × ${x.cols}: there is no ${row}, ${column}`);
    return x.data[row * x.cols + column];
  }

  /** What the trace does not record. @param {string} name @param {number | null} head @returns {Matrix} */
  derived(name, head) {
    const [here, last] = split(name),
      { session, sentence } = this;
    const unknown = new RequestError(`there is no tensor '${name}' to follow`);
    if (here && !this.blocks.has(here)) throw unknown;
    if (name === "delta_0") return relaxedSignal(session, sentence);
    if (name === "w_11" && session.config.tied) return turned(session.parameter(sentence.version, "grad_w_tok"));
    if (here && last === "score") {
      const [q, k] = ["q", "k"].map((letter) => this.get(here + letter, head));
      return scale(product(q, turned(k)), q.cols);
    }
    if (last === "sum_e") return turned(sum_tokens(turned(this.exponentials(here, head).e)));
    const inside = /^(G|mean_G|mean_Ga)_(\d+)$/.exec(last);
    if (inside && this.trace.has(`${here}a_bar_${inside[2]}`)) return this.insideNorm(here, inside[1], inside[2]);
    if (/^[wb]_/.test(last) && this.trace.has(`${here}grad_${last}`)) return session.parameter(sentence.version, `${here}grad_${last}`);
    throw unknown;
  }

  /** G = Δ diag(w) of a norm, or the mean of its rows, or of those of G ∘ ā. @param {string} here @param {string} what
   * @param {string} n */
  insideNorm(here, what, n) {
    if (what === "G") return diag_right(this.get(signalsOf(this.network.holder(here, n))[0]), this.get(`${here}w_${n}`));
    const g = this.get(`${here}G_${n}`),
      x = what === "mean_G" ? g : times(g, this.get(`${here}a_bar_${n}`));
    return scaled(1 / g.cols, turned(sum_tokens(turned(x))));
  }

  /** e^score of what each token sees, in one head; without a block e^logit. Where one would be very large or small, rows are
   * shifted by their largest entry. @param {string} here @param {number | null} head */
  exponentials(here, head) {
    const of = (/** @type {number | null} */ h) => this.visible(here, h);
    const all = here ? range(this.session.config.n_heads).map(of) : [of(null)];
    const shifted = Math.max(...all.flatMap((x) => rowsOf(x).map((row) => Math.abs(Math.max(...row))))) > LARGE_EXPONENT;
    const x = all[head ?? 0],
      most = rowsOf(x).map((row) => (shifted ? Math.max(...row) : 0));
    return { e: matrix(x.rows, x.cols, x.data.map((s, k) => Math.exp(s - most[Math.floor(k / x.cols)]))), shifted };
  }

  /** The scores that a softmax reads, −∞ where nothing is seen. @param {string} here @param {number | null} head */
  visible(here, head) {
    if (!here) return this.get("a_12");
    const s = this.get(`${here}score`, head),
      rho = this.get(`${here}rho`, head);
    return matrix(s.rows, s.cols, s.data.map((x, k) => (rho.data[k] === 0 ? -Infinity : x)));
  }

  /** Whether a layer has a bias. @param {string} here @param {string} letter */
  biased(here, letter) {
    return this.trace.has(`${here}grad_b_${letter}`);
  }

  /** The columns of a head of q, k or v. @param {string} letter */
  width(letter) {
    const { d_rho, d_head } = this.session.config;
    return letter === "v" ? d_head : d_rho;
  }

  /** The tokens that attention at token i sees. @param {number} i */
  seen(i) {
    return range(this.session.config.causal ? i + 1 : this.n);
  }

  /** The tokens whose attention sees token j. @param {number} j */
  seeing(j) {
    return range(this.n).slice(this.session.config.causal ? j : 0);
  }
}
