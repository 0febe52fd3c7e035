// @ts-check
// The lens: the residual stream at one station, read through the last norm and the head.

import { percent, quote, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { caption, chips, probabilityBars, pushBars, soft } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

const ABOUT =
  "The stream is read through the last norm and the head, as if this were the last layer. A push is −Δ, as a change of " +
  "the logits to first order: what the error asks for here. To the right and blue: more likely.";

/** `lens` has one row for each token: what would be predicted here, and what −Δ makes more or less likely.
 * @param {any} lens @param {any} state @param {any} actions @param {string[]} labels */
export function lensCard(lens, state, actions, labels) {
  const t = state.token,
    row = lens.rows[t];
  const strip = chips({
    label: "What would be predicted after each token",
    chosen: t,
    choose: (token) => actions.select({ token }),
    items: lens.rows.map((r, i) => {
      const best = r.predictions[0],
        correct = r.target !== null && best.word === r.target;
      return {
        content: [h("small", visible(labels[i])), h("b", visible(best.word))],
        class: correct ? "correct" : "",
        data: { "data-link": tokenLink(i) },
        label: `after ${visible(labels[i])}: ${visible(best.word)}, ${percent(best.p)}${correct ? ", correct" : ""}`,
      };
    }),
  });
  const pushes = [...row.towards, ...row.away];
  const isTarget = (x) => x.word === row.target;
  return savedFigure(
    {
      class: "card lens",
      key: "lens",
      tag: "h3",
      attributes: { "aria-label": "Lens" },
      title: `Lens: what the stream would predict here, after ${quote(labels[t])}`,
      python: `${lens.python}\nlogits.softmax(1)[${t}].topk(5), push[${t}].topk(5), (-push[${t}]).topk(5)`,
      values: () => [
        ...row.predictions.map((x) => ["prediction", x.word, x.p]),
        ...pushes.map((x) => ["push", x.word, x.change]),
      ],
      columnLabels: ["what", "token", "value"],
    },
    caption(row.caption),
    strip,
    h(
      "div.lens-columns",
      h("div", h("h4", "prediction at this layer"), probabilityBars(row.predictions, isTarget)),
      pushes.length
        ? h("div", h("h4", "push −Δ on the words"), pushBars(pushes, (x) => x.change, isTarget))
        : soft("No error reaches this position."),
    ),
    soft(ABOUT),
  );
}
