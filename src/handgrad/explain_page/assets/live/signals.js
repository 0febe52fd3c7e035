// @ts-check
// How a cell of an error signal or of a gradient was computed, as follow/signals.py: the error signal of an activation is the
// sum of what the steps that read it send back.

import { g_prime } from "../engine/activation.js";
import { matrix } from "../engine/matrix.js";
import { masked } from "./forward.js";
import { columnOf, range, rowOf } from "./matrices.js";
import { hereOf, signalsOf } from "./network.js";
import { signal, split, symbol } from "./notation.js";
import { answer, cellOf, column, number, one, only, product, row } from "./terms.js";

/** @typedef {import("./tensors.js").Cell} Cell */
/** @typedef {import("./tensors.js").Tensors} Tensors */
/** @typedef {import("./network.js").Step} Step */
/** @typedef {import("./terms.js").Answer} Answer */

const PASSED = "Δ of the skip connection"; // beside what comes through the branch

/** @param {Tensors} t @param {Cell} cell @returns {Answer} */
export function rule(t, cell) {
  const [here, last] = split(cell.name);
  if (last.startsWith("grad_")) return gradient(t, cell, here, last.slice(5));
  if (/^(mean_)?G/.test(last)) return insideNorm(t, cell, here);
  const readers = t.network.readers(`${here}a_${last.replace("delta_", "")}`);
  if (!readers.length) return (/_(causal|raw)$/.test(last) ? scores : queries)(t, cell, here);
  const sent = readers.map((step) => RULES[step.kind](t, step, cell));
  if (sent.length === 1) return sent[0];
  const texts = readers.map((step, i) => (step.kind === "add" ? PASSED : sent[i].formula));
  return answer(texts.join(", plus "), ...sent.flatMap(({ sums }) => sums));
}

/** @type {Record<string, (t: Tensors, step: Step, cell: Cell) => Answer>} */
const RULES = {
  /** Δ_0, of tokens relaxed to vectors */
  embedding(t, step, { row: i, column: j }) {
    return answer("Δ₁ · row of the token table", product([row(t, signalsOf(step)[0], i), row(t, "w_tok", j)]));
  },

  next(t, step, { row: i, column: j }) {
    return answer("Δ of the next block's input", product([one(t, signalsOf(step)[0], i, j)]));
  },

  /** [G − mean(G) − ā ∘ mean(G ∘ ā)]/σ */
  norm(t, step, { row: i, column: j }) {
    const here = hereOf(step),
      [n] = step.layers,
      spread = cellOf(`${here}sigma_${n}`, i, 0);
    const inverse = number(1 / t.get(spread.name).data[i], "1/σ", () => spread),
      along = one(t, `${here}mean_Ga_${n}`, i, 0);
    return answer(
      `Δ through the ${step.block === null ? "last " : ""}norm`,
      product([one(t, `${here}G_${n}`, i, j), inverse]),
      product([one(t, `${here}mean_G_${n}`, i, 0), inverse], -1),
      product([one(t, `${here}a_bar_${n}`, i, j), along, inverse], -1),
    );
  },

  /** Of q, k and v, all heads */
  attention(t, step, { row: i, column: j }) {
    const here = hereOf(step),
      sums = [];
    for (const letter of "qkv") {
      const name = `${here}w_${letter}`,
        weights = rowOf(t.get(name), j),
        width = t.width(letter);
      for (const h of range(t.session.config.n_heads)) {
        const from = h * width;
        const cell = (/** @type {number} */ k) => cellOf(name, j, from + k);
        sums.push(product([row(t, `${here}delta_${letter}`, i, h), number(weights.slice(from, from + width), "", cell)]));
      }
    }
    return answer("Δ of queries, keys and values · rows of their weights", ...sums);
  },

  linear(t, step, { row: i, column: j }) {
    const weights = row(t, `${hereOf(step)}w_${step.layers[0]}`, j);
    return answer("Δ of the output · row of the weight", product([row(t, signalsOf(step)[0], i), weights]));
  },

  add(t, step, { row: i, column: j }) {
    return answer("the skip connection passes Δ on unchanged", product([one(t, signalsOf(step)[0], i, j)]));
  },

  activation(t, step, { row: i, column: j }) {
    const [name] = step.inputs,
      [delta] = signalsOf(step),
      shown = `g′(${symbol(name)})`;
    const input = matrix(1, 1, [t.value(cellOf(name, i, j))]);
    const slope = number(g_prime(input, t.session.config.activation).data, shown, () => cellOf(name, i, j));
    return answer(`${symbol(delta)} · ${shown}`, product([one(t, delta, i, j), slope]));
  },

  /** Where the backward pass starts */
  loss(t, _, { row: i, column: j }) {
    const { objective, targets } = t.sentence,
      { kind, position } = objective;
    if (kind === "difference") {
      const sign = i === position ? Number(j === objective.token) - Number(j === objective.against) : 0;
      return answer("±1 for the two logits that are compared, else 0", product([number(sign, "∂(difference)")]));
    }
    if (targets[i] < 0) return answer("this row has no target", product([number(0, "no target")]));
    if (position !== undefined && position !== i)
      return answer("what is explained does not depend on this row", product([number(0, "not read")]));
    const count = kind === "sentence" ? targets.length - 1 : 1;
    const expected = number(j === targets[i] ? 1 : 0, "y_gt");
    const each = count > 1 ? `, divided by the number of targets, ${count}` : "";
    return answer(`y_pred − y_gt${each}`, product([one(t, "y_pred", i, j)], 1 / count), product([expected], -1 / count));
  },
};

