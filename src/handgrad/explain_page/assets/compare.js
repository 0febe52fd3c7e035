// @ts-check
// The view “Compare”: this trace and another one, side by side and as a difference. The other one has another sentence, the
// weights before the steps, or no adapters.

import { has, post } from "./api.js";
import { filled } from "./colors.js";
import { count, number, percent, quote, visible } from "./format.js";
import { heat, numbered, positioned, worded } from "./heatmap.js";
import { decodeObjective, encodeObjective } from "./objective.js";
import { button, caption, field, figureCell, ofBlock, select, soft, table, tr, viewHead } from "./parts.js";
import { patchRequests, patchSections } from "./patching.js";
import { h } from "./render.js";
import { entriesOf, savedFigure } from "./save.js";

let other = { id: "", what: "" }; // the trace to compare with
let typed = "";
let problem = "";

const PYTHON =
  "n = min(len(trace['a_0']), len(other['a_0']))\n" +
  "names = [x for x in trace if x.split('.')[-1].startswith(('a_', 'delta_')) and trace[x].ndim == 2]\n" +
  "{x: (other[x][:n] - trace[x][:n]).norm() / trace[x][:n].norm() for x in names}";

export const compareView = {
  id: "compare",
  title: "Compare",
  available: () => has("compare"),
  about: "Compare this trace with that of another sentence, or of other weights: every number side by side, and the difference.",

  /** @param {any} state */
  needs: (state) =>
    other.id
      ? {
          all: ["compare", { other: other.id }],
          found: ["compare", { other: other.id, station: stationFor(state) }],
          ...(has("patch-map") ? patchRequests(state, other.id) : {}),
        }
      : {},

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { all, found, patches, patched }, actions) {
    return [
      viewHead("side by side, and as a difference", "Compare"),
      chooser(state, actions),
      ...(found ? results(all, found, state, actions) : []),
      ...(patches ? patchSections(state, patches, patched, actions) : []),
      has("patch-map") ? null : soft("Patching, one trace with parts of another, is not computed in this page: run handgrad explain."),
    ];
  },
};

async function choose(request, what, actions) {
  problem = "";
  try {
    const { id } = await actions.busy(request(), () => "Computing forward and backward pass of the other trace…");
    other = { id, what };
  } catch (reason) {
    problem = /** @type {Error} */ (reason).message;
  }
  actions.show({ push: false });
}

function chooser(state, actions) {
  const { text, version, steps } = state.overview;
  const sentence = (event) => {
    event.preventDefault();
    const request = () => post("sentence", { text: typed, version, ...wanted(state) });
    if (typed) return choose(request, "the other sentence", actions);
    problem = "Type the sentence to compare with.";
    actions.redraw();
  };
  const before = () =>
    choose(() => post("sentence", { text, version: 0, ...wanted(state) }), "the weights before the steps", actions);
  const base = () =>
    choose(() => post("sentence", { text, version: -1, ...wanted(state) }), "the model without its adapters", actions);
  return h(
    "form.card.controls",
    { "aria-label": "Compare with", onsubmit: sentence, key: "chooser" },
    field(
      "another sentence",
      h("input", {
        id: "other-sentence",
        type: "text",
        size: "36",
        maxlength: "4000",
        placeholder: visible(text),
        oninput: (event) => (typed = event.target.value),
      }),
    ),
    h(
      "div.walk",
      h("button", { type: "submit", id: "compare-sentence" }, "compare with it"),
      button(
        "with the weights before the steps",
        () => steps && before(),
        { id: "compare-before", "aria-disabled": steps ? null : "true", title: steps ? "" : "take a step first" },
      ),
      state.table.lora
        ? button("with the model without its adapters", base, { id: "compare-base" })
        : null,
    ),
    problem ? h("p.problem", { role: "alert" }, problem) : null,
  );
}

/** The same objective, as a part of a request. */
const wanted = (state) => {
  const objective = decodeObjective(encodeObjective(state.overview.objective));
  return objective ? { objective } : {};
};

