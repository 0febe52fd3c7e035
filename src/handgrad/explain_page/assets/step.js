// @ts-check
// The view “Take a step”: the loss that the gradient predicts, the loss that is measured, and how predictions change.

import { aboutGoal, diverges, goalOf, LIMIT, standingOf } from "./after_steps.js";
import { has, post } from "./api.js";
import { elsewhereCard, measureElsewhere } from "./elsewhere.js";
import { count, number, percent, quote, signed, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { button, caption, figureCell, select, table, tr, viewHead } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";
import { plotOf, sentenceOf } from "./step_plot.js";
import { said, wordOf } from "./storyline.js";

let steps = []; // answers of the server, { id, loss, predicted, measured, moves }, with learning rate and optimizer
let moves = []; // probability of each target before the first step and after the last
/** @type {number} */
let rate = NaN; // log10 of the learning rate that is shown
let touched = false; // whether the reader chose it
let optimizer = "SGD";
let running = ""; // "waits" for a trace, "one", "many" or "until" for steps, "ends" until the page has the new weights
/** @type {{ goal: any, standing: any, end: any } | null} */
let until = null; // the word that shall be the first choice, and where it stands
let problem = "";
let runId = 0; // answers that belong to an older run are ignored

/** Forget the steps that are shown; the weights stay what they are. */
export function discardSteps() {
  const dropped = running && running !== "ends";
  problem = dropped ? "A new trace was requested before the step was finished: it was not taken." : "";
  steps = [];
  moves = [];
  running = "";
  until = null;
  runId++;
}

const canStep = has("step");

export const lastStep = () => steps.at(-1);

/** The key of a learning rate in an exported file, as in export.py. @param {number} power */
const rateKey = (power) => String(Number((10 ** power).toPrecision(3)));

export const stepView = {
  id: "step",
  title: "Take a step",
  /** Steps that were taken before, if none can be taken. */
  needs: () => (canStep ? {} : { stored: ["steps", {}] }),

  /** @param {any} state @param {{ stored?: Record<string, any[]> }} data @param {any} actions */
  draw(state, { stored }, actions) {
    const { table: model, overview } = state,
      { objective } = overview;
    const all = model.lora ? "only the adapters are trained" : "all parameters are trained";
    return [
      viewHead(all, "Take a step"),
      h("p.summary", about(model, nameOf(objective))),
      controls(state, stored, actions),
      lastStep()
        ? outcome(lastStep(), nameOf(objective))
        : h("p.soft", { key: "before" }, `Now ${objective.label} is ${number(objective.value, 4)}. ${BEFORE}`),
      steps.length ? curve(objective) : null,
      moves.length ? changes() : null,
      overview.steps && has("predict") ? elsewhereCard(state, goalOf(state, wordOf(state).position), actions) : null,
    ];
  },
};

const BEFORE = "A short enough step against the gradient lowers it; whether a step of this length does is measured.";

/** What a step lowers. */
const nameOf = ({ kind }) => (kind === "difference" ? "difference" : "loss");

const about = (model, name) =>
  `The gradient says how the ${name} changes if the weights change a little. So it predicts the ${name} after a step, and ` +
  `here you can test the prediction. It is accurate for small steps and fails for large ones, because the ${name} is curved.` +
  (model.lora
    ? ` The model is frozen: of ${count(model.parameters)} parameters, only the ${count(model.trains)} ` +
      `of the adapters are trained.`
    : "");

/** A step of Adam moves every weight by about the learning rate: the more weights, the smaller it must be. */
const firstRate = ({ large }, name) => (name === "Adam" ? (large ? -5 : -3) : large ? -3 : -2);

/** What a step of a large model is doing, which takes seconds. */
const STEPS = "Computing the steps…";
const WORK = { one: "Computing the step…", many: STEPS, until: STEPS, ends: "Computing a trace with the new weights…" };

/** @param {any} state @param {Record<string, any[]> | undefined} stored  by learning rate @param {any} actions */
function controls(state, stored, actions) {
  if (!touched) rate = firstRate(state.table, optimizer);
  const rates = stored ? Object.keys(stored) : null;
  if (rates && !rates.includes(rateKey(rate))) rate = Math.log10(Number(rates[1] ?? rates[0]));
  const prepared = stored ? stored[rateKey(rate)] : null;
  const left = prepared ? prepared.filter((step) => !step.error).length - steps.length : 20;
  const setRate = (event) => {
    touched = true;
    rate = rates ? Math.log10(Number(rates[event.target.value])) : Number(event.target.value);
    if (stored) discardSteps();
    actions.redraw();
  };
  const work = running === "waits" ? "Waiting for the trace…" : state.table.large && !stored && WORK[running];
  const can = {
    one: !running && left > 0,
    many: (!running || running === "many") && left > 0,
    until: !running || running === "until",
    reset: !running,
  };
  const goal = goalOf(state, wordOf(state).position);
  const choose = (name) => {
    optimizer = name;
    actions.redraw();
  };
  const control = (id, style, enabled, act, text) =>
    button(text, () => enabled && act(), { id, class: style, "aria-disabled": enabled ? null : "true" });
  const slider = {
    type: "range",
    id: "rate",
    min: rates ? 0 : state.table.large ? -6 : -4,
    max: rates ? rates.length - 1 : 1,
    step: rates ? 1 : 0.05,
    value: String(rates ? rates.indexOf(rateKey(rate)) : rate),
    "aria-valuetext": number(10 ** rate),
    oninput: setRate,
  };
  return h(
    "section.card.controls",
    { "aria-label": "Step", key: "controls" },
    h(
      "div.field",
      h(
        "label",
        { for: "rate" },
        "learning rate η ",
        h("output", { for: "rate", id: "shown-rate" }, number(10 ** rate)),
      ),
      h("input", slider),
    ),
    h(
      "div.field",
      h("label", { for: "optimizer" }, "optimizer"),
      select({ id: "optimizer", disabled: Boolean(stored), value: optimizer }, Object.entries(state.table.optimizers), choose),
    ),
    h(
      "div.walk",
      control("step-one", "primary", can.one, () => take(1, prepared, state, actions), "Take one step"),
      control(
        "step-many",
        null,
        can.many,
        () => take(left, prepared, state, actions),
        running === "many" ? "stop" : `run ${left || ""}`.trim(),
      ),
      stored
        ? null
        : control(
            "step-until",
            null,
            can.until,
            () => take(LIMIT, null, state, actions, goal),
            running === "until" ? "stop" : `take steps until it says ${said(goal.word)}`,
          ),
      control("step-reset", null, can.reset, () => actions.resetWeights(), "reset"),
    ),
    problem ? h("p.problem", { role: "alert" }, problem) : null,
    until?.standing
      ? h(
          "p",
          { role: "status", key: "until", id: "until", "data-steps": until.standing.steps, "data-end": until.end },
          aboutGoal(until.goal, until.standing, until.end, steps[0]?.loss ?? NaN),
        )
      : null,
    work ? h("p.soft", { role: "status", key: "work" }, work) : null,
    left || !prepared
      ? null
      : h(
          "p.soft",
          { role: "status" },
          prepared.at(-1).error ?? "This file contains no more steps. To take more, run handgrad explain.",
        ),
  );
}

/** Take steps, at most this many; with a goal, until that word is the first choice or the steps diverge.
 * @param {number} number_ @param {any} prepared @param {any} state @param {any} actions @param {any} goal */
async function take(number_, prepared, state, actions, goal = null) {
  if (running) {
    running = ""; // ends the loop below
    return;
  }
  const mine = runId;
  problem = "";
  running = "waits";
  actions.redraw();
  const failed = await actions.traced(); // the step is taken on the sentence that is being traced
  if (mine !== runId) return;
  if (failed) {
    running = "";
    problem = "No step was taken, because the trace failed.";
    return actions.redraw();
  }
  running = goal ? "until" : number_ > 1 ? "many" : "one";
  until = goal && { goal, standing: null, end: "running" };
  const before = state.overview.steps;
  const one = () =>
    prepared
      ? prepared[steps.length]
      : post("step", { id: lastStep()?.id ?? state.overview.id, lr: 10 ** rate, optimizer });
  actions.redraw();
  try {
    if (goal) await look(lastStep()?.version ?? state.overview.version, before, state, actions, mine);
    for (let i = 0; i < number_ && running && !ended(); i++) {
      const taken = await actions.busy(Promise.resolve(one()));
      if (mine !== runId) return; // another sentence was entered meanwhile
      moves = taken.moves.map((m, t) => ({ ...m, before: steps.length ? moves[t].before : m.before }));
      steps.push({ ...taken, lr: Number((10 ** rate).toPrecision(6)), optimizer });
      if (goal) await look(taken.version, taken.steps, state, actions, mine);
      if (mine !== runId) return;
      actions.redraw();
    }
  } catch (reason) {
    if (mine !== runId) return;
    problem = reason.message;
    if (until) until.end = "stopped";
  }
  if (until?.end === "running") until.end = running ? "limit" : "stopped";
  running = "ends";
  try {
    if (canStep && steps.length) await actions.showSentence(lastStep().id);
  } catch (reason) {
    if (mine === runId) problem = reason.message;
  }
  if (mine !== runId) return;
  running = "";
  actions.redraw();
  if (until?.end === "reached" && state.overview.steps) await measureElsewhere(state, actions);
}

const ended = () => until !== null && until.end !== "running";

/** See where the word stands with these weights. */
async function look(version, taken, state, actions, mine) {
  const found = await actions.busy(post("predict", { text: state.overview.text, version }));
  if (mine !== runId || !until) return;
  until.standing = standingOf(until.goal, found, taken);
  if (until.standing.first.id === until.goal.id) until.end = "reached";
  else if (diverges(steps)) until.end = "diverges";
}

function outcome(last, name) {
  const fact = (id, label, value) =>
    h("div", h("b", { id, "data-value": value }, number(value, 5)), h("span", label));
  const change =
    `The step changed the ${name} by ${signed(last.measured - last.loss)}; the gradient predicted ` +
    `${signed(last.predicted - last.loss)}.`;
  return h(
    "section.card.outcome",
    { "aria-label": "Outcome", "aria-live": "polite", key: "outcome" },
    h(
      "div.facts",
      fact("loss-before", `${name} before`, last.loss),
      fact("loss-predicted", "predicted to first order", last.predicted),
      fact("loss-measured", "measured", last.measured),
    ),
    caption(`${change} ${sentenceOf(last, name)}`),
  );
}

const capital = (/** @type {string} */ word) => word[0].toUpperCase() + word.slice(1);

/** The same steps in Python; undefined if the optimizer was changed between them. */
function pythonOf(objective) {
  const [{ optimizer: name }] = steps;
  if (steps.some((step) => step.optimizer !== name)) return undefined;
  const betas = name === "Adam" ? ", betas=(0.9, 0.99)" : "";
  return [
    `optimizer = torch.optim.${name}([p for p in model.parameters() if p.requires_grad], lr=1${betas})`,
    "losses = []",
    `for lr in [${steps.map((step) => step.lr).join(", ")}]:`,
    "    optimizer.param_groups[0]['lr'] = lr",
    `    losses.append(${objective.python.replace("hg.trace(model, ", "model.loss_and_grads(")})`,
    "    optimizer.step()",
    "    optimizer.zero_grad()",
  ].join("\n");
}

function curve(objective) {
  const name = nameOf(objective);
  const plot = plotOf(steps);
  const first = steps[0].loss,
    last = lastStep().measured;
  const text = (x, y, anchor, content) => h("text", { x, y, "text-anchor": anchor }, content);
  // left of the axis, or from the left edge where there is too little room
  const edge = (y, label) => (label.length > 7 ? text(0, y, "start", label) : text(84, y, "end", label));
  const drawing = h(
    "svg",
    {
      viewBox: "0 0 640 180",
      role: "img",
      "aria-label": `${capital(name)} over ${count(steps.length, "step")}, from ${number(first)} to ${number(last)}`,
    },
    h("path.axis", { d: plot.axis, fill: "none" }),
    plot.guesses.map((g) => h("path.guess", { d: `M${g.x0} ${g.y0}L${g.x1} ${g.y1}`, fill: "none" })),
    h("polyline.measured", { points: plot.points.map((p) => `${p.x},${p.y}`).join(" "), fill: "none" }),
    plot.points.map((p) => h("circle.measured-point", { cx: p.x, cy: p.y, r: 3.5 })),
    plot.zero ? h("path.axis", { d: plot.zero, fill: "none" }) : null,
    plot.ticks.flatMap(({ value, y }) => [
      h("path.axis", { d: `M86 ${y}H90`, fill: "none" }),
      edge(y + 4, number(value)),
    ]),
    text(90, 174, "middle", "0"),
    text(610, 174, "middle", String(steps.length)),
  );
  const values = () => steps.map((s, i) => [i + 1, s.loss, s.predicted, s.measured]);
  return savedFigure(
    {
      class: "card curve",
      key: "curve",
      title: `${capital(name)} after each step${plot.logarithmic ? ", logarithmic" : ""}`,
      python: pythonOf(objective),
      values,
      columnLabels: ["step", "before", "predicted", "measured"],
    },
    drawing,
    caption(
      `Solid: measured. Dashed: predicted by the gradient.` +
        ` After ${count(steps.length, "step")} the ${name} went from ${number(first, 4)} to ${number(last, 4)}.`,
    ),
  );
}

function changes() {
  const rows = moves.map((m, t) =>
    tr(
      { key: t, "data-link": tokenLink(t) },
      visible(m.token),
      h("b", visible(m.target)),
      h(
        "td.move",
        h(
          "span.track",
          h("i.is", { style: { width: `${100 * m.after}%` } }),
          h("i.was", { style: { left: `${100 * m.before}%` } }),
        ),
      ),
      figureCell(percent(m.before)),
      figureCell(percent(m.after)),
    ),
  );
  const most = moves.reduce((best, m) =>
    Math.abs(m.after - m.before) > Math.abs(best.after - best.before) ? m : best,
  );
  return savedFigure(
    {
      class: "card",
      key: "moves",
      tag: "h3",
      title: "How the predictions changed",
      python: "trace['y_pred'].gather(1, targets[0].clamp(min=0)[:, None])[:-1]",
      values: () => moves.map((m) => [m.token, m.target, m.before, m.after]),
      columnLabels: ["after token", "target", "before", "now"],
    },
    caption(
      `The largest change: ${quote(most.target)} after ${quote(most.token)}, from ` +
        `${percent(most.before)} to ${percent(most.after)}.`,
    ),
    table("Probabilities", ["after token", "target", "probability", "before", "now"], rows, {
      class: "moves",
      tall: true,
    }),
  );
}
