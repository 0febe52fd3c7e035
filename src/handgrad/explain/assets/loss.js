// @ts-check
// The last station, the loss: for each position the target, the prediction, and the first push.

import { filled } from "./colours.js";
import { count, number, percent, visible } from "./format.js";
import { bar, chips, pushBar } from "./parts.js";
import { h } from "./render.js";

/** @param {any} view @param {any} state @param {any} actions */
export function lossCard(view, state, actions) {
  const row = view.positions[state.token];
  const strip = chips({
    label: "Positions",
    chosen: state.token,
    choose: (token) => actions.select({ token }),
    items: view.positions.map((p, t) => ({
      content: [h("small", {}, visible(p.token)), h("b", {}, p.target === null ? "–" : visible(p.target))],
      label:
        p.target === null
          ? `position ${t + 1}, no target`
          : `after ${visible(p.token)} the target ${visible(p.target)}, probability ${percent(p.probability)}`,
      style: p.probability === null ? null : filled("size", 0.75 * (1 - p.probability)),
    })),
  });
  return h(
    "section",
    { class: "card loss-card", "aria-label": "Targets and predictions", key: "loss" },
    h("h3", {}, "Predictions, targets and the first error signal"),
    h("p", { class: "caption" }, view.loss_caption),
    strip,
    h(
      "p",
      { class: "soft" },
      "Small: a token. Below it: the token that follows, the target. The stronger the blue, the less " +
        "probable the target was.",
    ),
    h("p", { class: "caption", id: "push-caption" }, row.caption),
    row.target === null
      ? h("p", { class: "soft" }, "The last token has no target, so its row of Δ₁₂ is 0.")
      : detail(row, view.positions),
  );
}

function detail(row, positions) {
  const targets = positions.filter((p) => p.target !== null).length;
  const most = Math.max(...row.push.map((p) => Math.abs(p.delta)), 1e-300);
  return h(
    "div",
    { class: "lens-columns" },
    h(
      "div",
      {},
      h("h4", {}, "prediction"),
      h(
        "ul",
        { class: "bars a" },
        row.top.map((x) => bar(x.word, x.p, "a", percent(x.p), x.word === row.target)),
      ),
    ),
    h(
      "div",
      {},
      h("h4", {}, "push −Δ₁₂ on each logit"),
      h(
        "ul",
        { class: "bars push" },
        row.push.map((x) => pushBar(x.word, -x.delta, most, x.target)),
      ),
      h("p", { class: "soft" }, about(targets)),
    ),
  );
}

const about = (targets) =>
  "Right and blue: the probability was too low, so the logit is pushed up. Left and red: too high, " +
  "so it is pushed down." +
  ` The loss is a mean, so Δ₁₂ is the predicted probabilities minus the truth, divided by the ` +
  `${count(targets, "target")}:` +
  ` no push is larger than ${number(1 / targets)}.`;
