// @ts-check
// The formulas of a station, with equation numbers, shapes and errata, and the code that computes them.

import { shapeOf } from "./format.js";
import { foldable } from "./parts.js";
import { h, math } from "./render.js";

/** @param {any} station @param {any} state @param {any} view */
export function formulas(station, state, view) {
  const shape = (kind) => view.maps.find((m) => m.kind === kind)?.shape;
  const errata = station.errata.map((id) => h("li", h("b", id), ` ${state.table.errata[id]}`));
  return h(
    "section.formulas",
    { "aria-label": "Formulas", key: "formulas" },
    column("forward", station, state, shape),
    column("backward", station, state, shape),
    station.derived_in.length
      ? h(
          "p.soft.derived",
          { id: "derived-in" },
          `Beyond the paper: derived in ${station.derived_in.join(", ")}. L-… names a check of handgrad verify.`,
        )
      : null,
    errata.length
      ? foldable(
          `${errata.length === 1 ? "Erratum" : "Errata"} of the paper here: ${station.errata.join(", ")}`,
          { class: "errata", key: station.errata.join() },
          h("ul", errata),
        )
      : null,
  );
}

function column(way, station, state, shape) {
  const line = (f, i) =>
    h(
      "div.math",
      { key: i },
      h("div.side", f.math.map((part, j) => math(String(j), { mathml: part }))),
      h("span.equation", /^\d/.test(f.equation) ? `(${f.equation})` : f.equation),
    );
  return h(
    "div",
    { class: `formula ${way}${state.direction === way ? " lit" : ""}` },
    h("h3", way === "forward" ? "forward ↓" : "backward ↑"),
    h("div.lines-of-math", station[way].map(line)),
    h("p.shape", shapeText(way, station, shape)),
  );
}

/** “Δ₅ is 17 × 128; computed from it: Δ₄” */
function shapeText(way, station, shape) {
  const is = (symbols) => `${symbols} ${symbols.includes(", ") ? "are" : "is"}`;
  if (way === "forward") return shape("a") ? `${is(station.symbol)} ${shapeOf(shape("a"))}` : "";
  const incoming = shape("delta");
  if (!incoming) return "";
  if (station.id === "loss") return `Δ₁₂ is ${shapeOf(incoming)}; the backward pass starts with it`;
  if (station.id === "a_0") return `Δ₀ is ${shapeOf(incoming)}`;
  const from = station.delta_symbol.includes(", ") ? "them" : "it";
  const ends = station.block === null ? "the backward pass ends here" : "what it sends back joins that of the other branch";
  const rest = station.outgoing ? `; computed from ${from}: ${station.outgoing}` : `; ${ends}`;
  return `${is(station.delta_symbol)} ${shapeOf(incoming)}${rest}`;
}

/** The code of a station: first as the paper writes it, and beside it what the model runs.
 * @param {any} station
 * @param {any} state */
export function code(station, state) {
  const names = (way, readable) =>
    station.sources.filter(([w, name]) => w === way && name.startsWith("paper/") === readable).map(([, name]) => name);
  const figure = (name) =>
    h(
      "figure.code",
      { key: name },
      h("figcaption", `handgrad/${name}`),
      h("pre", { tabindex: "0" }, state.table.code[name]),
    );
  const side = (title, way, readable) =>
    h("div", { key: `${way} ${readable}` }, h("h4", { class: way }, title), names(way, readable).map(figure));
  const pair = (way) =>
    names(way, true).length
      ? [side(`${way}, as in the paper`, way, true), side(`${way}, as the model computes it`, way, false)]
      : [side(`${way}, as the model computes it`, way, false)];
  return foldable(
    "Source code of this layer: to read, and as it runs",
    { class: "card", key: "code" },
    h("div.codes", pair("forward"), pair("backward")),
  );
}
