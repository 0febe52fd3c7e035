// Unit tests of the movement, of what is linked, and of the sentences about steps. Run by tests/explain/test_assets.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { aboutElsewhere, aboutGoal, diverges, goalOf, standingOf } from "./after_steps.js";
import { entriesLit, linksOf, spaceOf, thingsAt } from "./linked.js";
import { planOf } from "./play_plan.js";
import { pointOn, stopAt } from "./play_scene.js";

const station = (id, kind, block, ...reads) => ({ id, kind, block, reads, symbol: id.split(".").at(-1), title: kind });
const inside = (b) => {
  const of = (letter) => `blocks.${b}.a_${letter}`;
  return [
    station(of(2), "norm", b, null), station(of(3), "attention", b, of(2)), station(of(4), "linear", b, of(3)), station(of(5), "add", b, null, of(4)),
    station(of(6), "norm", b, of(5)), station(of(9), "linear", b, of(6)), station(of(10), "add", b, of(5), of(9)),
  ];
};
const stations = [station("a_0", "tokens", null), station("a_1", "embedding", null), ...inside(0), ...inside(1), station("a_11", "norm", null), station("loss", "loss", null)];
const table = { stations, blocks: 2, heads: 2 };
const flows = stations.map(({ id }, i) => ({ id, a: id === "loss" || id === "a_0" ? null : [3 * i, 4 * i], delta: id === "loss" || id === "a_0" ? null : [i] }));
const overview = { flows, tokens: [{}, {}], objective: { label: "the loss", value: 2 } };
const heads = [{ length: 1, incoming: 4 }, { length: 3, incoming: 2 }];

test("the pulse splits at skip connections and heads, and is added where branches meet", () => {
  const plan = planOf(table, overview, 1, heads);
  assert.deepEqual(plan.rows.map((row) => row.id), ["a_0", "a_1", "blocks.0.a_10", "blocks.0.a_10", ...inside(1).map((s) => s.id), "a_11", "loss"]);
  assert.equal(plan.seconds, 10);
  const stop = (id, kind) => plan.stops.find((one) => one.row.id === id && one.kind === kind && !one.row.top && one.row.kind !== "folded");
  const top = (kind) => plan.stops.find((one) => one.row.top && one.kind === kind);
  const arriving = (at, kind) => plan.ways.filter((way) => way.kind === kind && Math.abs(way.to - at) < 1e-9);
  const leaving = (at, kind) => plan.ways.filter((way) => way.kind === kind && Math.abs(way.from - at) < 1e-9);
  // forward: the input of the block goes two ways, which meet at a_5; the heads leave the norm and meet at the projection
  const five = stop("blocks.1.a_5", "forward");
  assert.equal(leaving(top("forward").at, "forward").length, 2);
  assert.deepEqual([arriving(five.at, "forward").length, five.meets], [2, true]);
  assert.equal(leaving(stop("blocks.1.a_2", "forward").at, "forward").length, heads.length);
  assert.equal(arriving(stop("blocks.1.a_4", "forward").at, "forward").length, heads.length);
  assert.ok(!stop("blocks.1.a_4", "forward").meets); // the heads stand side by side: they are not a sum of two ways
  // backward: Δ of an addition goes two ways, and what was read twice gets a sum
  assert.equal(leaving(stop("blocks.1.a_5", "backward").at, "backward").length, 2);
  assert.ok(top("backward").meets && stop("blocks.1.a_5", "backward").meets);
  assert.ok(!stop("blocks.1.a_10", "backward").meets);
  // every way has its time, no two passes at once, and its width and light from the lengths
  assert.ok(plan.ways.every(({ from, to }) => from < to && to <= 9.5 + 1e-9));
  const forward = plan.ways.filter((way) => way.kind === "forward");
  assert.ok(Math.max(...forward.map((way) => way.to)) < Math.min(...plan.ways.filter((way) => way.kind === "backward").map((way) => way.from)));
  const [one, three] = arriving(stop("blocks.1.a_4", "forward").at, "forward");
  assert.ok(three.width > one.width && three.light > one.light && one.light >= 0.4 && three.light <= 1);
  const [four, two] = arriving(stop("blocks.1.a_2", "backward").at, "backward");
  assert.ok(four.width > two.width);
});

