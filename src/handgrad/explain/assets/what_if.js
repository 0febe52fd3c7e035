// @ts-check
// The view “What if”: a head, a skip connection, a neuron or one attention weight is set to 0, forward or on the way
// back.
// The change that the gradient predicts, −⟨Δ, a⟩, stands beside the measured one.

import { offline } from "./api.js";
import { filled } from "./colours.js";
import { number, percent, quote, signed, visible } from "./format.js";
import { card, choice, table, viewHead } from "./parts.js";
import { h } from "./render.js";
import { saveMenu } from "./save.js";

/** @type {Record<string, any> | null} */
let place = null; // what is set to 0: parameters of the request
let way = "forward"; // set the activation to 0, or "backward": the error signal

/** Choose what is set to 0, from another view. @param {Record<string, any>} chosen */
export function chooseWhatIf(chosen) {
  place = chosen;
}

export const whatIfView = {
  id: "whatif",
  title: "What if",
  available: () => !offline,

  needs: () => ({
    effects: ["effects", {}],
    ...(place ? { result: ["what-if", { ...place, ...(way === "backward" ? { error: true } : {}) }] } : {}),
  }),

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
    const ways = { forward: "its output is 0", backward: "no error flows back through it" };
    return [
      viewHead("remove a part and measure", "What if it did not exist?", choice("What is set to 0", ways, way, turn)),
      h(
        "p",
        { class: "summary" },
        "The gradient predicts what happens to the explained number if a part of the model is set to 0: " +
          "−⟨Δ, a⟩. Removing a part is a large step, so the prediction is often wrong. Choose a part to " +
          "measure.",
      ),
      result ? (way === "forward" ? forwardResult(result) : backwardResult(result, actions)) : null,
      parts(effects, pick),
      weights(state, pick),
    ];
  },
};

const same = (/** @type {any} */ a) => place !== null && JSON.stringify(a) === JSON.stringify(place);

function parts(effects, pick) {
  const most = Math.max(...effects.heads.flat().map(Math.abs), 1e-300);
  const mostSkip = Math.max(...effects.skips.flat().map(Math.abs), 1e-300);
  const mostNeuron = Math.max(...effects.neurons.flat().map((n) => Math.abs(n.predicted)), 1e-300);
  const cell = (chosen, label, value, largest, text = "") =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(same(chosen)),
        "aria-label": `${label}: predicted change ${signed(value)}`,
        "data-part": Object.values(chosen).join(" "),
        "data-value": value,
        title: `${label}: ${signed(value)}`,
        style: filled("delta", (0.9 * value) / largest),
        onclick: () => pick(chosen),
      },
      text || signed(value, 2),
    );
  const heads = (b) =>
    effects.heads[b].map((x, head) =>
      h("td", {}, cell({ kind: "head", block: b, head }, `head ${head + 1} of block ${b + 1}`, x, most)),
    );
  const skips = (b) =>
    effects.skips[b].map((x, i) =>
      h(
        "td",
        {},
        cell(
          { kind: "skip", block: b, edge: i ? 10 : 5 },
          `skip past ${i ? "the feed-forward layer" : "attention"} of block ${b + 1}`,
          x,
          mostSkip,
        ),
      ),
    );
  const neurons = (b) =>
    effects.neurons[b].map(({ neuron, predicted }) =>
      h(
        "td",
        {},
        cell(
          { kind: "neuron", block: b, neuron },
          `neuron ${neuron} of block ${b + 1}`,
          predicted,
          mostNeuron,
          `${neuron}: ${signed(predicted, 1)}`,
        ),
      ),
    );
  const rows = (cells) =>
    effects.heads.map((_, b) => h("tr", { key: b }, h("th", { scope: "row" }, `block ${b + 1}`), cells(b)));
  const counted = (n, what) => [...Array(n).keys()].map((i) => `${what} ${i + 1}`);
  return h(
    "section",
    { class: "card parts", "aria-label": "Parts", key: "parts" },
    h("h3", {}, "Predicted change if a head, a skip connection or a neuron were 0"),
    h(
      "p",
      { class: "soft" },
      "Blue: the number would fall. Red: it would rise. Of each block, the neurons with the largest " + "effect.",
    ),
    table("Heads", ["", ...counted(effects.heads[0].length, "head")], rows(heads), { class: "groups", tall: true }),
    table("Skip connections", ["", "past attention", "past feed-forward"], rows(skips), {
      class: "groups",
      tall: true,
    }),
    table("Neurons", ["", ...effects.neurons[0].map(() => "neuron")], rows(neurons), { class: "groups", tall: true }),
  );
}

