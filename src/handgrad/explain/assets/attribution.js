// @ts-check
// The view “Attribution”: which tokens of the sentence the explained word depends on, by two estimates and by removal.

import { has, offline } from "./api.js";
import { filled } from "./colours.js";
import { number, quote, signed, visible } from "./format.js";
import { chips, choice, table, viewHead } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

const METHODS = { score: "gradient × input", integrated: "integrated gradients", removed: "removed" };
let shown = "integrated";
let steps = "32";

export const attributionView = {
  id: "attribution",
  title: "Attribution",
  available: () => has("attribution"),

  /** @param {any} state */
  needs(state) {
    const { kind, position, token, against } = state.overview.objective;
    const about = kind === "sentence" ? {} : { position };
    if (kind === "difference") Object.assign(about, { word: token.id, against: against.id });
    return { found: ["attribution", { ...about, ...(steps === "32" ? {} : { steps }) }] };
  },

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { found }, actions) {
    const change = (/** @type {string} */ key) => {
      shown = key;
      actions.redraw();
    };
    const versus = found.against ? ` rather than ${quote(found.against.word)}` : "";
    return [
      viewHead(
        "which tokens this word depends on",
        `Why ${quote(found.word.word)}${versus}?`,
        choice("Method", METHODS, shown, change),
      ),
      h(
        "p",
        { class: "summary" },
        "Three answers to the same question: what did each token contribute to this word? Two come from " +
          "gradients, and are estimates. The third removes the token and runs the model again.",
      ),
      sentence(found, state, actions),
      comparison(found),
      gap(found, actions),
    ];
  },
};

function sentence(found, state, actions) {
  const values = found.rows.map((row) => row[shown]);
  const most = Math.max(...values.map((x) => Math.abs(x ?? 0)), 1e-300);
  const items = found.rows.map((row) => ({
    content: [h("b", {}, visible(row.label)), h("small", {}, row[shown] === null ? "–" : signed(row[shown], 2))],
    label: `${visible(row.label)}: ${row[shown] === null ? "not measured" : signed(row[shown])}`,
    style: row[shown] === null ? null : filled("delta", (-0.9 * row[shown]) / most),
    data: { "data-value": row[shown] ?? "" },
  }));
  return savedFigure(
    {
      class: "card",
      key: "sentence",
      attributes: { "aria-label": "Attribution" },
      title: METHODS[shown],
      python: found.python,
      values: () => found.rows.map((row) => [row.label, row.score, row.integrated, row.removed]),
      columnLabels: ["token", ...Object.values(METHODS)],
    },
    chips({
      label: "Tokens and what they contribute",
      items,
      chosen: state.token,
      choose: (token) => actions.select({ token }),
      class: "strip story-words",
      id: "attributed",
    }),
    h("p", { class: "soft" }, "Blue: the token made this word more probable. Red: less."),
    h("p", { class: "caption" }, found.caption),
  );
}

function comparison(found) {
  const value = (row, key) =>
    h("td", { class: "figure", "data-value": row[key] ?? "" }, row[key] === null ? "–" : signed(row[key]));
  const rows = found.rows.map((row, t) =>
    h(
      "tr",
      { key: t },
      h("td", { class: "figure" }, t + 1),
      h("td", {}, h("b", {}, visible(row.label))),
      Object.keys(METHODS).map((key) => value(row, key)),
    ),
  );
  return table("Comparison", ["position", "token", ...Object.values(METHODS)], rows, {
    tall: true,
    class: "attributions",
  });
}

function gap(found, actions) {
  const change = (/** @type {any} */ event) => {
    steps = event.target.value;
    actions.show({ push: false });
  };
  return h(
    "section",
    { class: "card controls", "aria-label": "Completeness", key: "gap" },
    offline
      ? null
      : h(
          "label",
          { class: "field" },
          "steps of the integral",
          h(
            "select",
            { id: "ig-steps", value: steps, onchange: change },
            ["4", "8", "16", "32", "64", "128"].map((n) => h("option", { value: n, key: n }, n)),
          ),
        ),
    h(
      "p",
      { class: "caption" },
      "Integrated gradients must add up to the whole difference between this sentence and a baseline without its words: ",
      h("b", {}, number(found.total - found.gap)),
      ". In this many steps their sum misses it by ",
      h("b", { id: "gap", "data-value": found.gap }, number(found.gap)),
      ". More steps, a smaller gap.",
    ),
  );
}