// ── inside a step ───────────────────────────────────────────────────────────────────────────────────────────────────

/** G = Δ diag(w), or a mean of its rows. @param {Tensors} t @param {Cell} cell @param {string} here @returns {Answer} */
function insideNorm(t, { name, row: i, column: j }, here) {
  const [, what, n] = /** @type {string[]} */ (/([^.]*)_(\d+)$/.exec(name)),
    g = `${here}G_${n}`;
  if (what !== "G") {
    const also = what === "mean_G" ? [] : [row(t, `${here}a_bar_${n}`, i)];
    return answer("the mean of the row", product([row(t, g, i), ...also], 1 / t.get(g).cols));
  }
  const [delta] = signalsOf(t.network.holder(here, n));
  return answer("Δ of the output times the gain", product([one(t, delta, i, j), one(t, `${here}w_${n}`, 0, j)]));
}

/** @param {Tensors} t @param {Cell} cell @param {string} here @returns {Answer} */
function scores(t, { name, row: i, column: j, head }, here) {
  const h = head ?? 0,
    width = t.width("v"),
    from = h * width;
  if (name.endsWith("delta_raw"))
    return answer("Δ_causal / √d_ρ", product([one(t, `${here}delta_causal`, i, j, h)], 1 / Math.sqrt(t.width("q"))));
  const [out, delta] = [`${here}a_3`, `${here}delta_3`];
  const part = (/** @type {string} */ x) => rowOf(t.get(x), i).slice(from, from + width);
  const sent = number(part(delta), "", (k) => cellOf(delta, i, from + k));
  const own = part(out),
    difference = rowOf(t.get(`${here}v`, h), j).map((x, k) => x - own[k]);
  const beside = number(difference, `v − ${symbol(out)}`, (k) => cellOf(`${here}v`, j, k, h));
  const sum = product([sent, beside, one(t, `${here}rho`, i, j, h)]);
  return answer(`${symbol(delta)} · (value − output of the head), times ρ`, sum);
}

/** The error signal of a query, key or value. @param {Tensors} t @param {Cell} cell @param {string} here @returns {Answer} */
function queries(t, { name, row: i, column: j, head }, here) {
  const letter = name.slice(-1),
    h = head ?? 0,
    delta = `${here}delta_3`;
  if (letter === "q") {
    const seen = t.seen(i);
    const every = product([row(t, `${here}delta_raw`, i, h), column(t, `${here}k`, j, h)]);
    return answer(`Δ_raw · keys${masked(t, seen)}`, only(every, seen));
  }
  const seeing = t.seeing(i);
  const [formula, factors] =
    letter === "k"
      ? ["Δ_rawᵗ · queries", [column(t, `${here}delta_raw`, i, h), column(t, `${here}q`, j, h)]]
      : [`ρᵗ · ${symbol(delta)}`, [column(t, `${here}rho`, i, h), column(t, delta, h * t.width("v") + j)]];
  return answer(formula + masked(t, seeing), only(product(factors), seeing));
}

// ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────

/** @param {Tensors} t @param {Cell} cell @param {string} here @param {string} symbol  w_6 @returns {Answer} */
function gradient(t, { row: i, column: j }, here, symbol) {
  const [letter, n] = [symbol[0], symbol.slice(2)];
  if (n === "tok" || n === "pos") return table(t, n, i, j);
  const step = t.network.holder(here, n);
  const delta = "qkv".includes(n)
    ? column(t, `${here}delta_${n}`, j % t.width(n), Math.floor(j / t.width(n)))
    : column(t, signalsOf(step)[0], j);
  if (letter === "b") return answer("Δ, summed over the tokens", product([delta]));
  if (step.kind === "norm")
    return answer("normalized input · Δ, over the tokens", product([column(t, `${here}a_bar_${n}`, j), delta]));
  return answer("input · Δ, over the tokens", product([column(t, step.inputs[0], i), delta]));
}

/** @param {Tensors} t @param {string} which @param {number} i @param {number} j @returns {Answer} */
function table(t, which, i, j) {
  const first = signal(t.network.start),
    tokens = which === "tok",
    { ids } = t.sentence;
  const used = tokens ? range(t.n).filter((k) => ids[k] === i) : range(t.n).filter((k) => k === i);
  const deltas = columnOf(t.get(first), j);
  const sums = used.length ? [product([number(used.map((k) => deltas[k]), "Δ₁", (k) => cellOf(first, used[k], j))])] : [];
  let text = tokens ? "Δ₁ of the tokens with this id" : "Δ₁ of the token at this position";
  if (tokens && t.session.config.tied) {
    sums.push(product([column(t, "delta_12", i), column(t, "a_11", j)]));
    text += ", plus Δ₁₂ · a₁₁: the head has the same weight";
  }
  return answer(text, ...(sums.length ? sums : [product([number(0, "not used")])]));
}
