// @ts-check
// The bar that chooses what is differentiated: the loss of the whole sentence, of one word, or a difference of logits.

import { has } from "./api.js";
import { chance, count, number, percent, quote, visible } from "./format.js";
import { choice, select } from "./parts.js";
import { h } from "./render.js";
import { pythonMenu } from "./save.js";

const kinds = (/** @type {string} */ unit) => ({
  sentence: "the whole sentence",
  position: `one ${unit}`,
  difference: `why not another ${unit}?`,
});
let other = ""; // the word that the reader typed for a difference

/** @param {any} state @param {any} actions */
export function targetBar(state, actions) {
  const { objective, losses, tokens } = state.overview;
  const { kind } = objective;
  const python = pythonMenu("The lines of Python that make this trace", setUp(state));
  if (!has("sentence")) return [h("p.target-label", `Explained here: ${objective.label}.`), python];
  const position = objective.position ?? Math.min(state.token, losses.length - 1);
  const choose = (/** @type {string} */ wanted) => {
    if (wanted === "sentence") return actions.explain(null);
    if (wanted === "position") return actions.explain({ kind: "position", position });
    return actions.explain({ kind: "difference", position, against: tokens[position + 1].id });
  };
  return [
    h("span.target-name", { id: "target-name" }, "Explain"),
    choice("What is differentiated", kinds(state.table.unit), kind, choose, { class: "target-kinds", moves: false }),
    kind === "sentence" ? null : positions(objective, state, actions),
    kind === "difference" ? against(objective, actions) : null,
    h(
      "p.target-label",
      { id: "objective", "data-value": objective.value },
      `${objective.label}: ${number(objective.value)}`,
    ),
    python,
  ].filter(Boolean);
}

/** The names that the lines of Python on the page use. */
function setUp({ table, overview }) {
  const ids = overview.tokens.map((t) => t.id);
  const steps = overview.steps
    ? [`# the page shows the weights after ${count(overview.steps, "step")}: take them as “Take a step” writes them in Python`]
    : [];
  return [
    "import torch",
    "import handgrad as hg",
    "",
    `# ${table.name}, ${table.note}`,
    table.python,
    ...steps,
    `tokens = torch.tensor([[${ids.join(", ")}]])`,
    `targets = torch.tensor([[${[...ids.slice(1), -100].join(", ")}]])`,
    `trace = ${overview.objective.python}`,
  ].join("\n");
}

function positions(objective, state, actions) {
  const { tokens, losses } = state.overview;
  const options = losses.map((loss, t) => [
    String(t),
    `after ${quote(tokens[t].label)}: ${quote(tokens[t + 1].label)}, ${percent(chance(loss))}`,
  ]);
  const choose = (value) => {
    const position = Number(value);
    const { kind } = objective;
    actions.explain(kind === "position" ? { kind, position } : { kind, position, against: tokens[position + 1].id });
  };
  const about = { id: "position", "aria-label": "Token to explain", value: String(objective.position) };
  return select(about, options, choose);
}

function against(objective, actions) {
  const submit = (event) => {
    event.preventDefault();
    if (other)
      actions.explain({ kind: "difference", position: objective.position, token: objective.token.id, against: other });
  };
  return h(
    "form.against",
    { onsubmit: submit },
    h("label", { for: "against" }, `why ${visible(objective.token.word)} and not`),
    h("input", {
      id: "against",
      type: "text",
      size: "8",
      maxlength: "100",
      placeholder: visible(objective.against.word),
      oninput: (event) => (other = event.target.value),
    }),
    h("button.small", { type: "submit" }, "explain"),
  );
}
