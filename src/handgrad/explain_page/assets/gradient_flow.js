// @ts-check
// The gradient flow view: which tokens and layers the error reaches, and the length of every gradient.

import { filled } from "./colors.js";
import { cellsOfRow, growth, largestOf, logarithmic, meanShares, pythonRows, shortLabel, shownRows } from "./flow_rows.js";
import { count, number, percent, quote } from "./format.js";
import { pictureOf } from "./heat_geometry.js";
import { heat, positioned } from "./heatmap.js";
import { caption, choice, rowHead, select, table, tr, viewHead } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

let mode = "share";
let unfolded = ""; // "all" stations, "none", or the number of a block, from 0; chosen by the size of the model at first
let drawn = { key: "", /** @type {any} */ picture: null }; // a redraw with the same picture keeps the zoom and the cursor

const MANY_BLOCKS = 8; // above, every station has too little room
const MODES = { share: "share of each row", delta: "‖Δ‖", product: "‖a‖·‖Δ‖", a: "‖a‖" };
const TITLES = {
  share: "how the error of each station is spread over the tokens",
  delta: "‖Δ‖ of every token at every station",
  product: "‖a‖·‖Δ‖ of every token at every station",
  a: "‖a‖ of every token at every station",
};
const CAPTIONS = {
  share: (rows, labels) => `${aboutShares(rows, labels)} ${aboutLengths(rows)}`,
  delta: (rows) => aboutLengths(rows),
  product: () =>
    "How much the explained number would change, at most and to first order, if a vector changed by its own length: " +
    "comparable between layers.",
  a: (rows) => {
    const [low, high] = growth(rows, "a");
    return (
      "The length of each token's vector in the forward pass. Over all tokens, " +
      `${rows[0].a_label} has length ${number(low)}, ${rows.at(-1).a_label} ${number(high)}.`
    );
  },
};

/** Which token has the largest share, averaged over the rows that are shown. */
function aboutShares(rows, labels) {
  const shares = meanShares(rows);
  const t = shares.indexOf(Math.max(...shares));
  if (!shares[t]) return "No error flows.";
  return (
    `Averaged over the ${count(rows.length, "row")} shown, the largest share of the error is at ${quote(labels[t])} ` +
    `(position ${t + 1}): ${percent(shares[t])} of a row's squares.`
  );
}

/** Why lengths of rows are not compared. */
function aboutLengths(rows) {
  const [low, high] = growth(rows, "delta");
  const times = high ? `, ${number(low / high)} times the ${number(high)} of ${rows.at(-1).label}` : "";
  return (
    `Over all tokens, ${rows[0].label} has length ${number(low)}${times}. Rows are not comparable by ` +
    "length alone: if activations were written in units twice as large, their Δ would be twice as long; ‖a‖·‖Δ‖ would not change."
  );
}

export const flowView = {
  id: "flow",
  title: "Gradient flow",
  needs: () => ({ flow: ["flow", {}] }),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { flow }, actions) {
    unfolded ||= state.table.blocks > MANY_BLOCKS ? "none" : "all";
    const change = (key) => {
      mode = key;
      actions.redraw();
    };
    return [
      viewHead("the whole network at once", "Gradient flow", choice("What to show", MODES, mode, change)),
      state.table.blocks > 1 ? rowChoice(state, actions) : null,
      h(
        "p.summary",
        "Each row is the error signal at one station, each column a token. The error starts at the loss, " +
          "below the last row, Δ₁₁, and flows up to the embedding. Click a cell to open its station.",
      ),
      h("section.card.flow-card", { "aria-label": "Stations by tokens" }, picture(state, flow, actions)),
      groups(state.overview, actions),
    ];
  },
};

/** Which stations have a row. */
function rowChoice(state, actions) {
  const blocks = [...Array(state.table.blocks).keys()].map((b) => [String(b), `block ${b + 1} unfolded`]);
  const choices = [["all", "every station"], ["none", "the end of every block"], ...blocks];
  const choose = (value) => {
    unfolded = value;
    actions.redraw();
  };
  return h(
    "p.field.flow-rows",
    { key: "rows" },
    h("label", { for: "flow-rows" }, "rows"),
    select({ id: "flow-rows", value: unfolded }, choices, choose),
  );
}

function picture(state, flow, actions) {
  const { overview } = state;
  const labels = overview.tokens.map((t) => t.label);
  const { rows: all, python } = flow;
  const shown = shownRows(all, unfolded),
    rows = shown.map((i) => all[i]);
  const values = rows.map((row) => cellsOfRow(row, mode));
  const { least, most, shares, clipped } = logarithmic(values);
  const share = mode === "share",
    largest = largestOf(values);
  const key = `${overview.id} ${mode} ${unfolded}`,
    root = (x) => Math.sqrt(x / largest);
  if (drawn.key !== key) drawn = { key, picture: pictureOf(share ? values.map((row) => row.map(root)) : shares) };
  const name = (row) => (mode === "a" ? row.a_label : row.label);
  return heat({
    key: "flow",
    title: TITLES[mode],
    kind: mode === "a" ? "a" : "size",
    positive: true,
    picture: drawn.picture,
    rowLabels: rows.map((row) => shortLabel(name(row)).replace(unfolded === "all" ? "" : "Δ₉=", "")),
    columnLabels: labels,
    links: { rows: [], columns: [{ prefix: "token-", size: 1 }], also: [] },
    nameRow: (i) => name(rows[i]),
    nameColumn: positioned(labels),
    caption: CAPTIONS[mode](rows, labels),
    values: () => values,
    python: rows.length < all.length ? pythonRows(python[mode], shown) : python[mode],
    scale: share
      ? ["0", `${percent(largest)} of the row's squared error`]
      : [`${clipped ? "at most " : ""}${number(10 ** least)}`, `${number(10 ** most)}, logarithmic`],
    entry: (row, column) => (share ? percent : number)(values[row][column]),
    choose: (row, column) => actions.go(rows[row].station, mode === "a" ? "forward" : "backward", column),
    chooses: "opens the station",
  });
}

function groups(overview, actions) {
  const layers = [...new Set(overview.groups.map((g) => g.layer))],
    symbols = [...new Set(overview.groups.map((g) => g.symbol))];
  const logs = logarithmic([overview.groups.map((g) => g.norm)]).shares[0];
  const cell = (layer, symbol) => {
    const i = overview.groups.findIndex((g) => g.layer === layer && g.symbol === symbol);
    if (i < 0) return h("td.none");
    const { station, norm } = overview.groups[i];
    const about = {
      tabindex: i ? -1 : 0,
      "aria-label": `gradient of ${symbol}, ${layer}: ${number(norm)}`,
      "data-value": norm,
      style: filled("size", logs[i]),
    };
    return h(
      "td",
      h("button", { type: "button", onclick: () => actions.go(station, "backward"), ...about }, number(norm, 2)),
    );
  };
  const rows = layers.map((layer) =>
    tr({ key: layer }, rowHead(layer), symbols.map((symbol) => cell(layer, symbol))),
  );
  return savedFigure(
    {
      class: "card",
      key: "groups",
      tag: "h3",
      title: "Gradients of the parameters",
      python: "{name: x.norm() for name, x in trace.items() if 'grad_' in name}",
      values: () => overview.groups.map((g) => [g.layer, g.symbol, g.norm]),
      columnLabels: ["layer", "parameter", "length of its gradient"],
    },
    caption(overview.groups_caption),
    table("Lengths of the gradients", ["", ...symbols.map((s) => `∂${s}`)], rows, { class: "groups", keys: true }),
  );
}
