// Unit tests of the modules that need no browser. Run by tests/explain/test_assets.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { allStops, formatAddress, parseAddress } from "./address.js";
import { color, inkOn } from "./colors.js";
import { csvText, pythonOf } from "./csv.js";
import { cellsOfRow, growth, logarithmic, meanShares, pythonRows, shortLabel, shownRows } from "./flow_rows.js";
import { chance, count, exact, fit, number, percent, probability, shapeOf, signed, visible, written } from "./format.js";
import { cellAt, cellsOf, crop, labelsAt, layout, pictureOf, range } from "./heat_geometry.js";
import { markOf, note } from "./network_map.js";
import { aboutChecks, badge } from "./proof.js";
import { joints, mapLines, widths } from "./map_lines.js";
import { decodeObjective, encodeObjective } from "./objective.js";
import { plotOf, resultOf, sentenceOf } from "./step_plot.js";
import { stopOf } from "./tour.js";
import { freeCorner, overlap } from "./tour_place.js";

test("numbers have three digits, and never read null, undefined or NaN", () => {
  const numbers = { 0: "0", 0.01234: "0.0123", 7: "7", 999.96: "1,000", 12345.6: "12,346", 1.5e-7: "1.50·10⁻⁷", 123456: "1.23·10⁵", 0.00099999: "0.001" };
  for (const [x, text] of Object.entries(numbers)) assert.equal(number(Number(x)), text);
  assert.equal(number(-0.5), "−0.5");
  assert.equal(number(4.0676, 5), "4.0676");
  for (const nothing of [null, undefined, NaN]) assert.equal(number(nothing), "–");
  assert.equal(number(-Infinity), "−∞");
  assert.deepEqual([signed(0.25), signed(-0.25), signed(0)], ["+0.25", "−0.25", "0"]);
  assert.deepEqual([0.45123, 0.0019, 1, 0.9994, 1e-6, null].map(percent), ["45 %", "0.19 %", "100 %", "99.9 %", "< 0.001 %", "–"]);
  assert.deepEqual([0, -1e-43, chance(800), 1e-5].map(percent), ["0 %", "> −0.001 %", "< 0.001 %", "0.001 %"]);
  assert.deepEqual([0.9996, 0.25, 1e-43].map(probability), ["p > 99.9 %", "p = 25 %", "p < 0.001 %"]);
  assert.equal(written("p = ⟦1e-43%⟧, x = ⟦0.5⟧"), "p < 0.001 %, x = 0.5");
  assert.deepEqual([count(1, "step"), count(2000, "step"), shapeOf([24, 1024]), exact(0.1 + 0.2)], ["1 step", "2,000 steps", "24 × 1,024", "0.3"]);
});

test("numbers in the server's sentences are written as all others", () => {
  assert.equal(written("‘a’ has ⟦0.45123%⟧, length ⟦1.5e-07⟧, ⟦-0.5⟧ or ⟦inf⟧; ⟦nan⟧, ⟦x⟧"), "‘a’ has 45 %, length 1.50·10⁻⁷, −0.5 or ∞; –, ⟦x⟧");
});

test("tokens are visible", () => {
  assert.equal(visible(" a\n\t\x01\x7f\u202e\ue000\xa0é"), "␣a⏎⇥␁␡⟨202e⟩⟨e000⟩⟨a0⟩é");
  assert.deepEqual([fit("abcdef", 4), fit("abcd", 4)], ["abc…", "abcd"]);
});

test("a Δ below 0 is blue, above 0 red, in both themes", () => {
  for (const theme of ["light", "dark"]) {
    const [below, above] = [color("delta", -0.6, theme), color("delta", 0.6, theme)];
    assert.ok(below[2] > below[0] + 40 && above[0] > above[2] + 40);
    assert.deepEqual(color("delta", 0, theme), color("a", 0, theme));
    assert.deepEqual(color("size", 0.6, theme), below);
  }
  assert.deepEqual([inkOn([255, 255, 255]), inkOn([0, 0, 60])], ["#000", "#fff"]);
});

test("a picture can be cropped, and a cell be found again", () => {
  const picture = { ...pictureOf([[0, 0.5, -1, 1], [1, 0, 0, -0.5]]), shape: [2, 8], columns: [0, 8], pool: [1, 2] };
  assert.deepEqual([...cellsOf(picture)], [0, 64, -127, 127, 127, 0, 0, -63]);
  const part = crop(picture, [2, 6]);
  assert.deepEqual([part.columns, part.cells, [...cellsOf(part)]], [[2, 6], [2, 2], [64, -127, 0, 0]]);
  assert.deepEqual([range(part, 1, 1), range(picture, 3, 1)], [[4, 6], [6, 8]]);
  const at = layout(picture, { rowLabels: ["a", "bc"] }, 400);
  assert.deepEqual(cellAt(picture, at, at.left + 2.5 * at.cw, at.top + 1.5 * at.ch), [1, 2]);
  assert.equal(cellAt(picture, at, at.left - 1, at.top + 1), null);
});

