// @ts-check
// The steps of the prologue: in each a symbol is introduced, matrices are shown, and a question is asked. Texts state no result;
// every number comes from prologue_numbers.js.

import { number, quote } from "./format.js";
import { TOKENS } from "./prologue_numbers.js";

/**
 * @typedef {{ name: string, of: string, rows?: "tokens" | "targets", lit?: [number | null, number | null], hidden?: [number, number][] }}
 *   Shown  a matrix: its symbol, which number it is, what its rows are, the row and the column that light up, entries to find
 * @typedef {{ value: number, factors: { value: number }[], scale: number }} Term
 * @typedef {{ label: string, answer: number[], terms?: Term[], mistakes?: [string, number, string][], why: string }} Asked
 *   mistakes: kind, the number it leads to, what is said
 * @typedef {{ station: number, symbol: string, title: string, text: (n: any) => string, shows: Shown[], ask: (n: any) => Asked }} Step
 */

export const STATIONS = ["A linear layer", "A softmax", "A loss"];
const [TICK, TOCK] = TOKENS.map(quote);

const term = (/** @type {number[]} */ ...factors) => ({
  value: factors.reduce((x, y) => x * y),
  factors: factors.map((value) => ({ value })),
  scale: 1,
});
const terms = (/** @type {number[]} */ x, /** @type {number[]} */ y) => x.map((value, k) => term(value, y[k]));
const column = (/** @type {number[][]} */ a, /** @type {number} */ j) => a.map((row) => row[j]);
const written = (/** @type {number} */ x) => (x < 0 ? `(${number(x)})` : number(x));
const sum = (/** @type {Term[]} */ all) =>
  all.map(({ factors }) => factors.map((f) => written(f.value)).join(" · ")).join(" + ");
const total = (/** @type {Term[]} */ all) => all.reduce((x, t) => x + t.value, 0);

