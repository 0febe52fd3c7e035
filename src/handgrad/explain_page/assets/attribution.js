// @ts-check
// The view “Attribution”: which tokens of the sentence the explained word depends on, by two estimates and by removal.

import { has } from "./api.js";
import { filled } from "./colors.js";
import { chance, number, probability, quote, signed, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { button, caption, chips, choice, field, figureCell, select, soft, table, tr, viewHead } from "./parts.js";
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
    const { unit } = state.table;
    return [
      viewHead(
        `which tokens this ${unit} depends on`,
        `Why ${quote(found.word.word)}${versus}?`,
        choice("Method", METHODS, shown, change),
      ),
      h(
        "p.summary",
        `Three answers to the same question: what did each token contribute to this ${unit}? Two come from ` +
          "gradients, and are estimates. The third removes the token and runs the model again.",
      ),
      explained(found, state, actions),
      sentence(found, state, actions),
      comparison(found),
      gap(found, actions),
    ];
  },
};

/** What is attributed, with its unit: one token, also where the rest of the page explains the whole sentence. */
function explained(found, state, actions) {
  const { unit } = state.table,
    word = quote(found.word.word);
  const after = `after ${quote(found.after)} (position ${found.position + 1})`;
  const what = found.against
    ? `Attributed here, in logits: the logit of ${word} minus that of ${quote(found.against.word)}, ${after}: `
    : `Attributed here, in units of log-probability (natural logarithm): log p of ${word}, ${after}: `;
  const whole = state.overview.objective.kind === "sentence";
  return h(
    "p.caption",
    { key: "explained", id: "attributed-value" },
    what,
    h("b", { "data-value": found.value }, number(found.value)),
    found.against ? "." : `, ${probability(chance(-found.value))}.`,
    whole ? ` One ${unit} at a time: not the mean loss of the sentence, which the rest of the page explains. ` : null,
    whole && has("sentence")
      ? button(`explain this ${unit} everywhere`, () => actions.explainWord(found.position), {
          class: "small",
          id: "explain-attributed",
        })
      : null,
  );
}

function sentence(found, state, actions) {
  const values = found.rows.map((row) => row[shown]);
  const most = Math.max(...values.map((x) => Math.abs(x ?? 0)), 1e-300);
  const items = found.rows.map((row, t) => ({
    content: [h("b", visible(row.label)), h("small", row[shown] === null ? "–" : signed(row[shown], 2))],
    label: `${visible(row.label)}: ${row[shown] === null ? "not measured" : signed(row[shown])}`,
    style: row[shown] === null ? null : filled("delta", (-0.9 * row[shown]) / most),
    data: { "data-value": row[shown] ?? "", "data-link": tokenLink(t) },
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
    soft(
      `Blue: the token raises ${found.against ? "the difference of logits" : "log p"}. Red: it lowers it. In ${unitOf(found)}.`,
    ),
    caption(found.caption),
  );
}

const unitOf = (/** @type {any} */ found) => (found.against ? "logits" : "log-probability");

function comparison(found) {
  const value = (row, key) =>
    figureCell(row[key] === null ? "–" : signed(row[key]), { "data-value": row[key] ?? "" });
  const values = (row) => Object.keys(METHODS).map((key) => value(row, key));
  const rows = found.rows.map((row, t) =>
    tr({ key: t, "data-link": tokenLink(t) }, figureCell(t + 1), h("b", visible(row.label)), values(row)),
  );
  const columns = Object.values(METHODS).map((name) => `${name}, in ${unitOf(found)}`);
  return table("Comparison", ["position", "token", ...columns], rows, {
    tall: true,
    class: "attributions",
  });
}

function gap(found, actions) {
  const choices = ["4", "8", "16", "32", "64", "128"].map((n) => /** @type {[string, string]} */ ([n, n]));
  const change = (/** @type {string} */ chosen) => {
    steps = chosen;
    actions.show({ push: false });
  };
  return h(
    "section.card.controls",
    { "aria-label": "Completeness", key: "gap" },
    !has("attribution", { steps: 64 }) ? null : field("steps of the integral", select({ id: "ig-steps", value: steps }, choices, change)),
    caption(
      "Integrated gradients must add up to the whole difference between this sentence and a baseline in which every token " +
        "but the first has the mean row of the token table: ",
      h("b", number(found.total - found.gap)),
      `. In ${found.steps} steps their sum misses it by `,
      h("b", { id: "gap", "data-value": found.gap }, number(found.gap)),
      ". With more and more steps the gap goes to 0.",
    ),
  );
}
