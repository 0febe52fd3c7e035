// Take a step: the loss predicted to first order beside the loss measured, and how the predictions move.

import { offline, send, stepsInFile } from "./data.js";
import { el, number, percent, svg, visible } from "./drawing.js";

let curve = []; // { loss, predicted, measured }
let moves = [];
let rate = -2; // power of ten
let optimizer = "SGD";
let running = ""; // "one" or "many" while steps are taken
let told = "";
let round = 0; // of the runs: what an older one still brings is thrown away

export function forgetSteps() {
  curve = [];
  moves = [];
  told = "";
  running = "";
  round++;
}

export const lastStep = () => curve.at(-1);

/* `tools` = { arrived(id) → loads that look, reset(), busy(promise), header() → the loss at the top } */
export function drawStep(panel, state, tools) {
  const { table, look } = state;
  const rates = offline ? Object.keys(stepsInFile()) : null;
  if (rates && !rates.includes(number10(rate))) rate = Math.log10(Number(rates[1] ?? rates[0]));
  const again = () => drawStep(panel, state, tools);
  const slider = el("input", {
    type: "range", id: "rate", min: rates ? 0 : -4, max: rates ? rates.length - 1 : 1, step: rates ? 1 : 0.05, value: rates ? rates.indexOf(number10(rate)) : rate,
    oninput: (event) => {
      rate = rates ? Math.log10(Number(rates[event.target.value])) : Number(event.target.value);
      shownRate.textContent = number(10 ** rate);
      slider.setAttribute("aria-valuetext", number(10 ** rate));
      if (offline) { forgetSteps(); again(); tools.header(); panel.querySelector("#rate").focus(); }
    },
  });
  slider.setAttribute("aria-valuetext", number(10 ** rate));
  const shownRate = el("output", { for: "rate", id: "shown-rate" }, number(10 ** rate));
  const prepared = offline ? stepsInFile()[number10(rate)] : null;
  const left = offline ? prepared.filter((step) => !step.error).length - curve.length : 20;
  const one = async () => {
    if (offline) return prepared[curve.length];
    return send("step", { id: lastStep()?.id ?? state.look.id, lr: 10 ** rate, optimizer });
  };
  const take = async (count) => {
    if (running) {
      running = ""; // which ends the loop below
      return;
    }
    running = count > 1 ? "many" : "one";
    const mine = round;
    told = "";
    again();
    try {
      for (let i = 0; i < count && running; i++) {
        const taken = await tools.busy(one());
        if (mine !== round) return; // the sentence is another by now
        if (!curve.length) moves = taken.moves.map((m) => ({ ...m }));
        else moves = taken.moves.map((m, t) => ({ ...m, before: moves[t].before }));
        curve.push(taken);
        again();
        tools.header();
      }
    } catch (reason) {
      if (mine !== round) return;
      told = reason.message;
    }
    running = "ends";
    try {
      if (!offline && curve.length) await tools.arrived(lastStep().id);
    } catch (reason) {
      if (mine === round) told = reason.message;
    }
    if (mine !== round) return;
    running = "";
    again();
  };
  const last = curve.at(-1);
  const focus = panel.contains(document.activeElement) ? document.activeElement.id : null;
  panel.replaceChildren(
    el("div", { class: "station-head backward" }, el("div", {}, el("p", { class: "where" }, table.lora ? "only the adapters move" : "every parameter moves"), el("h2", {}, "Take a step"))),
    el("p", { class: "plain" }, `The gradient says how the loss changes if the weights move a little. So it predicts the loss after a step, and the prediction can be tried. Small steps come out as predicted; large ones do not, because the loss bends. ${table.lora ? `The model is frozen: of ${table.parameters.toLocaleString("en")} parameters only the ${table.trains.toLocaleString("en")} of the adapters move.` : ""}`),
    el(
      "section",
      { class: "card controls", "aria-label": "Step" },
      el("div", { class: "field" }, el("label", { for: "rate" }, "learning rate η ", shownRate), slider),
      el("div", { class: "field" }, el("label", { for: "optimizer" }, "optimizer"), el("select", { id: "optimizer", disabled: offline, onchange: (event) => (optimizer = event.target.value) }, Object.entries(table.optimizers).map(([key, text]) => el("option", { value: key, selected: key === optimizer }, text)))),
      el("div", { class: "walk" },
        el("button", { type: "button", id: "step-one", class: "primary", disabled: Boolean(running) || !left, onclick: () => take(1) }, "Take one step"),
        el("button", { type: "button", id: "step-many", disabled: running === "one" || running === "ends" || !left, onclick: () => take(left) }, running === "many" ? "stop" : `run ${left || ""}`.trim()),
        el("button", { type: "button", id: "step-reset", disabled: Boolean(running), onclick: async () => { forgetSteps(); await tools.reset(); } }, "reset")),
      told ? el("p", { class: "problem", role: "alert" }, told) : null,
      left ? null : el("p", { class: "soft", role: "status" }, prepared.at(-1).error ?? "These are all the steps in this file: run handgrad explain to go on."),
    ),
    last ? outcome(last) : el("p", { class: "soft" }, `The loss is ${number(look.loss, 4)} now. Take a step to see it fall.`),
    curve.length ? drawCurve() : null,
    moves.length ? drawMoves() : null,
  );
  if (focus) panel.querySelector(left ? `#${focus}` : `#${focus}:not([disabled]), #step-reset`)?.focus();
}

