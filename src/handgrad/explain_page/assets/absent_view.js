// @ts-check
// A view whose answers a stored page does not contain, because the model would have to compute them: how to see it.

import { command, models } from "./api.js";
import { button, viewHead } from "./parts.js";
import { h } from "./render.js";
import { commandFor } from "./stored.js";

/** @param {any} view */
export const absentView = (view) => ({
  id: view.id,
  title: view.title,
  absent: true,
  needs: () => ({}),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, data, actions) {
    const shown = commandFor(command, state.overview.text);
    const live = models.find((one) => one.live);
    const copy = () => navigator.clipboard.writeText(shown).then(() => actions.setStatus("The command is copied."));
    return [
      viewHead("not in this page", view.title),
      view.about ? h("p.summary", view.about) : null,
      h(
        "section.card",
        { "aria-label": "How to see it", key: "command" },
        h("p", "The answers of this page were computed before; those of this view were not. On your machine, handgrad computes them:"),
        h("pre.command", h("code", { id: "absent-command" }, shown)),
        h("div.walk", button("copy", copy, { id: "copy-command", class: "small" })),
        live ? h("p.soft", `The model ${live.name} computes this view in your browser: choose it above.`) : null,
      ),
    ];
  },
});