test("short labels of columns stand upright, long ones are turned", () => {
  const picture = pictureOf([[0, 1], [1, 0]]);
  const short = { rowLabels: ["a", "b"], columnLabels: ["a", "b"], square: true }, long = { ...short, columnLabels: ["question", "b"] };
  const turned = (labels) => labelsAt(picture, layout(picture, labels, 300), labels).filter((x) => x.row === null).map((x) => x.turned);
  assert.deepEqual([turned(short), turned(long)], [[false, false], [true, true]]);
  const crowded = pictureOf([Array(200).fill(0)]);
  const labels = { columnLabels: Array(200).fill("m") };
  const xs = labelsAt(crowded, layout(crowded, labels, 600), labels).map((x) => x.x);
  assert.ok(xs.length > 10 && Math.min(...xs.slice(1).map((x, i) => x - xs[i])) >= 9);
});

test("the flow has short labels, and one row for each mode", () => {
  assert.deepEqual(["Δ₁", "Δ₄ = Δ₅ of block 1", "Δ_gate, Δ_up of block 12"].map(shortLabel), ["Δ₁", "1·Δ₄=Δ₅", "12·Δ_gate,up"]);
  const row = { station: "a_1", label: "Δ₁", a: [1, 2], delta: [3, 4], share: [0.36, 0.64] };
  assert.deepEqual(["share", "delta", "product", "a"].map((mode) => cellsOfRow(row, mode)), [[0.36, 0.64], [3, 4], [3, 8], [1, 2]]);
  const rows = [null, 0, null, 1, null, null].map((inside) => ({ inside }));
  assert.deepEqual(["all", "none", "1"].map((unfolded) => shownRows(rows, unfolded)), [[0, 1, 2, 3, 4, 5], [0, 2, 4, 5], [0, 2, 3, 4, 5]]);
  assert.equal(pythonRows("x = 1\n\nx + y", [0, 2]), "x = 1\n\n(x + y)[[0, 2]]");
  const { least, most, shares, clipped } = logarithmic([[1e-9, 1, 100, 0]]);
  assert.deepEqual([least, most, shares[0], clipped], [-2, 2, [0.03, 0.5, 1, 0], true]);
  assert.ok(!logarithmic([[1, 100]]).clipped);
  assert.deepEqual([meanShares([row, { ...row, share: [0.86, 0.14] }]), growth([row], "delta")], [[0.61, 0.39], [5, 5]]);
});

test("checks that still run are not called verified", () => {
  const checks = [{ what: "Δ₅, incoming", kind: "autograd", error: 3e-16, limit: 1e-9, passed: true }];
  const measured = [...checks, { ...checks[0], kind: "differences" }];
  const text = (about) => badge({ passed: true, problem: "", checks, ...about });
  assert.match(text({ state: "measuring" }).text, /^autograd ✔, finite differences running: error against autograd/);
  assert.equal(text({ state: "measuring" }).style, "wait");
  assert.match(text({ state: "autograd" }).text, /^autograd ✔, finite differences not computed/);
  assert.match(text({ state: "failed", problem: "too much memory" }).text, /broke off: .* · too much memory$/);
  assert.match(text({ state: "done", checks: measured }).text, /^✔ Verified on this sentence: .* finite differences/);
  const failed = (kind) => badge({ passed: false, state: "done", checks: [{ ...checks[0], what: "a₅", kind, passed: false }] }).text;
  assert.deepEqual([/earlier one/, /more than rounding/, /in this layer/].map((x, i) => x.test(failed(["twin", "rounding", "autograd"][i]))), [true, true, true]);
  const one = (passed, state) => ({ passed, state });
  assert.deepEqual([[one(true, "done")], [one(true, "measuring"), one(true, "done")], [one(null, "measuring")], [one(true, "done"), one(false, "done")]].map((x) => markOf(x)[0]), ["✔", "✓", "", "✘"]);
});

