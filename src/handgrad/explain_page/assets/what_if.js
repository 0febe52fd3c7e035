// @ts-check
// The view “What if”: a head, a skip connection, a neuron or one attention weight is set to 0, forward or on the way
// back. The change that the gradient predicts, −⟨Δ, a⟩, stands beside the measured one.

import { has } from "./api.js";
import { filled } from "./colors.js";
import { number, percent, quote, signed, visible } from "./format.js";
import { headLink, tokenLink } from "./linked.js";
import { button, caption, choice, field, figureCell, ofBlock, rowHead, select, soft, table, tr, viewHead } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

/** @type {Record<string, any> | null} */
let place = null; // what is set to 0: parameters of the request
let way = "forward"; // set the activation to 0, or "backward": the error signal
// the attention weight in the form, at first of the last token
let weight = { block: 0, head: 0, row: Infinity, column: 0 };

const WAYS = { forward: "its output is 0", backward: "no error flows back through it" };

/** A button that opens this view with a part set to 0.
 * @param {Record<string, any>} part @param {string} name @param {any} actions */
export function whatIfButton(part, name, actions) {
  if (!has("what-if")) return null;
  const open = () => {
    place = part;
    actions.open("whatif");
  };
  const text = `what if ${name} did not exist?`;
  return h("p", { key: "what-if" }, button(text, open, { class: "small what-if" }));
}

export const whatIfView = {
  id: "whatif",
  title: "What if",
  available: () => has("effects"),
  about:
    "Set a head, a skip connection, a neuron or one attention weight to 0, and see the change of the loss that the gradient " +
    "predicts beside the one that is measured.",

  /** @param {any} state */
  needs(state) {
    if (place?.kind === "weight" && place.row >= state.overview.tokens.length) place = null; // of a longer sentence
    const error = way === "backward" ? { error: true } : {};
    return { effects: ["effects", {}], ...(place ? { result: ["what-if", { ...place, ...error }] } : {}) };
  },

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { effects, result }, actions) {
    const pick = (/** @type {any} */ chosen) => {
      place = chosen;
      actions.show({ push: false });
    };
    const turn = (/** @type {string} */ key) => {
      way = key;
      actions.show({ push: false });
    };
    return [
      viewHead("remove a part and measure", "What if it did not exist?", choice("What is set to 0", WAYS, way, turn)),
      h(
        "p.summary",
        "The gradient predicts what happens to the explained number if a part of the model is set to 0: −⟨Δ, a⟩. " +
          "Removing a part is a large step, so the prediction is often wrong. Choose a part to measure.",
      ),
      result ? (way === "forward" ? forwardResult(result) : backwardResult(result, actions)) : null,
      parts(effects, state.table.heads, pick),
      weightForm(state, pick, actions),
    ];
  },
};

// ── the parts of the model ─────────────────────────────────────────────────────────────────────────────────────────

const same = (/** @type {any} */ a) => place !== null && JSON.stringify(a) === JSON.stringify(place);

/** Every head, every skip connection and the neurons with the largest effect, each with its predicted change. */
function parts(effects, heads, pick) {
  const { edges, python } = effects;
  return h(
    "section.card.parts",
    { "aria-label": "Parts", key: "parts" },
    h("h3", "Predicted change if a head, a skip connection or a neuron were 0"),
    soft("Blue: the number would fall. Red: it would rise. Of each block, the neurons with the largest effect."),
    grid("Heads", Array.from({ length: heads }, (_, i) => `head ${i + 1}`), effects.heads, pick, {
      python: python.heads,
      part: (b, head) => [{ kind: "head", block: b, head }, `head ${head + 1} of block ${b + 1}`],
    }),
    grid("Skip connections", edges.map((e) => `past ${e.past}`), effects.skips, pick, {
      python: python.skips,
      part: (b, i) => [
        { kind: "skip", block: b, edge: edges[i].edge },
        `skip connection past ${edges[i].past} of block ${b + 1}`,
      ],
    }),
    effects.neurons.some((row) => row.length) && grid("Neurons", numbered(effects.neurons), values(effects.neurons), pick, {
      python: python.neurons,
      part: (b, i) => {
        const { neuron } = effects.neurons[b][i];
        return [{ kind: "neuron", block: b, neuron }, `neuron ${neuron} of block ${b + 1}`];
      },
      text: (b, i) => `${effects.neurons[b][i].neuron}: ${signed(effects.neurons[b][i].predicted, 1)}`,
      file: effects.neurons.flatMap((row, b) => row.map((x) => [b + 1, x.neuron, x.predicted])),
      columnLabels: ["block", "neuron", "predicted change"],
    }),
  );
}

/** A column for each neuron of the block with the most: one with a mixture of experts has none. */
const numbered = (/** @type {any[][]} */ neurons) =>
  Array.from({ length: Math.max(...neurons.map((row) => row.length)) }, (_, i) => `${i + 1}. neuron`);
const values = (/** @type {any[][]} */ neurons) => neurons.map((row) => row.map((x) => x.predicted));

/** What a part stands for. @param {any} part */
function linkOf({ kind, block, head, neuron }) {
  if (kind === "head") return headLink(block, head);
  return kind === "neuron" ? `feature-hidden-${block}-${neuron}` : null;
}

/** A table of buttons, blocks × parts, colored by the predicted change.
 * @param {string} title @param {string[]} columns @param {number[][]} changes @param {(part: any) => void} pick
 * @param {any} about */
