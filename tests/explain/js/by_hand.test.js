// Unit tests of what the reader is told about an answer, of terms and of symbols. Run by tests/explain/test_assets.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { formatAddress, parseAddress } from "./address.js";
import { judgeShape, judgeSign, judgeSum, typedNumber } from "./by_hand_check.js";
import { entryOf, headingOf, operandsOf } from "./hand_terms.js";
import { blankPicture, cellsOf, litCells, pictureOf } from "./heat_geometry.js";
import { judge } from "./prologue.js";
import { numbers, product, softmax, transpose } from "./prologue_numbers.js";
import { STEPS } from "./prologue_steps.js";
import { symbolAt } from "./symbols.js";

test("a number may be typed in any usual form", () => {
  const typed = { "0.5": 0.5, "0,5": 0.5, "−1.5e-3": -0.0015, "1.5·10⁻³": 0.0015, "2*10^4": 20000, "-3/4": -0.75, " .25 ": 0.25 };
  for (const [text, x] of Object.entries(typed)) assert.equal(typedNumber(text), x, text);
  for (const text of ["", "x", "1/2/3", "1.2.3", "--1", "1e", "0x10"]) assert.ok(Number.isNaN(typedNumber(text)), text);
});

const term = (...factors) => ({ value: factors.reduce((x, y) => x * y), factors: factors.map((value) => ({ value })), scale: 1 });
const sums = (terms, rest = 0) => ({ terms, rest, sum: terms.reduce((x, t) => x + t.value, rest) });

test("a wrong sum is told by its kind, and from the second attempt by its term", () => {
  const entry = sums([term(2, 3), term(-1, 4), term(5, 0.3)], 0.7); // 6, −4, 1.5 and 0.7: 4.2
  const kind = (x, attempts = 1) => judgeSum(x, entry, attempts, (k) => `number ${k}`);
  assert.deepEqual([kind(4.2).kind, kind(4.21).kind, kind(4.19).right], ["right", "right", true]);
  const mistakes = {
    "-4.2": "sign", "-1.8": "missing term", 8.2: "missing term", 2.7: "missing term", 12.2: "sign of a term", 10.2: "doubled term",
    3.5: "missing rest", 42: "power of ten", 0.042: "power of ten", 13.3: "added", 100: "other",
  };
  for (const [x, name] of Object.entries(mistakes)) assert.equal(kind(Number(x)).kind, name, x);
  assert.equal(judgeSum(11, sums([term(2, 3), term(-1, 4), term(-1)]), 1, String).kind, "sizes");
  assert.equal(kind(8.2).text, "A term is missing.");
  assert.equal(kind(8.2, 2).text, "A term is missing: that of number 1.");
  assert.equal(kind(Number.NaN).kind, "no number");
  const canceling = sums([term(100), term(-99.9), term(0.02)]); // 0.12
  assert.deepEqual([judgeSum(0.5, canceling, 1, String).kind, judgeSum(0.5, canceling, 1, String).right], ["rounding", true]);
  const scaled = sums([term(3, 4), term(1, 2)].map((t) => ({ ...t, value: t.value / 8, scale: 1 / 8 })));
  assert.equal(judgeSum(14, scaled, 1, String).kind, "scale");
});

test("signs and shapes", () => {
  const entry = sums([term(-3), term(1)]);
  assert.ok(judgeSign(-1, entry).right && !judgeSign(1, entry).right);
  assert.match(judgeSign(1, entry).text, /above 0 add up to 1, those below 0 to −3/);
  const kind = (...given) => judgeShape(given, [13, 96], "token", "feature").kind;
  assert.deepEqual([kind(13, 96), kind(96, 13), kind(13, 13), kind(1, 96), kind(2, 3), kind(0, NaN)],
    ["right", "transposed", "columns", "rows", "shape", "no number"]);
});