const number10 = (power) => String(Number((10 ** power).toPrecision(3)));

function outcome(last) {
  const expected = last.predicted - last.loss, got = last.measured - last.loss;
  const share = expected ? got / expected : 0;
  const verdict = share > 0.9 && share < 1.1 ? "as predicted" : got > 0 ? "it rose: the step was too long" : `${percent(Math.max(0, share))} of what was predicted: the loss bends`;
  const fact = (id, label, value) => el("div", {}, el("b", { id, "data-value": value }, number(value, 5)), el("span", {}, label));
  return el(
    "section",
    { class: "card outcome", "aria-label": "Outcome", "aria-live": "polite" },
    el("div", { class: "facts" }, fact("loss-before", "loss before", last.loss), fact("loss-predicted", "predicted to first order", last.predicted), fact("loss-measured", "measured", last.measured)),
    el("p", { class: "words" }, `The step changed the loss by ${number(got)}, the gradient had said ${number(expected)}: ${verdict}.`),
  );
}

function drawCurve() {
  const points = [curve[0].loss, ...curve.map((c) => c.measured)];
  const all = [...points, ...curve.map((c) => c.predicted)];
  const most = Math.max(...all), least = Math.min(...all, most - 1e-6);
  const x = (i) => 90 + (520 * i) / Math.max(1, points.length - 1), y = (v) => 14 + (140 * (most - v)) / (most - least);
  const text = (a, b, content, anchor) => { const node = svg("text", { x: a, y: b, "text-anchor": anchor }); node.textContent = content; return node; };
  const drawing = svg(
    "svg", { viewBox: "0 0 640 180", role: "img", "aria-label": `Loss over ${curve.length} steps, from ${number(points[0])} to ${number(points.at(-1))}` },
    svg("path", { class: "axis", d: "M90 14V154H610", fill: "none" }),
    curve.map((c, i) => svg("path", { class: "guess", d: `M${x(i)} ${y(points[i])}L${x(i + 1)} ${y(c.predicted)}`, fill: "none" })),
    svg("polyline", { class: "measured", points: points.map((v, i) => `${x(i)},${y(v)}`).join(" "), fill: "none" }),
    points.map((v, i) => svg("circle", { class: "measured-point", cx: x(i), cy: y(v), r: 3.5 })),
    text(84, 20, number(most), "end"), text(84, 156, number(least), "end"), text(90, 172, "0", "middle"), text(610, 172, `${curve.length}`, "middle"),
  );
  return el("figure", { class: "card curve" }, el("figcaption", {}, "Loss, step by step"), drawing, el("p", { class: "words" }, `Solid: measured. Dashed: where the gradient pointed. After ${curve.length} step${curve.length === 1 ? "" : "s"} the loss is ${number(points.at(-1), 4)}, from ${number(points[0], 4)}.`));
}

function drawMoves() {
  const rows = moves.map((m) => {
    const was = el("i", { class: "was" }), is = el("i", { class: "is" });
    was.style.left = `${100 * m.before}%`;
    is.style.width = `${100 * m.after}%`;
    return el("tr", {}, el("td", {}, visible(m.token)), el("td", {}, el("b", {}, visible(m.target))), el("td", { class: "move" }, el("span", { class: "track" }, is, was)), el("td", { class: "figure" }, percent(m.before)), el("td", { class: "figure" }, percent(m.after)));
  });
  const head = el("tr", {}, ["after", "target", "probability", "was", "is"].map((t) => el("th", { scope: "col" }, t)));
  const most = moves.reduce((best, m) => (Math.abs(m.after - m.before) > Math.abs(best.after - best.before) ? m : best));
  return el("section", { class: "card", "aria-label": "How the predictions moved" }, el("h3", {}, "How the predictions moved"), el("p", { class: "words" }, `Moved most: ‘${visible(most.target)}’ after ‘${visible(most.token)}’, from ${percent(most.before)} to ${percent(most.after)}.`), el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Probabilities" }, el("table", { class: "moves" }, el("thead", {}, head), el("tbody", {}, rows))));
}
