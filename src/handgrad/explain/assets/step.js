// The view “Take a step”: the loss that the gradient predicts, the loss that is measured, and how the predictions change.

import { embeddedSteps, offline, post } from "./api.js";
import { el, svg } from "./dom.js";
import { count, number, percent, visible } from "./format.js";

let steps = []; // answers of the server: { id, loss, predicted, measured, moves }
let moves = []; // probability of each target before the first step and after the last
let rate = -2; // log10 of the learning rate
let optimizer = "SGD";
let running = ""; // "one" or "many" while steps are taken, then "ends" until the page has the new weights
let problem = "";
let runId = 0; // answers that belong to an older run are ignored

export function discardSteps() {
  steps = [];
  moves = [];
  problem = "";
  running = "";
  runId++;
}

export const lastStep = () => steps.at(-1);

/* `actions`: see page.js. */
export function drawStep(panel, state, actions) {
  const { table, overview } = state;
  const rates = offline ? Object.keys(embeddedSteps()) : null;
  if (rates && !rates.includes(rateKey(rate))) rate = Math.log10(Number(rates[1] ?? rates[0]));
  const redraw = () => drawStep(panel, state, actions);
  const slider = el("input", {
    type: "range", id: "rate", min: rates ? 0 : -4, max: rates ? rates.length - 1 : 1, step: rates ? 1 : 0.05, value: rates ? rates.indexOf(rateKey(rate)) : rate,
    oninput: (event) => {
      rate = rates ? Math.log10(Number(rates[event.target.value])) : Number(event.target.value);
      shownRate.textContent = number(10 ** rate);
      slider.setAttribute("aria-valuetext", number(10 ** rate));
      if (offline) { discardSteps(); redraw(); actions.drawHeader(); panel.querySelector("#rate").focus(); }
    },
  });
  slider.setAttribute("aria-valuetext", number(10 ** rate));
  const shownRate = el("output", { for: "rate", id: "shown-rate" }, number(10 ** rate));
  const prepared = offline ? embeddedSteps()[rateKey(rate)] : null;
  const left = offline ? prepared.filter((step) => !step.error).length - steps.length : 20;
  const one = async () => {
    if (offline) return prepared[steps.length];
    return post("step", { id: lastStep()?.id ?? state.overview.id, lr: 10 ** rate, optimizer });
  };
  const take = async (count) => {
    if (running) {
      running = ""; // ends the loop below
      return;
    }
    running = count > 1 ? "many" : "one";
    const mine = runId;
    problem = "";
    redraw();
    try {
      for (let i = 0; i < count && running; i++) {
        const taken = await actions.busy(one());
        if (mine !== runId) return; // another sentence was entered meanwhile
        if (!steps.length) moves = taken.moves.map((m) => ({ ...m }));
        else moves = taken.moves.map((m, t) => ({ ...m, before: moves[t].before }));
        steps.push(taken);
        redraw();
        actions.drawHeader();
      }
    } catch (reason) {
      if (mine !== runId) return;
      problem = reason.message;
    }
    running = "ends";
    try {
      if (!offline && steps.length) await actions.showSentence(lastStep().id);
    } catch (reason) {
      if (mine === runId) problem = reason.message;
    }
    if (mine !== runId) return;
    running = "";
    redraw();
  };
  const last = steps.at(-1);
  const focus = panel.contains(document.activeElement) ? document.activeElement.id : null;
  panel.replaceChildren(
    el("div", { class: "station-head backward" }, el("div", {}, el("p", { class: "where" }, table.lora ? "only the adapters are trained" : "all parameters are trained"), el("h2", {}, "Take a step"))),
    el("p", { class: "summary" }, `The gradient says how the loss changes if the weights change a little. So it predicts the loss after a step, and here you can test the prediction. It is accurate for small steps and fails for large ones, because the loss is curved. ${table.lora ? `The model is frozen: of ${count(table.parameters)} parameters, only the ${count(table.trains)} of the adapters are trained.` : ""}`),
    el(
      "section",
      { class: "card controls", "aria-label": "Step" },
      el("div", { class: "field" }, el("label", { for: "rate" }, "learning rate η ", shownRate), slider),
      el("div", { class: "field" }, el("label", { for: "optimizer" }, "optimizer"), el("select", { id: "optimizer", disabled: offline, onchange: (event) => (optimizer = event.target.value) }, Object.entries(table.optimizers).map(([key, text]) => el("option", { value: key, selected: key === optimizer }, text)))),
      el("div", { class: "walk" },
        el("button", { type: "button", id: "step-one", class: "primary", disabled: Boolean(running) || !left, onclick: () => take(1) }, "Take one step"),
        el("button", { type: "button", id: "step-many", disabled: running === "one" || running === "ends" || !left, onclick: () => take(left) }, running === "many" ? "stop" : `run ${left || ""}`.trim()),
        el("button", { type: "button", id: "step-reset", disabled: Boolean(running), onclick: async () => { discardSteps(); await actions.reset(); } }, "reset")),
      problem ? el("p", { class: "problem", role: "alert" }, problem) : null,
      left ? null : el("p", { class: "soft", role: "status" }, prepared.at(-1).error ?? "This file contains no more steps. To take more, run handgrad explain."),
    ),
    last ? outcome(last) : el("p", { class: "soft" }, `The loss is ${number(overview.loss, 4)}. Take a step to see it fall.`),
    ...(steps.length ? [drawCurve()] : []),
    ...(moves.length ? [drawMoves()] : []),
  );
  if (focus) panel.querySelector(left ? `#${focus}` : `#${focus}:not([disabled]), #step-reset`)?.focus();
}

