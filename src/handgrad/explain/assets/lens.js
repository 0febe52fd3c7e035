// The lens: the residual stream at one station, read through the last norm and the head.

import { bar } from "./bars.js";
import { el } from "./dom.js";
import { number, percent, visible } from "./format.js";

// `lens` has one row for each token: what would be predicted here, and what a step along −Δ makes more or less likely.
export function lensCard(lens, state, actions, labels) {
  const row = lens.rows[state.token];
  const strip = el(
    "div",
    { class: "strip", role: "group", "aria-label": "What would be predicted after each token" },
    lens.rows.map((r, t) => {
      const correct = r.target !== null && r.predictions[0].word === r.target;
      return el("button", { type: "button", "aria-pressed": String(t === state.token), class: correct ? "correct" : "", onclick: () => actions.select({ token: t }), "aria-label": `after ${visible(labels[t])}: ${visible(r.predictions[0].word)}, ${percent(r.predictions[0].p)}${correct ? ", correct" : ""}` }, el("small", {}, visible(labels[t])), el("b", {}, visible(r.predictions[0].word)));
    }),
  );
  const bars = (list, kind, key, most, sign = 1) => el("ul", { class: `bars ${kind}` }, list.map((x) => bar(x.word, x[key], most, sign > 0 ? kind : `${kind} minus`, key === "p" ? percent(x[key]) : number(x[key]))));
  const most = Math.max(...[...row.towards, ...row.away].map((x) => Math.abs(x.change)), 1e-300);
  const pushes = row.towards.length
    ? [el("div", {}, el("h4", {}, "−Δ makes more likely"), bars(row.towards, "delta", "change", most)), el("div", {}, el("h4", {}, "−Δ makes less likely"), bars(row.away, "delta", "change", most, -1))]
    : [el("p", { class: "soft" }, "No error reaches this position: no target depends on it.")];
  return el(
    "section",
    { class: "card lens", "aria-label": "Lens" },
    el("h3", {}, `Lens: what the stream would predict here, after ‘${visible(labels[state.token])}’`),
    el("p", { class: "caption" }, row.caption),
    strip,
    el("div", { class: "lens-columns" }, el("div", {}, el("h4", {}, "prediction at this layer"), bars(row.predictions, "a", "p", 1)), pushes),
    el("p", { class: "soft" }, "The stream is read through the last norm and the head, as if this were the last layer. The bars for −Δ are changes of the logits, to first order."),
  );
}
