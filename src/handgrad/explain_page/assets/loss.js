// @ts-check
// The last station, the loss: for each position the target, the prediction, and the first push.

import { filled } from "./colors.js";
import { count, number, percent, quote, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { caption, chips, probabilityBars, pushBars, soft } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

/** @param {any} view @param {any} state @param {any} actions */
export function lossCard(view, state, actions) {
  const t = state.token,
    row = view.positions[t];
  const strip = chips({
    label: "Positions",
    chosen: t,
    choose: (token) => actions.select({ token }),
    items: view.positions.map((p, i) => ({
      content: [h("small", visible(p.token)), h("b", p.target === null ? "–" : visible(p.target))],
      label:
        p.target === null
          ? `position ${i + 1}, no target`
          : `after ${visible(p.token)} the target ${visible(p.target)}, probability ${percent(p.probability)}`,
      data: { "data-link": tokenLink(i) },
      style: p.probability === null ? null : filled("size", 0.75 * (1 - p.probability)),
    })),
  });
  return savedFigure(
    {
      class: "card loss-card",
      key: "loss",
      tag: "h3",
      attributes: { "aria-label": "Targets and predictions" },
      title: "Predictions, targets and the first error signal",
      python: `trace['y_pred'][${t}].topk(5), -trace['delta_12'][${t}]`,
      values: () => [
        ...row.top.map((x) => ["prediction", x.word, x.p]),
        ...row.push.map((x) => ["push", x.word, -x.delta]),
      ],
      columnLabels: ["what", "token", "value"],
    },
    caption(view.loss_caption),
    strip,
    soft(
      "Small: a token. Below it: the token that follows, the target. The stronger the blue, the less " +
        "probable the target was.",
    ),
    h("p.caption", { id: "push-caption" }, row.caption),
    h(
      "div.lens-columns",
      h("div", h("h4", "prediction"), probabilityBars(row.top, (x) => x.id === row.target_id)),
      push(row, view.positions, state),
    ),
  );
}

function push(row, positions, { table, overview: { objective } }) {
  if (!row.push.length) return null;
  const targets = positions.filter((p) => p.target !== null).length;
  return h(
    "div",
    h("h4", "push −Δ₁₂ on each logit"),
    pushBars(row.push, (x) => -x.delta, (x) => x.target),
    soft(ABOUT[objective.kind](targets, objective, table.unit)),
  );
}

const DIRECTIONS =
  "Right and blue: the probability was too low, so the logit is pushed up. Left and red: too high, so it is pushed down. ";
const ABOUT = {
  sentence: (targets) =>
    `${DIRECTIONS}The loss is a mean, so Δ₁₂ is the predicted probabilities minus the truth, divided by the ` +
    `${count(targets, "target")}: no push is larger than ${number(1 / targets)}.`,
  position: (_, __, unit) =>
    `${DIRECTIONS}The loss of this ${unit} alone is explained, so Δ₁₂ is the predicted probabilities minus the truth, ` +
    "and is not divided by the number of targets.",
  difference: (_, { token, against }) =>
    `The push lowers the difference that is explained: ${quote(token.word)} down, ${quote(against.word)} up.`,
};