// The key of a learning rate in an exported file, as in export.py.
const rateKey = (power) => String(Number((10 ** power).toPrecision(3)));

function outcome(last) {
  const expected = last.predicted - last.loss, got = last.measured - last.loss;
  const share = expected ? got / expected : 0;
  const result = share > 0.9 && share < 1.1 ? "This is as predicted" : got > 0 ? "The loss rose: the step was too large" : `That is ${percent(Math.max(0, share))} of the prediction, because the loss is curved`;
  const fact = (id, label, value) => el("div", {}, el("b", { id, "data-value": value }, number(value, 5)), el("span", {}, label));
  return el(
    "section",
    { class: "card outcome", "aria-label": "Outcome", "aria-live": "polite" },
    el("div", { class: "facts" }, fact("loss-before", "loss before", last.loss), fact("loss-predicted", "predicted to first order", last.predicted), fact("loss-measured", "measured", last.measured)),
    el("p", { class: "caption" }, `The step changed the loss by ${number(got)}; the gradient predicted ${number(expected)}. ${result}.`),
  );
}

function drawCurve() {
  const points = [steps[0].loss, ...steps.map((c) => c.measured)];
  const all = [...points, ...steps.map((c) => c.predicted)];
  const most = Math.max(...all), least = Math.min(...all, most - 1e-6);
  const x = (i) => 90 + (520 * i) / Math.max(1, points.length - 1), y = (v) => 14 + (140 * (most - v)) / (most - least);
  const text = (a, b, content, anchor) => { const node = svg("text", { x: a, y: b, "text-anchor": anchor }); node.textContent = content; return node; };
  const drawing = svg(
    "svg", { viewBox: "0 0 640 180", role: "img", "aria-label": `Loss over ${steps.length} steps, from ${number(points[0])} to ${number(points.at(-1))}` },
    svg("path", { class: "axis", d: "M90 14V154H610", fill: "none" }),
    steps.map((c, i) => svg("path", { class: "guess", d: `M${x(i)} ${y(points[i])}L${x(i + 1)} ${y(c.predicted)}`, fill: "none" })),
    svg("polyline", { class: "measured", points: points.map((v, i) => `${x(i)},${y(v)}`).join(" "), fill: "none" }),
    points.map((v, i) => svg("circle", { class: "measured-point", cx: x(i), cy: y(v), r: 3.5 })),
    text(84, 20, number(most), "end"), text(84, 156, number(least), "end"), text(90, 172, "0", "middle"), text(610, 172, `${steps.length}`, "middle"),
  );
  return el("figure", { class: "card curve" }, el("figcaption", {}, "Loss after each step"), drawing, el("p", { class: "caption" }, `Solid: measured. Dashed: predicted by the gradient. After ${count(steps.length, "step")} the loss went from ${number(points[0], 4)} to ${number(points.at(-1), 4)}.`));
}

function drawMoves() {
  const rows = moves.map((m) => {
    const was = el("i", { class: "was" }), is = el("i", { class: "is" });
    was.style.left = `${100 * m.before}%`;
    is.style.width = `${100 * m.after}%`;
    return el("tr", {}, el("td", {}, visible(m.token)), el("td", {}, el("b", {}, visible(m.target))), el("td", { class: "move" }, el("span", { class: "track" }, is, was)), el("td", { class: "figure" }, percent(m.before)), el("td", { class: "figure" }, percent(m.after)));
  });
  const head = el("tr", {}, ["after token", "target", "probability", "before", "now"].map((t) => el("th", { scope: "col" }, t)));
  const most = moves.reduce((best, m) => (Math.abs(m.after - m.before) > Math.abs(best.after - best.before) ? m : best));
  return el("section", { class: "card", "aria-label": "How the predictions changed" }, el("h3", {}, "How the predictions changed"), el("p", { class: "caption" }, `The largest change: ‘${visible(most.target)}’ after ‘${visible(most.token)}’, from ${percent(most.before)} to ${percent(most.after)}.`), el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Probabilities" }, el("table", { class: "moves" }, el("thead", {}, head), el("tbody", {}, rows))));
}