/** One attention weight, chosen by its tokens. */
function weights(state, pick) {
  const labels = state.overview.tokens.map((t) => t.label);
  const option = (i) => h("option", { value: String(i), key: i }, `${i + 1} ${visible(labels[i])}`);
  const field = (name, label, options) => h("label", { class: "field" }, label, h("select", { name }, options));
  const submit = (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    pick({
      kind: "weight",
      block: Number(values.block),
      head: Number(values.head),
      row: Number(values.row),
      column: Number(values.column),
    });
  };
  const upTo = (n) => [...Array(n).keys()].map((i) => h("option", { value: String(i), key: i }, String(i + 1)));
  return h(
    "form",
    { class: "card controls", "aria-label": "One attention weight", key: "weight", onsubmit: submit },
    h("h3", {}, "One attention weight"),
    field("block", "block", upTo(state.table.blocks)),
    field("head", "head", upTo(state.table.heads)),
    field(
      "row",
      "of token",
      labels.map((_, i) => option(labels.length - 1 - i)),
    ),
    field(
      "column",
      "to token",
      labels.map((_, i) => option(i)),
    ),
    h("button", { type: "submit", id: "weight-zero" }, "set to 0"),
  );
}

function forwardResult(result) {
  const fact = (id, label, value) =>
    h("div", {}, h("b", { id, "data-value": value }, signed(value, 4)), h("span", {}, label));
  const rows = result.moves
    .filter((m) => m.target !== null)
    .map((m, t) =>
      h(
        "tr",
        { key: t },
        h("td", {}, visible(m.token)),
        h("td", {}, h("b", {}, visible(m.target))),
        h("td", { class: "figure" }, percent(m.before)),
        h("td", { class: "figure" }, percent(m.after)),
        h(
          "td",
          {},
          m.first_before === m.first_after
            ? quote(m.first_after)
            : `${quote(m.first_before)} → ${quote(m.first_after)}`,
        ),
      ),
    );
  return h(
    "section",
    { class: "card outcome", "aria-label": "Outcome", "aria-live": "polite", key: "result" },
    h("h3", {}, `Without ${result.label}`),
    h(
      "div",
      { class: "facts" },
      h("div", {}, h("b", {}, number(result.value, 4)), h("span", {}, "before")),
      fact("change-predicted", "change predicted, −⟨Δ, a⟩", result.predicted),
      fact("change-measured", "change measured", result.measured),
    ),
    h("p", { class: "caption" }, result.caption),
    pythonFigure(result, rows.length),
    table("Predictions before and after", ["after token", "target", "before", "after", "most probable"], rows, {
      tall: true,
    }),
  );
}

/** The lines of Python that make the same change. */
const pythonFigure = (result, key) =>
  h(
    "figure",
    { class: "code", key: `python ${key}` },
    h("figcaption", {}, "the same from Python", saveMenu({ title: "what if", python: result.python, text: true })),
    h("pre", { tabindex: "0" }, result.python),
  );

function backwardResult(result, actions) {
  const rows = result.gradients
    .slice(0, 40)
    .map((g) =>
      h(
        "tr",
        { key: g.name },
        h(
          "td",
          {},
          h(
            "button",
            { type: "button", class: "small", onclick: () => actions.go(g.station, "backward") },
            `∂${g.symbol}${g.block === null ? "" : ` of block ${g.block + 1}`}`,
          ),
        ),
        h("td", { class: "figure" }, number(g.before)),
        h("td", { class: "figure" }, number(g.after)),
        h("td", { class: "figure" }, g.before ? percent(g.change / g.before) : number(g.change)),
      ),
    );
  return card(
    "Outcome",
    `If no error flowed back through ${result.label}`,
    h("p", { class: "caption", id: "cut-caption" }, result.caption),
    pythonFigure(result, "back"),
    table("Gradients before and after", ["gradient", "length before", "length after", "changed by"], rows, {
      tall: true,
    }),
  );
}
