// @ts-check
// How a cell of an activation was computed: a rule per kind of step, as follow/forward.py.

import { range, rowOf } from "./matrices.js";
import { hereOf } from "./network.js";
import { grouped, split, symbol } from "./notation.js";
import { answer, cellOf, column, number, one, only, product, row } from "./terms.js";

/** @typedef {import("./tensors.js").Cell} Cell */
/** @typedef {import("./tensors.js").Tensors} Tensors */
/** @typedef {import("./network.js").Step} Step */
/** @typedef {import("./terms.js").Answer} Answer */

/** The sums that make a cell of an activation or of one of its parts. @param {Tensors} t @param {Cell} cell @returns {Answer} */
export function rule(t, cell) {
  const step = t.network.maker(cell.name);
  if (step) return RULES[step.kind](t, step, cell);
  const [here, last] = split(cell.name),
    { row: i, column: j, head } = cell;
  const [, kind, rest] = /** @type {string[]} */ (/^([^_]*)_?(.*)$/.exec(last));
  if (last.startsWith("a_bar_")) return normalized(t, here, rest.replace("bar_", ""), i, j);
  if (kind === "mu") {
    const [name] = t.network.holder(here, rest).inputs;
    return answer("the mean of the row", product([row(t, name, i)], 1 / t.get(name).cols));
  }
  if (last === "rho") return softmax(t, cell, here, `${here}score`);
  if (last === "sum_e") return sumOfSoftmax(t, cell, here);
  if (last === "score")
    return answer("query · key / √d_ρ", product([row(t, `${here}q`, i, head), row(t, `${here}k`, j, head)], 1 / Math.sqrt(t.width("q"))));
  if ("qkv".includes(last)) return weighted(t, `${here}a_2`, here, last, i, (head ?? 0) * t.width(last) + j);
  if (kind === "w" || kind === "b") return answer("a parameter of the model");
  return answer(kind === "sigma" ? "a statistic of the row" : "a token");
}

/** @type {Record<string, (t: Tensors, step: Step, cell: Cell) => Answer>} */
const RULES = {
  embedding(t, _, { row: i, column: j }) {
    const sums = [one(t, "w_tok", t.sentence.ids[i], j), one(t, "w_pos", i, j)].map((factor) => product([factor]));
    return answer("the row of the token plus the row of its position", ...sums);
  },

  next: (t, step, { row: i, column: j }) => answer("the output of the block before", product([one(t, step.inputs[0], i, j)])),

  norm(t, step, { row: i, column: j }) {
    const here = hereOf(step),
      [n] = step.layers;
    const gain = product([one(t, `${here}a_bar_${n}`, i, j), one(t, `${here}w_${n}`, 0, j)]);
    const bias = t.biased(here, n) ? [product([one(t, `${here}b_${n}`, 0, j)])] : [];
    return answer(`the normalized input times the gain${bias.length ? ", plus the bias" : ""}`, gain, ...bias);
  },

  attention(t, step, { row: i, column: j }) {
    const here = hereOf(step),
      width = t.width("v"),
      [h, c] = [Math.floor(j / width), j % width],
      seen = t.seen(i);
    const every = product([row(t, `${here}rho`, i, h), column(t, `${here}v`, c, h)]);
    return answer(`attention weights · values${masked(t, seen)}`, only(every, seen));
  },

  linear: (t, step, { row: i, column: j }) => weighted(t, step.inputs[0], hereOf(step), step.layers[0], i, j),

  add(t, step, { row: i, column: j }) {
    return answer("the skip connection plus the branch", ...step.inputs.map((name) => product([one(t, name, i, j)])));
  },

  activation(t, step, cell) {
    const [name] = step.inputs,
      a = symbol(name),
      x = one(t, name, cell.row, cell.column);
    const passes = number(x.values[0] ? t.value(cell) / x.values[0] : 0, `g(${a})/${a}`);
    return answer(`g(${a}): ${a} times the share that passes`, product([x, passes]));
  },

  loss: (t, step, cell) => softmax(t, cell, "", step.inputs[0]),
};

/** e^x of one entry of a row, divided by the sum over the row. @param {Tensors} t @param {Cell} cell @param {string} here
 * @param {string} source */
function softmax(t, cell, here, source) {
  const { e, shifted } = t.exponentials(here, cell.head),
    total = { ...cell, name: `${here}sum_e`, column: 0 };
  const value = number(rowOf(e, cell.row)[cell.column], exponential(here, shifted), () => ({ ...cell, name: source }));
  const text = "softmax: e to the power of the entry, divided by the sum over the row";
  return answer(text, product([value, number(1 / t.value(total), "1/Σ", () => total)]));
}

/** @param {string} here @param {boolean} shifted */
const exponential = (here, shifted) => {
  const what = here ? "score" : "logit";
  return shifted ? `e^(${what} − max)` : `e^${what}`;
};

/** What a row of exponentials is divided by. @param {Tensors} t @param {Cell} cell @param {string} here */
function sumOfSoftmax(t, { row: i, head }, here) {
  const { e, shifted } = t.exponentials(here, head),
    seen = here ? t.seen(i) : range(e.cols);
  const every = number(rowOf(e, i), exponential(here, shifted), (k) => cellOf(here ? `${here}score` : "a_12", i, k, head));
  return answer(`the sum over the row${here ? masked(t, seen) : ""}`, only(product([every]), seen));
}

/** @param {Tensors} t @param {string} here @param {string} n @param {number} i @param {number} j */
function normalized(t, here, n, i, j) {
  const name = `${here}sigma_${n}`,
    a = one(t, t.network.holder(here, n).inputs[0], i, j);
  const inverse = number(1 / t.get(name).data[i], "1/σ", () => cellOf(name, i, 0));
  return answer("(input − mean) / σ", product([a, inverse]), product([one(t, `${here}mu_${n}`, i, 0), inverse], -1));
}

/** A row of the input times a column of the weight, plus the bias. @param {Tensors} t @param {string} source
 * @param {string} here @param {string} letter @param {number} i @param {number} j */
function weighted(t, source, here, letter, i, j) {
  const sums = [product([row(t, source, i), column(t, `${here}w_${letter}`, j)])];
  if (!t.biased(here, letter)) return answer("input · column of the weight", ...sums);
  return answer("input · column of the weight, plus the bias", ...sums, product([one(t, `${here}b_${letter}`, 0, j)]));
}

/** How many tokens are no terms of a sum in attention. @param {Tensors} t @param {number[]} seen */
export function masked(t, seen) {
  const count = t.n - seen.length;
  return count ? `; ${grouped(count)} masked ${count === 1 ? "token is" : "tokens are"} left out` : "";
}
