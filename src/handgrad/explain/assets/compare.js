// @ts-check
// The view “Compare”: this trace and another one side by side and as a difference: another sentence, the weights before
// the
// steps, or the model without its adapters.

import { get, post } from "./api.js";
import { pythonOf } from "./csv.js";
import { number, percent, visible } from "./format.js";
import { heat, positioned } from "./heatmap.js";
import { card, table, viewHead } from "./parts.js";
import { h } from "./render.js";

let other = { id: "", text: "", what: "" }; // the trace to compare with
let typed = "";
let problem = "";

export const compareView = {
  id: "compare",
  title: "Compare",

  /** @param {any} state */
  needs: (state) => (other.id ? { found: ["compare", { other: other.id, station: state.station }] } : {}),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { found }, actions) {
    return [
      viewHead("side by side, and as a difference", "Compare"),
      chooser(state, actions),
      ...(found
        ? results(found, state, actions)
        : [h("p", { class: "soft", key: "none" }, "Choose what to compare with.")]),
    ];
  },
};

async function choose(request, text, what, actions) {
  problem = "";
  try {
    const { id } = await actions.busy(request());
    other = { id, text, what };
  } catch (reason) {
    problem = /** @type {Error} */ (reason).message;
  }
  actions.show({ push: false });
}

function chooser(state, actions) {
  const { text, version, steps, id } = state.overview;
  const sentence = (event) => {
    event.preventDefault();
    choose(() => post("sentence", { text: typed || text, version }), typed || text, "the other sentence", actions);
  };
  const before = () =>
    choose(() => post("sentence", { text, version: 0, ...wanted(state) }), text, "before the steps", actions);
  const base = () => choose(() => get("base", id), text, "without the adapters", actions);
  return h(
    "form",
    { class: "card controls", "aria-label": "Compare with", onsubmit: sentence, key: "chooser" },
    h(
      "label",
      { class: "field" },
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
      "div",
      { class: "walk" },
      h("button", { type: "submit", id: "compare-sentence" }, "compare with it"),
      h(
        "button",
        {
          type: "button",
          id: "compare-before",
          "aria-disabled": steps ? null : "true",
          title: steps ? "" : "take a step first",
          onclick: () => steps && before(),
        },
        "with the weights before the steps",
      ),
      state.table.lora
        ? h("button", { type: "button", id: "compare-base", onclick: base }, "with the model without its adapters")
        : null,
    ),
    problem ? h("p", { class: "problem", role: "alert" }, problem) : null,
  );
}

/** The same objective, for the same sentence. */
const wanted = (state) => {
  const { kind, position, token, against } = state.overview.objective;
  if (kind === "sentence") return {};
  return {
    objective: kind === "position" ? { kind, position } : { kind, position, token: token.id, against: against.id },
  };
};

function results(found, state, actions) {
  const station = state.table.stations.find((s) => s.id === state.station);
  const options = state.table.stations.map((s) =>
    h(
      "option",
      { value: s.id, key: s.id },
      `${s.title}${s.block === null ? "" : ` of block ${s.block + 1}`} ${s.symbol}`,
    ),
  );
  return [
    h(
      "section",
      { class: "card", "aria-label": "Station to compare", key: "station" },
      h(
        "p",
        { class: "caption" },
        `Left: ${other.what}, ‘${visible(other.text)}’, loss ${number(found.losses[0], 4)}. Right: this ` +
          `trace, loss ${number(found.losses[1], 4)}. ${found.caption}`,
      ),
      h(
        "label",
        { class: "field" },
        "station",
        h(
          "select",
          {
            id: "compare-station",
            value: state.station,
            onchange: (event) => {
              state.station = event.target.value;
              actions.show({ push: false });
            },
          },
          options,
        ),
      ),
    ),
    ...found.maps.map((map) => trio(map, found, state)),
    overview(found, state, station, actions),
    gradients(found, actions),
  ];
}

function trio(map, found, state) {
  const one = (key, title, picture, labels, python) =>
    heat({
      key: `${map.name} ${key}`,
      title,
      picture,
      kind: map.kind,
      rowLabels: labels,
      nameRow: positioned(labels),
      selected: state.token,
      python,
      caption: "",
      sentence: key === "this" ? state.overview.id : other.id,
      name: key === "difference" ? null : map.name,
    });
  const line = pythonOf(map.name);
  const [left, right, between] = map.lengths;
  return h(
    "section",
    { class: "trio", "aria-label": `${map.symbol} compared`, key: map.name },
    one("other", `${map.symbol} · ${other.what}`, map.pictures[0], found.labels[0], line),
    one("this", `${map.symbol} · this trace`, map.pictures[1], found.labels[1], line),
    map.difference
      ? one(
          "difference",
          `difference · this − ${other.what}`,
          map.difference,
          found.labels[1],
          `${line} - other["${map.name}"]`,
        )
      : null,
    h(
      "p",
      { class: "caption", "data-lengths": map.lengths.join(" ") },
      `‖${map.symbol}‖ ${number(left)} and ` +
        `${number(right)}${between === null ? "" : `; the difference has length ${number(between)}`}.`,
    ),
  );
}

function overview(found, state, station, actions) {
  const share = ([length, , between]) => (between === null || !length ? "–" : percent(between / length));
  const rows = found.stations.map((row) => {
    const s = state.table.stations.find((one) => one.id === row.id);
    const open = () => {
      state.station = row.id;
      actions.show({ push: false });
    };
    return h(
      "tr",
      { key: row.id, class: row.id === station.id ? "chosen" : null },
      h(
        "td",
        {},
        h(
          "button",
          { type: "button", class: "small", onclick: open },
          `${s.title}${s.block === null ? "" : ` of block ${s.block + 1}`}`,
        ),
      ),
      [row.a[0], row.a[1]].map((x) => h("td", { class: "figure" }, number(x))),
      h("td", { class: "figure" }, share(row.a)),
      [row.delta[0], row.delta[1]].map((x) => h("td", { class: "figure" }, number(x))),
      h("td", { class: "figure" }, share(row.delta)),
    );
  });
  const head = ["station", "‖a‖ left", "‖a‖ right", "differs by", "‖Δ‖ left", "‖Δ‖ right", "differs by"];
  return card("All stations", "Where the two differ", table("All stations", head, rows, { tall: true }));
}

function gradients(found, actions) {
  const rows = found.gradients.map((g, i) =>
    h(
      "tr",
      { key: i },
      h(
        "td",
        {},
        h(
          "button",
          { type: "button", class: "small", onclick: () => actions.go(g.station, "backward") },
          `∂${g.symbol}${g.block === null ? "" : ` of block ${g.block + 1}`}`,
        ),
      ),
      h("td", { class: "figure" }, number(g.first)),
      h("td", { class: "figure" }, number(g.second)),
      h("td", { class: "figure" }, number(g.cosine)),
    ),
  );
  return card(
    "Gradients compared",
    "Gradients",
    h("p", { class: "soft" }, "Cosine 1: both ask for the same change of this matrix. −1: for the opposite."),
    table("Gradients compared", ["gradient", "length left", "length right", "cosine"], rows, { tall: true }),
  );
}