/** @type {Step[]} */
export const STEPS = [
  {
    station: 0,
    symbol: "a w",
    title: "Rows are tokens",
    text: () =>
      `The tokens ${TICK} and ${TOCK} are the rows of a matrix a₁: one row for every token, one column for every feature. A ` +
      "linear layer multiplies a₁ by its weight w. An entry of a₁ w is a row of a₁ times a column of w: number by number, then " +
      "added up.",
    shows: [
      { name: "a₁", of: "a1", rows: "tokens", lit: [1, null] },
      { name: "w", of: "w", lit: [null, 0] },
      { name: "a₁ w", of: "a1w", rows: "tokens", hidden: [[1, 0]] },
    ],
    ask: ({ a1, w, a1w }) => {
      const parts = terms(a1[1], column(w, 0));
      return {
        label: `a₁ w in the row of ${TOCK}, first column`,
        answer: [a1w[1][0]],
        terms: parts,
        mistakes: [
          ["transposed", total(terms(column(a1, 1), w[0])), "Exchanged: take the row of a₁ and the column of w."],
        ],
        why: `${sum(parts)} = ${number(a1w[1][0])}`,
      };
    },
  },
  {
    station: 0,
    symbol: "~",
    title: "A tilde repeats",
    text: () =>
      "The layer also adds a bias b, one number for every feature. a₁ w has a row for every token, b has one row. The tilde says " +
      "how they are added: b̃ is b, repeated on every row. Then a₂ = a₁ w + b̃. (A bar is something else: ā is a normalized a.)",
    shows: [
      { name: "a₁ w", of: "a1w", rows: "tokens", lit: [1, 0] },
      { name: "b̃", of: "bRows", rows: "tokens", lit: [1, 0] },
      { name: "a₂", of: "a2", rows: "tokens", hidden: [[1, 0]] },
    ],
    ask: ({ a1w, bRows, a2 }) => ({
      label: `a₂ in the row of ${TOCK}, first column`,
      answer: [a2[1][0]],
      terms: [term(a1w[1][0]), term(bRows[1][0])],
      why: `${number(a1w[1][0])} + ${written(bRows[1][0])} = ${number(a2[1][0])}`,
    }),
  },
  {
    station: 0,
    symbol: "Δ",
    title: "Δ, the error signal",
    text: ({ rate }) =>
      "Later layers turn a₂ into one number, the loss L. Δ₂ has the shape of a₂, and says for every entry of a₂ by how much L changes " +
      "if that entry is raised: by Δ₂ times the raise, if the raise is small. The backward pass computes Δ from the loss down to the " +
      `first layer. Here is a Δ₂ to practice with. The entry of ${TICK} in the second column of a₂ is raised by ${number(rate)}.`,
    shows: [
      { name: "a₂", of: "a2", rows: "tokens", lit: [0, 1] },
      { name: "Δ₂", of: "delta2", rows: "tokens", lit: [0, 1] },
    ],
    ask: ({ delta2, rate }) => ({
      label: "The change of L",
      answer: [delta2[0][1] * rate],
      terms: [term(delta2[0][1], rate)],
      mistakes: [["other entry", delta2[1][0] * rate, "This is the entry in the other row and column: the row is the token."]],
      why:
        `${written(delta2[0][1])} · ${number(rate)} = ${number(delta2[0][1] * rate)}: raising this entry ` +
        `${delta2[0][1] < 0 ? "lowers" : "raises"} the loss`,
    }),
  },
  {
    station: 0,
    symbol: "ᵗ",
    title: "ᵗ, transposed: the gradient of w",
    text: () =>
      "a₁ᵗ is a₁ with rows and columns exchanged. The gradient of the weight is ∂w = a₁ᵗ Δ₂: it has the shape of w, and says by how " +
      "much L changes if a weight is raised. An entry of ∂w is a column of a₁ times a column of Δ₂: the input of the weight times the " +
      "error at its output, added up over the tokens.",
    shows: [
      { name: "a₁ᵗ", of: "a1t", lit: [0, null] },
      { name: "Δ₂", of: "delta2", rows: "tokens", lit: [null, 1] },
      { name: "∂w", of: "gradPracticed", hidden: [[0, 1]] },
    ],
    ask: ({ a1, delta2, gradPracticed }) => {
      const parts = terms(column(a1, 0), column(delta2, 1));
      return {
        label: "∂w in the first row, second column",
        answer: [gradPracticed[0][1]],
        terms: parts,
        mistakes: [
          ["not transposed", total(terms(a1[1], column(delta2, 1))), "This takes the other row. Row 1 of a₁ᵗ is column 1 of a₁."],
          ["transposed", gradPracticed[1][0], "This is the entry with row and column exchanged."],
        ],
        why: `${sum(parts)} = ${number(gradPracticed[0][1])}`,
      };
    },
  },
  {
    station: 0,
    symbol: "Δ wᵗ",
    title: "The error of the input",
    text: () =>
      "The layer before needs the error at its own output, which is a₁. It is Δ₁ = Δ₂ wᵗ: each input gets the errors of all outputs that " +
      "it went into, each times the weight on the way. An entry is a row of Δ₂ times a row of w.",
    shows: [
      { name: "Δ₂", of: "delta2", rows: "tokens", lit: [0, null] },
      { name: "wᵗ", of: "wt", lit: [null, 0] },
      { name: "Δ₁", of: "delta1", rows: "tokens", hidden: [[0, 0]] },
    ],
    ask: ({ delta2, w, delta1 }) => {
      const parts = terms(delta2[0], w[0]);
      return {
        label: `Δ₁ in the row of ${TICK}, first column`,
        answer: [delta1[0][0]],
        terms: parts,
        mistakes: [
          ["not transposed", total(terms(delta2[0], column(w, 0))), "This takes a column of w: a column of wᵗ is a row of w."],
        ],
        why: `${sum(parts)} = ${number(delta1[0][0])}`,
      };
    },
  },
  {
    station: 0,
    symbol: "Σ",
    title: "What was repeated is summed",
    text: () =>
      "On the way forward b was repeated on every row. So b has a share in the error of every row, and on the way back these add up: " +
      "∂b = Σ_tok Δ₂, the sum of Δ₂ over the tokens, one number for every feature. A tilde on the way forward is a sum on the way back.",
    shows: [
      { name: "Δ₂", of: "delta2", rows: "tokens", lit: [null, 1] },
      { name: "∂b", of: "gradB", hidden: [[0, 1]] },
    ],
    ask: ({ delta2, gradB }) => {
      const parts = column(delta2, 1).map((x) => term(x));
      return {
        label: "∂b, second number",
        answer: [gradB[0][1]],
        terms: parts,
        mistakes: [
          ["sum over features", delta2[1].reduce((x, y) => x + y), "This is the sum of a row. Sum over the tokens: down a column."],
        ],
        why: `${sum(parts)} = ${number(gradB[0][1])}`,
      };
    },
  },
  {
    station: 1,
    symbol: "softmax",
    title: "From scores to probabilities",
    text: () =>
      `The columns of a₂ are now scores: how well ${TICK} and ${TOCK} fit as the next token. A softmax makes probabilities y of every ` +
      "row: e to the power of each score, divided by the sum of these over the row. Every row of y adds up to 1. Only differences of " +
      "scores matter.",
    shows: [
      { name: "a₂", of: "a2", rows: "tokens", lit: [1, null] },
      { name: "y", of: "y", rows: "tokens", hidden: [[1, 0], [1, 1]] },
    ],
    ask: ({ a2, y }) => ({
      label: `y in the row of ${TOCK}, first column`,
      answer: [y[1][0]],
      mistakes: [
        ["not divided", Math.exp(a2[1][0]), "This is not divided by the sum over the row."],
        ["other row", y[0][0], "This is the other row."],
      ],
      why:
        `the two scores of this row are ${number(a2[1][0])} and ${number(a2[1][1])}, so the probabilities are ` +
        `${number(y[1][0])} and ${number(y[1][1])}`,
    }),
  },
  {
    station: 1,
    symbol: "⊖",
    title: "⊖, row by row",
    text: () =>
      "Δ_y is the error at the probabilities, again one to practice with. The backward pass of a softmax needs the average of every row " +
      "of Δ_y, weighted by the probabilities: Δ_y ⊖ y. The sign ⊖ multiplies each row of the one with the same row of the other and adds " +
      "up: one number for every token.",
    shows: [
      { name: "Δ_y", of: "deltaY", rows: "tokens", lit: [1, null] },
      { name: "y", of: "y", rows: "tokens", lit: [1, null] },
      { name: "Δ_y ⊖ y", of: "inner", rows: "tokens", hidden: [[1, 0]] },
    ],
    ask: ({ deltaY, y, inner }) => {
      const parts = terms(deltaY[1], y[1]);
      return {
        label: `Δ_y ⊖ y for ${TOCK}`,
        answer: [inner[1][0]],
        terms: parts,
        mistakes: [
          ["over columns", total(terms(column(deltaY, 0), column(y, 0))), "This is a column times a column: ⊖ takes rows."],
        ],
        why: `${sum(parts)} = ${number(inner[1][0])}`,
      };
    },
  },
  {
    station: 1,
    symbol: "∘ ~",
    title: "A tilde across the row",
    text: () =>
      "A tilde also repeats one number per token across its row: (Δ_y ⊖ y)~ has the shape of y. So the error at the scores can be " +
      "written for all entries at once: Δ₂ = y ∘ [Δ_y − (Δ_y ⊖ y)~]. The sign ∘ multiplies entry by entry. This is how the paper " +
      "writes the backward pass of attention.",
    shows: [
      { name: "y", of: "y", rows: "tokens", lit: [1, 0] },
      { name: "Δ_y", of: "deltaY", rows: "tokens", lit: [1, 0] },
      { name: "(Δ_y ⊖ y)~", of: "innerColumns", rows: "tokens", lit: [1, 0] },
      { name: "Δ₂", of: "deltaA", rows: "tokens", hidden: [[1, 0]] },
    ],
    ask: ({ y, deltaY, innerColumns, deltaA }) => ({
      label: `Δ₂ in the row of ${TOCK}, first column`,
      answer: [deltaA[1][0]],
      terms: [term(y[1][0], deltaY[1][0]), term(-y[1][0], innerColumns[1][0])],
      mistakes: [["not multiplied", deltaY[1][0] - innerColumns[1][0], "This is the bracket: it is still multiplied by y."]],
      why: `${number(y[1][0])} · (${number(deltaY[1][0])} − ${number(innerColumns[1][0])}) = ${number(deltaA[1][0])}`,
    }),
  },
  {
    station: 2,
    symbol: "one-hot",
    title: "One-hot: a token as a row",
    text: () =>
      `The sentence is ${TICK} ${TOCK} ${TICK}: after ${TICK} comes ${TOCK}, after ${TOCK} comes ${TICK}. To compare this with ` +
      "probabilities, each token to come is written as a row: 1 in its own column, 0 in all others. Such a row is one-hot, and these " +
      "rows are y_gt, the truth.",
    shows: [{ name: "y_gt", of: "yGt", rows: "targets", hidden: [[0, 0], [0, 1]] }],
    ask: ({ yGt }) => ({
      label: `The row of y_gt after ${TICK}, whose next token is ${TOCK}`,
      answer: yGt[0],
      why: `${TOCK} has the second column, so the row is ${yGt[0].join(", ")}`,
    }),
  },
  {
    station: 2,
    symbol: "L",
    title: "The loss",
    text: () =>
      "The loss of a row is the surprise at the true token: −log of the probability that it was given. With one-hot rows that is " +
      "−y_gt ⊖ log y, because the zeros remove all other tokens. log is the natural logarithm. L is the sum over the rows.",
    shows: [
      { name: "y", of: "y", rows: "targets", lit: [1, null] },
      { name: "y_gt", of: "yGt", rows: "targets", lit: [1, null] },
    ],
    ask: ({ y, losses, loss, targets }) => ({
      label: `The loss of the row after ${TOCK}`,
      answer: [losses[1]],
      mistakes: [
        ["sign", -losses[1], "The sign: a probability is below 1, so its log is below 0, and −log is above 0."],
        ["base", -Math.log10(y[1][targets[1]]), "This is the logarithm to base 10; the natural one has base e."],
        ["base", -Math.log2(y[1][targets[1]]), "This is the logarithm to base 2; the natural one has base e."],
      ],
      why:
        `−log ${number(y[1][targets[1]])} = ${number(losses[1])}; with the other row, L = ` +
        `${number(losses[0])} + ${number(losses[1])} = ${number(loss)}`,
    }),
  },
  {
    station: 2,
    symbol: "y − y_gt",
    title: "Where the backward pass begins",
    text: () =>
      "For a softmax followed by this loss the error at the scores is short: Δ₂ = y − y_gt, probabilities minus truth. In every row it " +
      "is below 0 for the true token, whose score should rise, above 0 for the others, and adds up to 0.",
    shows: [
      { name: "y", of: "y", rows: "targets", lit: [1, 0] },
      { name: "y_gt", of: "yGt", rows: "targets", lit: [1, 0] },
      { name: "Δ₂", of: "delta", rows: "targets", hidden: [[1, 0], [1, 1]] },
    ],
    ask: ({ y, yGt, delta }) => ({
      label: `Δ₂ after ${TOCK}, first column`,
      answer: [delta[1][0]],
      terms: [term(y[1][0]), term(-yGt[1][0])],
      why: `${number(y[1][0])} − ${number(yGt[1][0])} = ${number(delta[1][0])}`,
    }),
  },
  {
    station: 2,
    symbol: "∂w",
    title: "And back to the weights",
    text: () =>
      "This Δ₂ goes back through the linear layer as before: ∂w = a₁ᵗ Δ₂. That is a complete backward pass. A step of gradient descent " +
      "subtracts a little of ∂w from w, and the loss falls.",
    shows: [
      { name: "a₁ᵗ", of: "a1t", lit: [0, null] },
      { name: "Δ₂", of: "delta", rows: "targets", lit: [null, 0] },
      { name: "∂w", of: "grad", hidden: [[0, 0]] },
    ],
    ask: ({ a1, delta, grad, rate, loss, predicted, after }) => {
      const parts = terms(column(a1, 0), column(delta, 0));
      return {
        label: "∂w in the first row, first column",
        answer: [grad[0][0]],
        terms: parts,
        why:
          `${sum(parts)} = ${number(grad[0][0])}. With w − ${number(rate)} ∂w the gradient predicts a change of L by ` +
          `${number(predicted)}; measured, L goes from ${number(loss)} to ${number(after)}`,
      };
    },
  },
];
