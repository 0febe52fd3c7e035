// @ts-check
// One station: heading, formulas, proof, matrices, parameters and code.

import { has } from "./api.js";
import { attentionCard } from "./attention.js";
import { handCard } from "./by_hand.js";
import { exerciseButtons } from "./exercises.js";
import { number, shapeOf } from "./format.js";
import { followCard } from "./follow.js";
import { code, formulas } from "./formulas.js";
import { heat, numbered, positioned, worded } from "./heatmap.js";
import { lensCard } from "./lens.js";
import { lossCard } from "./loss.js";
import { neuronCard } from "./neurons.js";
import { button, caption, figureCell, table, tr } from "./parts.js";
import { proofCard } from "./proof.js";
import { h } from "./render.js";
import { symbolRow } from "./symbols.js";
import { swapTable } from "./swaps.js";

/** The open station; the loss with the definition of what is explained. */
function stationOf(state) {
  const station = state.table.stations.find((s) => s.id === state.station);
  return { ...station, ...station.by_objective[state.overview.objective.kind] };
}

const chooses = has("follow") ? "follows this number" : "selects the token"; // what a click on a matrix does

/** @param {any} cell */
const requestOf = ({ name, row, column, head }) => ({ name, row, column, ...(head === null ? {} : { head }) });

export const stationView = {
  id: "station",
  title: "Station",

  /** What the view asks for. @param {any} state */
  needs(state) {
    const station = stationOf(state);
    const more = (/** @type {string} */ request) => station.more.includes(request);
    return {
      view: ["station", { station: station.id }],
      ...(more("head") ? { head: ["head", { block: station.block, head: state.head }] } : {}),
      ...(more("lens") ? { lens: ["lens", { station: station.id }] } : {}),
      ...(more("swaps") && has("swaps", { position: state.token }) ? { swaps: ["swaps", { position: state.token }] } : {}),
      ...(more("neurons") && has("neurons", { block: station.block })
        ? { neurons: ["neurons", { block: station.block }] }
        : {}),
      ...(state.followed.length ? { followed: ["follow", requestOf(state.followed.at(-1))] } : {}),
    };
  },

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { view, head, lens, followed, swaps, neurons }, actions) {
    const station = stationOf(state);
    const labels = state.overview.tokens.map((t) => t.label);
    return [
      heading(station, state, actions),
      h("p.summary", { key: "summary" }, station.summary),
      formulas(station, state, view),
      symbolRow(station),
      proofCard(state.proof, state.table.torch),
      station.id === "a_0" ? swapTable(view, swaps, state) : null,
      station.id === "loss" ? lossCard(view, state, actions) : null,
      head ? attentionCard(head, state, actions, labels) : null,
      matrices(view, station, state, actions, labels),
      followed ? followCard(followed, state, actions) : null,
      handCard(view, state, actions),
      statistics(view),
      lens ? lensCard(lens, state, actions, labels) : null,
      view.parameters.length || view.frozen.length ? parameters(view, state, actions) : null,
      neurons ? neuronCard(neurons, state, actions) : null,
      code(station, state),
      exerciseButtons(station, state, actions),
    ];
  },

  /** What is shown also if a request fails. */
  heading: (state, actions) => heading(stationOf(state), state, actions),
};

function heading(station, state, actions) {
  const where = station.block === null ? "" : `Block ${station.block + 1} · `;
  const forward = state.direction === "forward";
  return h(
    "div",
    { class: `station-head ${state.direction}`, key: "head" },
    h(
      "div",
      h("p.where", `${where}${state.direction} pass · stop ${state.stop + 1} of ${state.stops}`),
      h("h2", station.title, h("span", station.id === "loss" ? "" : ` ${station.symbol}`)),
    ),
    h(
      "div.walk",
      { role: "group", "aria-label": "Go to another station" },
      button("← back", () => actions.walk(-1), { id: "walk-back" }),
      button(forward ? "show backward" : "show forward", () => actions.turn(), {
        id: "walk-turn",
        "aria-pressed": String(!forward),
      }),
      button("next →", () => actions.walk(1), { id: "walk-on", class: "primary" }),
    ),
  );
}

// ── matrices and parameters ────────────────────────────────────────────────────────────────────────────────────────

