// The two ends of the network: the tokens (station a_0) and the loss.

import { bar, signedBar } from "./bars.js";
import { paint } from "./colours.js";
import { el } from "./dom.js";
import { number, percent, visible } from "./format.js";

// Station a_0: the tokens, and the replacements that would lower the loss.
export function tokenTable(state, view) {
  const rows = view.swaps.map((s, t) => el("tr", {}, el("td", { class: "figure" }, t + 1), el("td", {}, el("b", {}, visible(state.overview.tokens[t].label))), el("td", { class: "figure" }, s.id), el("td", {}, s.swaps.map((x) => `‘${visible(x.word)}’ ${number(x.change, 2)}`).join(" · ") || "none")));
  const head = el("tr", {}, ["position", "token", "id", "replacements that would lower the loss most, to first order"].map((t) => el("th", { scope: "col" }, t)));
  return el("section", { class: "card", "aria-label": "Tokens" }, el("h3", {}, "The sentence as token ids"), el("p", { class: "caption" }, view.swaps_caption), el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Tokens and possible replacements" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

// Station loss: for each position the target, the prediction, and Δ₁₂.
export function lossCard(view, state, actions) {
  const row = view.positions[state.token];
  const most = Math.max(...row.push.map((p) => Math.abs(p.delta)), 1e-300);
  const positions = el(
    "div",
    { class: "strip", role: "group", "aria-label": "Positions" },
    view.positions.map((p, t) => {
      const button = el("button", { type: "button", "aria-pressed": String(t === state.token), onclick: () => actions.select({ token: t }), "aria-label": p.target === null ? `position ${t + 1}, no target` : `after ${visible(p.token)} the target ${visible(p.target)}, probability ${number(p.probability)}` }, el("small", {}, visible(p.token)), el("b", {}, p.target === null ? "–" : visible(p.target)));
      if (p.probability !== null) paint(button, "delta", 0.75 * (1 - p.probability));
      return button;
    }),
  );
  const detail =
    row.target === null
      ? el("p", { class: "soft" }, "The last token has no target, so its row of Δ₁₂ is 0.")
      : el(
          "div",
          { class: "lens-columns" },
          el("div", {}, el("h4", {}, "prediction"), el("ul", { class: "bars a" }, row.top.map((x) => bar(x.word, x.p, 1, "a", percent(x.p), x.word === row.target)))),
          el("div", {}, el("h4", {}, "Δ₁₂: how each logit is corrected"), el("ul", { class: "bars signed" }, row.push.map((x) => signedBar(x, most))), el("p", { class: "soft" }, "Left of the middle (below 0): the probability was too low, so the logit is pulled up. Right (above 0): too high, so it is pushed down.")),
        );
  return el(
    "section",
    { class: "card loss-card", "aria-label": "Targets and predictions" },
    el("h3", {}, "Predictions, targets and the first error signal"),
    el("p", { class: "caption" }, view.loss_caption),
    positions,
    el("p", { class: "caption", id: "push-caption" }, row.caption),
    detail,
  );
}