test("finite differences that are not computed are not claimed", () => {
  const stations = [{ id: "a_11", kind: "norm", block: null }, { id: "blocks.1.a_6", kind: "norm", block: 1 }];
  const at = (state) => stopOf(7, { table: { stations, torch: true }, proofs: { "blocks.1.a_6": { passed: true, state } } }).text;
  assert.deepEqual(["done", "autograd"].map((state) => /finite differences/.test(at(state))), [true, false]);
  assert.match(aboutChecks({ state: "done" }, true), /autograd and with finite differences of/);
  assert.match(aboutChecks({ state: "autograd" }, true), /autograd\. Finite differences were not computed\. /);
  assert.doesNotMatch(note(false), /autograd/); // of a page that computes itself
  assert.doesNotMatch(aboutChecks({ state: "done" }, false), /compared with torch's autograd/);
  assert.doesNotMatch(stopOf(7, { table: { stations, torch: false }, proofs: null }).text, /automatic differentiation/);
  assert.doesNotMatch(note(true), /so far/); // in a file nothing follows
});

test("the tour describes the first error signal of what is explained", () => {
  const text = (kind) => stopOf(5, { table: {}, overview: { objective: { kind } } }).text;
  assert.deepEqual(["sentence", "position", "difference"].map((kind) => /divided by the number of targets/.test(text(kind))), [true, false, false]);
  assert.match(text("position"), /all other rows it is 0/);
  assert.match(text("difference"), /1 for the first .* −1 for the second/);
});

test("the axis of the steps marks 0 and decades", () => {
  const { ticks, zero } = plotOf([{ loss: 2, predicted: -2157, measured: 386 }]);
  const values = ticks.map((tick) => tick.value);
  assert.deepEqual(values.slice(0, 3), [386, -2157, 0]);
  assert.ok(values.some((v) => Math.abs(v) === 100 || Math.abs(v) === 10), `${values}`);
  const ys = ticks.map((tick) => tick.y).sort((a, b) => a - b);
  assert.ok(ys.slice(1).every((y, i) => y - ys[i] >= 18) && zero === `M90 ${ticks[2].y}H610`);
  const linear = plotOf([{ loss: 4, predicted: 3.5, measured: 3.6 }]);
  assert.deepEqual([linear.ticks.map((tick) => tick.value), linear.zero], [[linear.most, linear.least], null]);
});

test("the axis of the steps holds what was measured and what was predicted", () => {
  const falling = [{ loss: 4, predicted: 3.5, measured: 3.6 }, { loss: 3.6, predicted: -600, measured: 3 }];
  const ysOf = ({ points, guesses }) => [...points.map((p) => p.y), ...guesses.map((g) => g.y1)];
  for (const steps of [falling, falling.slice(0, 1), [{ loss: 2, predicted: -3, measured: 900 }], [{ loss: 0, predicted: 0, measured: 0 }]]) {
    const plot = plotOf(steps);
    const numbers = [steps[0].loss, ...steps.map((s) => s.measured), ...steps.map((s) => s.predicted)];
    const ys = ysOf(plot);
    assert.ok(ys.every((y) => y >= 16 && y <= 154), `${ys}`);
    assert.ok(plot.least <= Math.min(...numbers) && plot.most >= Math.max(...numbers));
    for (const [i, x] of numbers.entries()) for (const [j, y] of numbers.entries()) assert.equal(x < y, ys[i] > ys[j]); // nothing is clipped
  }
  assert.ok(plotOf(falling).logarithmic && !plotOf(falling.slice(0, 1)).logarithmic);
  const [four, three] = [0, 2].map((i) => plotOf(falling).points[i].y);
  assert.ok(three - four > 2); // one bad prediction does not flatten the curve
  assert.ok(plotOf([{ loss: 2, predicted: 1, measured: 900 }]).logarithmic);
  assert.ok(plotOf([{ loss: 0.01, predicted: 0, measured: 0.02 }]).least >= 0);
  assert.match(resultOf(falling[1]).impossible, /below 0, which no loss can reach/);
  assert.deepEqual(["as predicted", "too large", "curved"], [[2, 1, 1.05], [2, 1, 3], [2, 1, 1.7]].map(([loss, predicted, measured]) => resultOf({ loss, predicted, measured }).kind));
  assert.equal(resultOf({ loss: 2, predicted: 2 - 1e-8, measured: 2 + 1e-7, rounding: 1e-6 }).kind, "rounding"); // not “too large”
  assert.equal(resultOf({ loss: 2, predicted: 2.5, measured: 3 }).kind, "momentum");
  assert.equal(sentenceOf({ loss: 2, predicted: 1, measured: 1.08 }, "loss"), "This is as predicted, within 10 %.");
});

test("an address holds the place, the objective and the sentence", () => {
  const here = { view: "station", station: "blocks.1.a_3", direction: "backward", token: 4, head: 2, text: "a + b & c?", objective: "position-3", exercise: "", hand: null };
  assert.deepEqual(parseAddress(formatAddress(here)), here);
  assert.equal(formatAddress({ ...here, view: "flow", token: null, head: 0, text: null, objective: null }), "#/flow");
  assert.deepEqual(allStops(["x", "y"]), [["x", "forward"], ["y", "forward"], ["y", "backward"], ["x", "backward"]]);
  for (const objective of [{ kind: "position", position: 5 }, { kind: "difference", position: 5, token: 12, against: 7 }]) {
    const shown = { ...objective, token: { id: objective.token }, against: { id: objective.against } };
    assert.deepEqual(decodeObjective(encodeObjective(shown)), objective);
  }
  assert.deepEqual([encodeObjective({ kind: "sentence" }), decodeObjective("position-x"), decodeObjective(null)], [null, null, null]);
});

test("the box of the tour avoids its subject", () => {
  const box = { width: 300, height: 200 };
  assert.equal(freeCorner({ left: 900, top: 600, width: 300, height: 200 }, box, 1280, 900), "bottom-left");
  assert.equal(freeCorner({ left: 0, top: 500, width: 1280, height: 400 }, box, 1280, 900), "top-right");
  assert.equal(overlap({ left: 0, top: 0, width: 4, height: 4 }, { left: 3, top: 2, width: 4, height: 4 }), 2);
});

test("the map connects its rows, and open blocks have two skip connections on each side", () => {
  const rows = [
    { y: 10, id: "a_1", block: null }, { y: 20, id: "a_1", block: 0, top: true }, { y: 30, id: "blocks.0.a_4", block: 0 },
    { y: 40, id: "blocks.0.a_5", block: 0 }, { y: 50, id: "blocks.0.a_9", block: 0 }, { y: 60, id: "blocks.0.a_10", block: 0 }, { y: 80, id: "a_11", block: null },
  ];
  const lengths = { a_1: 1, "blocks.0.a_4": 1, "blocks.0.a_5": 2, "blocks.0.a_9": 3, "blocks.0.a_10": 4, a_11: 8 };
  const stations = [
    { id: "blocks.0.a_5", kind: "add", block: 0, reads: [null, "blocks.0.a_4"] },
    { id: "blocks.0.a_10", kind: "add", block: 0, reads: ["blocks.0.a_5", "blocks.0.a_9"] },
  ];
  stations.push({ id: "blocks.0.a_4", kind: "linear", block: 0, reads: [null] }, { id: "blocks.0.a_9", kind: "linear", block: 0, reads: ["blocks.0.a_5"] });
  const lines = mapLines(rows, 300, lengths, lengths, "both", stations);
  const number_ = (kind, part) => lines.filter((line) => line.kind === kind && line.part === part).length;
  assert.deepEqual([number_("forward", "skip"), number_("backward", "skip"), number_("forward", "flow"), number_("backward", "tip")], [2, 2, 6, 6]);
  assert.ok(mapLines(rows, 300, lengths, lengths, "a", stations).every((line) => line.kind === "forward"));
  assert.equal(joints(rows, 300, "both").length, 14);
  assert.ok(widths([1, 10, null])(10) > widths([1, 10, null])(1) && widths([1])(null) === 0);
});

test("the map draws branches side by side past each other", () => {
  const row = (id, i) => ({ y: 10 * i, id: `blocks.0.${id}`, block: 0 });
  const rows = [{ y: 0, id: "a_1", block: 0, top: true }, ...["a_2", "a_4", "a_9", "a_10"].map((id, i) => row(id, i + 1))];
  const of = (id, kind, ...reads) => ({ id: `blocks.0.${id}`, kind, block: 0, reads: reads.map((x) => x && `blocks.0.${x}`) });
  const stations = [of("a_2", "norm", null), of("a_4", "linear", "a_2"), of("a_9", "linear", "a_2"), of("a_10", "add", null, "a_4", "a_9")];
  const lengths = Object.fromEntries(rows.map(({ id }) => [id, 1]));
  const lines = mapLines(rows, 300, lengths, lengths, "a", stations);
  const starts = (part) => lines.filter((line) => line.part === part).map((line) => Number(/M\d+ (\d+)/.exec(line.d)?.[1]));
  assert.deepEqual(starts("flow"), [5, 15, 35]); // nothing leads from a_4 to a_9
  assert.deepEqual(starts("skip").sort(), [0, 10, 20]);
});

test("tables become CSV, and tensors lines of Python", () => {
  assert.equal(csvText([[1, 2.5], [-3, 4]], ['a"b', "c,d"], ["x", "y"]), ',x,y\r\n"a""b",1,2.5\r\n"c,d",-3,4\r\n');
  assert.deepEqual([pythonOf("blocks.0.rho", 2), pythonOf("a_11")], ['trace["blocks.0.rho"][2]', 'trace["a_11"]']);
});