test("the stops say the lengths", () => {
  const { stops } = planOf(table, overview, 1, heads);
  const text = (id, kind) => stops.filter((one) => one.row.id === id && one.kind === kind && !one.row.top).at(-1).text;
  const i = (id) => stations.findIndex((s) => s.id === id);
  assert.equal(text("blocks.1.a_5", "forward"), `a_5  add: what it joins has lengths ${5 * i("blocks.0.a_10")} and ${5 * i("blocks.1.a_4")}; the result has length ${5 * i("blocks.1.a_5")}.`);
  assert.match(text("blocks.1.a_3", "forward"), /2 heads side by side; the longest output is that of head 2, 3\.$/);
  assert.match(text("blocks.1.a_3", "backward"), /Of 2 heads, head 1 receives most, 4\.$/);
  assert.match(text("loss", "forward"), /^the loss: 2\. /);
  assert.deepEqual([stopAt({ stops }, 0).text, stopAt({ stops }, 100).text], [stops[0].text, "The backward pass is complete: every layer has its gradient."]);
  assert.doesNotMatch(planOf(table, overview, 0, null).stops.map((one) => one.text).join(""), /head|undefined|NaN/);
  assert.deepEqual(pointOn([[0, 0], [0, 10], [30, 10]], 0.5), [10, 10]);
});

test("what an entry stands for is found again along an axis", () => {
  const shape = { width: 12, heads: 3 };
  const links = linksOf("blocks.2.a_3", null, shape);
  assert.deepEqual(thingsAt(links, 4, 9), ["token-4", "feature-mixed-2-9", "head-2-2", "space-mixed-2"]);
  assert.deepEqual([entriesLit(links.rows, ["token-4"]), entriesLit(links.columns, ["head-2-1"]), entriesLit(links.columns, ["head-1-1", "token-4"])], [[[4, 5]], [[4, 8]], []]);
  assert.deepEqual(["a_1", "blocks.3.delta_10", "blocks.3.a_gate", "a_12", "blocks.0.rho", "loss"].map(spaceOf), ["stream", "stream", "hidden-3", null, null, null]);
  assert.deepEqual(thingsAt(linksOf("blocks.1.grad_w_6", null, shape), 7, 8), ["feature-stream-7", "feature-hidden-1-8"]);
  assert.deepEqual(thingsAt(linksOf("blocks.1.rho", 2, shape), 5, 3), ["token-5", "token-3", "head-1-2"]);
  assert.deepEqual(thingsAt(linksOf("swaps", null, shape), 5, 3), []);
});

test("a word is the goal until it is the first choice, or the steps diverge", () => {
  const state = { overview: { tokens: [{ id: 1, label: "a" }, { id: 2, label: " b" }], objective: { kind: "sentence" } } };
  const goal = goalOf(state, 0);
  assert.deepEqual(goal, { position: 0, id: 2, word: " b", before: "a" });
  assert.equal(goalOf({ overview: { ...state.overview, objective: { kind: "difference", against: { id: 7, word: "x" } } } }, 0).id, 7);
  const row = { top: [{ id: 5, word: "c", p: 0.5 }], target_id: 2, probability: 0.01 };
  const standing = standingOf(goal, { positions: [row] }, 3);
  assert.deepEqual(standing, { steps: 3, first: row.top[0], p: 0.01 });
  assert.equal(standingOf({ ...goal, id: 9 }, { positions: [row] }, 3).p, null);
  assert.equal(aboutGoal(goal, standing, "stopped", 2), "Stopped. After 3 steps, the first choice after ‘a’ is ‘c’, with 50 %; ‘b’ has 1 %.");
  assert.match(aboutGoal(goal, standing, "limit", 2), /^That is not enough\. After 3 steps/);
  assert.match(aboutGoal(goal, standing, "diverges", 2.5), /the last 3 ended above 2\.5, where they began/);
  assert.equal(aboutGoal(goal, { steps: 0, first: { id: 2, word: " b", p: 0.4 }, p: 0.4 }, "reached", NaN), "Before any step, ‘b’ is the first choice after ‘a’, with 40 %.");
  const steps = (...measured) => measured.map((x) => ({ loss: 2, measured: x }));
  assert.deepEqual([steps(3, 3), steps(3, 3, 3), steps(3, 1, 3, 3), steps(1, 3, NaN, 9)].map(diverges), [false, true, false, true]);
});

test("the fate of other prompts is counted", () => {
  const goal = { id: 2, word: " b" };
  const row = (text, before, now, left) => ({ text, before: { id: before, word: `w${before}`, p: 0.5 }, now: { id: now, word: "n", p: 0.3 }, left, rank: 4 });
  assert.equal(aboutElsewhere([row("x", 1, 2, 0.1), row("y", 1, 3, 0.4), row("z", 4, 4, 0.6)], goal), "Of 3 other prompts, 2 now have another first choice, once ‘b’. Hit hardest: ‘w1’ after ‘x’, from 50 % to 10 %.");
  assert.equal(aboutElsewhere([row("z", 4, 4, 0.6)], goal), "Of 1 other prompt, it kept the first choice. No first choice lost probability.");
  assert.match(aboutElsewhere([row("x", 1, 2, null), row("y", 1, 2, 0.2)], goal), /2 now have another first choice, each time ‘b’\. Hit hardest: ‘w1’ after ‘y’/);
  assert.match(aboutElsewhere([row("x", 1, 2, 0.1)], goal), /^Of 1 other prompt, 1 now has another first choice, ‘b’\. /);
});