/** Station a_0 has no activations to compare. */
const stationFor = (state) => (state.station === "a_0" ? "a_1" : state.station);

function results(all, found, state, actions) {
  const name = (s) => s.title + ofBlock(s.block);
  const known = state.table.stations.filter((s) => s.id !== "a_0");
  const open = (id) => {
    state.station = id;
    actions.show({ push: false });
  };
  const after = (steps) => (steps ? `, after ${count(steps, "step")}` : "");
  const what = state.overview.objective.kind === "difference" ? "difference" : "loss";
  const side = ({ text, loss, steps }) => `${quote(text)}${after(steps)}, ${what} ${number(loss, 4)}`;
  const options = known.map((s) => [s.id, `${name(s)} ${s.symbol}`]);
  return [
    h(
      "section.card",
      { "aria-label": "Station to compare", key: "station" },
      caption(`This trace: ${side(found.one)}.`),
      caption(`Compared with ${other.what}: ${side(found.other)}.`),
      h("p.caption", { id: "compare-caption" }, all.caption),
      field("station", select({ id: "compare-station", value: found.station }, options, open)),
    ),
    ...found.maps.map((map) => trio(map, found, state)),
    stations(all, known, name, found.station, open),
  ];
}

/** The entries of the difference. */
async function difference({ name, vocabulary }, { one, other: theirs, rows }) {
  const which = { name, columnIds: vocabulary?.ids };
  const [x, y] = await Promise.all([one, theirs].map(({ id }) => entriesOf(id, which)));
  return y.slice(0, rows).map((row, i) => row.map((value, j) => value - x[i][j]));
}

/** This trace, the other one on the same scale, and the difference. */
function trio(map, found, state) {
  const columns = map.vocabulary;
  const one = (key, title, labels, about) =>
    heat({
      key,
      title,
      picture: map[key],
      shape: [map[key].shape[0], map.width],
      kind: map.kind,
      rowLabels: labels,
      columnLabels: columns?.words,
      columnIds: columns?.ids,
      nameRow: positioned(labels),
      nameColumn: columns ? worded(columns.words) : numbered("feature"),
      selected: state.token,
      ...about,
    });
  const { one: mine, other: theirs, rows } = found;
  const share = `Altogether the difference is ${percent(map.relative)} of the length of ${map.symbol}.`;
  return h(
    "section.trio",
    { "aria-label": `${map.symbol} compared`, key: map.name, "data-map": map.name },
    one("one", `${map.symbol} · this trace`, mine.tokens, {
      name: map.name,
      sentence: mine.id,
      python: map.python_one,
    }),
    one("other", `${map.symbol} · ${other.what}`, theirs.tokens, {
      name: map.name,
      sentence: theirs.id,
      python: map.python_other,
    }),
    one("difference", `${other.what} − this trace`, mine.tokens.slice(0, rows), {
      values: () => difference(map, found),
      python: map.python,
    }),
    h("p.caption", { "data-relative": map.relative }, `${map.caption} ${share}`),
  );
}

function stations(all, known, name, shown, open) {
  const largest = Math.min(1, Math.max(...all.stations.flatMap((row) => [row.a, row.delta]), 1e-300));
  const cell = (x) =>
    figureCell(percent(x), { "data-value": x, style: filled("size", Math.min(1, (0.6 * x) / largest)) });
  const rows = all.stations.map((row) => {
    const label = name(known.find((one) => one.id === row.station));
    return tr(
      { key: row.station, class: row.station === shown ? "chosen" : null },
      button(label, () => open(row.station), { class: "small" }),
      cell(row.a),
      cell(row.delta),
    );
  });
  return savedFigure(
    {
      class: "card",
      key: "stations",
      tag: "h3",
      title: "Where the two differ, relative to the length",
      python: PYTHON,
      values: () => all.stations.map((row) => [row.station, row.a, row.delta]),
      columnLabels: ["station", "a", "Δ"],
    },
    table("Relative differences", ["station", "a", "Δ"], rows, { tall: true, class: "compared" }),
  );
}