function matrices(view, station, state, actions, labels) {
  const meaning = {
    a: station.id === "loss" ? "probabilities" : "output of this layer",
    delta: station.id === "a_0" ? "estimated change if another token stood here" : "error at this output",
  };
  const map = (m) =>
    heat({
      key: `${m.kind} ${m.name.split("_").at(-1)}`,
      title: `${m.symbol} · ${meaning[m.kind]}`,
      caption: m.caption,
      picture: m.picture,
      shape: m.shape,
      kind: m.kind,
      name: m.name,
      sentence: state.overview.id,
      rowLabels: labels,
      columnLabels: m.vocabulary?.words ?? null,
      columnIds: m.vocabulary?.ids ?? null,
      nameRow: positioned(labels),
      nameColumn: m.vocabulary ? worded(m.vocabulary.words) : numbered("feature"),
      selected: state.token,
      positive: station.id === "loss" && m.kind === "a",
      python: m.python,
      ...(m.name === "swaps"
        ? {}
        : { choose: (row, column) => actions.follow(m.name, row, column, null), chooses }),
    });
  return h("section.maps", { "aria-label": "Matrices", key: "maps" }, view.maps.map(map));
}

const STATISTICS = {
  norm: "length ‖·‖",
  mean: "mean",
  spread: "standard deviation",
  least: "minimum",
  most: "maximum",
};

function statistics(view) {
  if (!view.maps.length) return null;
  const cell = (m, k) =>
    figureCell(number(m.statistics[k]), {
      title: m.statistics[k],
      "data-stat": `${m.kind} ${k}`,
      "data-value": m.statistics[k],
    });
  const rows = view.maps.map((m) =>
    tr(
      { "data-name": m.name, key: m.name },
      h("th", { scope: "row", class: m.kind === "a" ? "forward" : "backward" }, m.symbol),
      Object.keys(STATISTICS).map((k) => cell(m, k)),
    ),
  );
  return table("Statistics", ["", ...Object.values(STATISTICS)], rows, { class: "statistics" });
}

/** How the tokens of a gradient over the vocabulary are shown: as its rows, or as its columns. */
function vocabularyOf({ vocabulary: tokens }) {
  if (!tokens) return {};
  const { words, ids, axis } = tokens;
  return axis
    ? { columnLabels: words, columnIds: ids, nameColumn: worded(words) }
    : { rowLabels: words, rowIds: ids, nameRow: worded(words) };
}

function parameters(view, state, actions) {
  const { parameters: trained, frozen } = view;
  const upIsZero = (/** @type {any} */ p) => trained.some((u) => u.symbol === p.symbol.replace(/^d_/, "u_") && u.norm === 0);
  const zeroDown = trained.some((p) => /^d_/.test(p.symbol) && p.grad_norm === 0 && upIsZero(p));
  const one = (p) =>
    h(
      "div",
      { class: p.vocabulary ? "parameter wide" : "parameter", key: p.symbol },
      h("h4", p.symbol),
      h(
        "p.figures",
        `${shapeOf(p.shape)} · length ${number(p.norm)}`,
        h("span.backward", { "data-grad": p.name, "data-value": p.grad_norm }, ` · ‖∂‖ ${number(p.grad_norm)}`),
      ),
      p.picture
        ? heat({
            key: "gradient",
            title: `∂${p.symbol.split(" ")[0]}`,
            picture: p.picture,
            shape: p.shape,
            kind: "delta",
            name: p.name,
            sentence: state.overview.id,
            nameColumn: numbered("column"),
            ...vocabularyOf(p),
            python: p.python,
            ...(has("follow") ? { choose: (row, column) => actions.follow(p.name, row, column, null), chooses } : {}),
          })
        : null,
    );
  return h(
    "section.card",
    { "aria-label": "Parameters", key: "parameters" },
    h("h3", "Parameters of this layer and their gradients"),
    caption(view.parameters_caption),
    zeroDown
      ? h(
          "p.caption",
          { id: "zero-down" },
          "∂d is exactly 0 at the first step: it is computed through u, and u starts at 0. After one step " +
            "u has moved, and d is trained too.",
        )
      : null,
    h("div.parameters", trained.map(one)),
    frozen.length
      ? h(
          "p.soft",
          { id: "frozen" },
          `Frozen, without a gradient: ` +
            `${frozen.map((p) => `${p.symbol} (${shapeOf(p.shape)}, length ${number(p.norm)})`).join(", ")}.`,
        )
      : null,
  );
}