function grid(title, columns, changes, pick, { part, text, python, file, columnLabels }) {
  const most = Math.max(...changes.flat().map(Math.abs), 1e-300);
  const first = changes.findIndex((row) => row.length); // a block may have no heads
  const cell = (/** @type {number} */ value, /** @type {number} */ b, /** @type {number} */ i) => {
    const [chosen, label] = part(b, i);
    const about = {
      type: "button",
      tabindex: b > first || i ? -1 : 0,
      "aria-pressed": String(same(chosen)),
      "aria-label": `${label}: predicted change ${signed(value)}`,
      "data-part": Object.values(chosen).join(" "),
      "data-link": linkOf(chosen),
      "data-value": value,
      title: `${label}: ${signed(value)}`,
      style: filled("delta", (0.9 * value) / most),
      onclick: () => pick(chosen),
    };
    return h("td", h("button", about, text?.(b, i) ?? signed(value, 2)));
  };
  const rows = changes.map((row, b) =>
    tr({ key: b }, rowHead(`block ${b + 1}`), row.map((value, i) => cell(value, b, i))),
  );
  const numbered = changes.map((row, b) => [b + 1, ...row]);
  return savedFigure(
    { title, python, values: () => file ?? numbered, columnLabels: columnLabels ?? ["block", ...columns] },
    table(title, ["", ...columns], rows, { class: "groups", tall: true, keys: true }),
  );
}

/** One attention weight, chosen by its tokens. A token attends to itself and to earlier ones. */
function weightForm(state, pick, actions) {
  const labels = state.overview.tokens.map((t) => t.label);
  weight.row = Math.min(weight.row, labels.length - 1);
  weight.column = Math.min(weight.column, weight.row);
  const part = (name, label, count, text) => {
    const choose = (value) => {
      weight = { ...weight, [name]: Number(value) };
      actions.redraw();
    };
    const options = [...Array(count).keys()].map((i) => [String(i), text(i)]);
    return field(label, select({ name, value: String(weight[name]) }, options, choose));
  };
  const submit = (event) => {
    event.preventDefault();
    pick({ kind: "weight", ...weight });
  };
  const counted = (i) => String(i + 1),
    token = (i) => `${i + 1} ${visible(labels[i])}`;
  return h(
    "form.card.controls",
    { "aria-label": "One attention weight", key: "weight", onsubmit: submit },
    h("h3", "One attention weight"),
    part("block", "block", state.table.blocks, counted),
    part("head", "head", state.table.heads, counted),
    part("row", "of token", labels.length, token),
    part("column", "to token", weight.row + 1, token),
    h("button", { type: "submit", id: "weight-zero" }, "set to 0"),
  );
}

// ── what happens without it ────────────────────────────────────────────────────────────────────────────────────────

/** @param {any} about @param {...any} content */
const outcome = (about, ...content) =>
  savedFigure(
    { class: "card outcome", key: "result", tag: "h3", attributes: { "aria-label": "Outcome" }, ...about },
    content,
  );

/** The change of the objective by an edit, predicted and measured, and what it does to the predictions.
 * @param {any} result @param {string} [title] @param {string} [formula] @param {string} [prefix]  of ids */
export function forwardResult(result, title = `Without ${result.label}`, formula = "−⟨Δ, a⟩", prefix = "change") {
  const fact = (label, text, about = {}) => h("div", h("b", about, text), h("span", label));
  const change = (id, label, value) => fact(label, signed(value, 4), { id, "data-value": value });
  const moves = result.moves.filter((m) => m.target !== null);
  const first = (m) => [...new Set([m.first_before, m.first_after])].map(quote).join(" → ");
  const rows = moves.map((m, t) =>
    tr(
      { key: t, "data-link": tokenLink(t) },
      visible(m.token),
      h("b", visible(m.target)),
      figureCell(percent(m.before)),
      figureCell(percent(m.after)),
      first(m),
    ),
  );
  const head = ["after token", "target", "before", "after", "most probable"];
  return outcome(
    {
      title,
      python: result.python,
      values: () => moves.map((m) => [m.token, m.target, m.before, m.after, m.first_after]),
      columnLabels: head,
    },
    h(
      "div.facts",
      { "aria-live": "polite" },
      fact("before", number(result.value, 4)),
      change(`${prefix}-predicted`, `change predicted, ${formula}`, result.predicted),
      change(`${prefix}-measured`, "change measured", result.measured),
    ),
    caption(result.caption),
    table("Predictions before and after", head, rows, { tall: true }),
  );
}

const SHOWN = 40; // gradients

function backwardResult(result, actions) {
  const name = (g) => `∂${g.symbol}${ofBlock(g.block)}`;
  const changed = result.gradients.slice(0, SHOWN);
  const rows = changed.map((g) =>
    tr(
      { key: g.name },
      button(name(g), () => actions.go(g.station, "backward"), { class: "small" }),
      figureCell(number(g.before)),
      figureCell(number(g.after)),
      figureCell(g.before ? percent(g.change / g.before) : number(g.change)),
    ),
  );
  return outcome(
    {
      title: `If no error flowed back through ${result.label}`,
      python: result.python,
      values: () => result.gradients.map((g) => [name(g), g.before, g.after, g.change]),
      columnLabels: ["gradient", "length before", "length after", "length of the change"],
    },
    h("p.caption", { id: "cut-caption", "aria-live": "polite" }, result.caption),
    changed.length < result.gradients.length
      ? h("p.soft", { id: "cut-shown" }, `Shown: the ${SHOWN} of these ${result.gradients.length} that change most.`)
      : null,
    table("Gradients before and after", ["gradient", "length before", "length after", "changed by"], rows, {
      tall: true,
    }),
  );
}