test("the row and the column of the operands light up", () => {
  const cell = (name, row, column) => ({ name, symbol: name, head: null, row, column });
  const found = { token: null, position: null, feature: 0 };
  const answer = {
    symbol: "a", block: 0, row_label: null, column_label: null, formula: "", count: 3, sum: 6, value: 6, rest: { count: 0, value: 0 },
    terms: [0, 1].map((k) => ({ ...found, feature: k, value: 2, scale: 1, factors: [
      { value: 1, symbol: "a", cell: cell("a", 4, k) }, { value: 2, symbol: "w", cell: cell("w", k, 7) }] })).concat([
      { ...found, feature: null, value: 2, scale: 1, factors: [{ value: 2, symbol: "b", cell: cell("b", 0, 7) }] }]),
  };
  const entry = entryOf(answer);
  assert.deepEqual(operandsOf(entry).map(({ name, row, column }) => [name, row, column]), [["a", 4, null], ["w", null, 7], ["b", 0, 7]]);
  assert.deepEqual([headingOf(entry, 0), headingOf(entry, 1)], [null, "w, column 7"]);
  assert.deepEqual(entry.terms.map((t) => t.place), [[0], [1], null]);
  const picture = { ...pictureOf([[1, 0, 0], [0, 1, 0]]), rows: [0, 4], columns: [0, 6], pool: [2, 2] };
  assert.deepEqual(litCells(picture, { row: 3, column: null }), [[1, 0, 1, 3]]);
  assert.deepEqual(litCells(picture, { row: 1, column: 5 }), [[0, 2, 1, 1]]);
  assert.deepEqual([litCells(picture, { row: 9, column: 1 }), litCells(picture, { row: null, column: null })], [[], []]);
  const blank = blankPicture([100, 3]);
  assert.deepEqual([blank.cells, blank.pool, cellsOf(blank).every((x) => x === 0)], [[50, 3], [2, 1], true]);
});

test("the address has what is computed by hand", () => {
  const hand = { name: "blocks.0.score", row: 3, column: 5, head: 2 };
  const here = { view: "station", station: "a_1", direction: "forward", token: null, head: 0, text: null, objective: null };
  const hash = formatAddress({ ...here, hand });
  assert.deepEqual(parseAddress(hash).hand, hand);
  assert.deepEqual(parseAddress("#/station/a_1/forward?hand=x:1").hand, { name: "x", row: 1, column: null, head: null });
  assert.equal(parseAddress("#/flow").hand, null);
});

test("symbols are found in a text, and articles are not", () => {
  const found = (text, part) => symbolAt(text, text.indexOf(part))?.key ?? null;
  assert.deepEqual(
    [["the error Δ₁₂ of", "₁"], ["∂w_6 is", "w"], ["∂w_6 is", "∂"], ["ā₅ and", "ā"], ["Δ_raw", "r"], ["y_gt", "t"], ["A ⊖ B", "⊖"], ["b̃ is", "b"], ["is one-hot", "hot"]].map(
      ([text, part]) => found(text, part)),
    ["Δ_12", "w_6", "∂", "ā_5", "Δ_raw", "y_gt", "⊖", "~", "ohe"],
  );
  assert.deepEqual([found("a sentence", "a"), found("the model", "m"), symbolAt("Δ", 5)], [null, null, null]);
});

test("every step of the prologue knows its answer and names each mistake", () => {
  const n = numbers();
  assert.deepEqual(product(transpose(n.a1), n.delta2), n.gradPracticed);
  for (const row of softmax(n.a2)) assert.ok(Math.abs(row[0] + row[1] - 1) < 1e-15);
  for (const step of STEPS) {
    const asked = step.ask(n);
    assert.ok(judge(asked.answer, asked, 1).right, step.title);
    for (const [kind, value, text] of asked.mistakes ?? []) {
      const said = judge([value], asked, 1);
      assert.deepEqual([said.right, said.kind, said.text], [false, kind, text], step.title);
    }
    if (asked.terms) assert.ok(Math.abs(asked.terms.reduce((x, t) => x + t.value, 0) - asked.answer[0]) < 1e-12, step.title);
    assert.equal(judge(asked.answer.map(() => NaN), asked, 1).kind, "no number");
  }
});
