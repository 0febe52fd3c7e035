// One station: heading, formulas, matrices, parameters and source code. Attention, the lens, the loss and the proof have
// their own files.

import { get } from "./api.js";
import { attentionCard } from "./attention.js";
import { el, math } from "./dom.js";
import { number, shapeOf } from "./format.js";
import { heatmap } from "./heatmap.js";
import { lensCard } from "./lens.js";
import { lossCard, tokenTable } from "./loss.js";
import { proofCard } from "./proof.js";

let newest = 0; // number of the newest request; older answers are ignored

/* Fill `panel` with the station of `state`. `actions`: see page.js. */
export async function drawStation(panel, state, actions) {
  const mine = ++newest;
  const station = state.table.stations.find((s) => s.id === state.station);
  const { id } = state.overview;
  let view, head, lens;
  try {
    [view, head, lens] = await actions.busy(
      Promise.all([
        get("station", id, { station: station.id }),
        station.index === 3 ? get("head", id, { block: station.block, head: state.head }) : null,
        station.stream ? get("lens", id, { station: station.id }) : null,
      ]),
    );
  } catch (reason) {
    if (mine !== newest) return;
    // do not leave the previous station on the page under this one's name
    const retry = el("button", { type: "button", id: "retry", onclick: () => actions.retry() }, "try again");
    panel.replaceChildren(heading(station, state, actions), el("p", { class: "problem" }, reason.message), el("p", {}, retry));
    delete panel.dataset.station;
    throw reason;
  }
  if (mine !== newest) return;
  const labels = state.overview.tokens.map((t) => t.label);
  const parts = [
    heading(station, state, actions),
    el("p", { class: "summary" }, station.summary),
    formulas(station, state, view),
    proofCard(station, state),
  ];
  if (station.id === "a_0") parts.push(tokenTable(state, view));
  if (station.id === "loss") parts.push(lossCard(view, state, actions));
  if (head) parts.push(attentionCard(head, state, actions, labels));
  parts.push(matrices(view, station, state, actions, labels), statistics(view));
  if (lens) parts.push(lensCard(lens, state, actions, labels));
  if (view.parameters.length) parts.push(parameters(view, state));
  parts.push(code(station, state));
  panel.style.minHeight = `${panel.scrollHeight}px`; // the page must not jump while the new parts are laid out
  panel.replaceChildren(...parts.filter(Boolean));
  requestAnimationFrame(() => (panel.style.minHeight = ""));
  panel.dataset.station = station.id;
  panel.dataset.sentence = id;
}

function heading(station, state, actions) {
  const where = station.block === null ? "" : `Block ${station.block + 1} · `;
  const symbol = station.id === "loss" ? "" : ` ${station.symbol}`;
  const forward = state.direction === "forward";
  return el(
    "div",
    { class: `station-head ${state.direction}` },
    el("div", {}, el("p", { class: "where" }, `${where}${state.direction} pass · stop ${state.stop + 1} of ${state.stops}`), el("h2", {}, station.title, el("span", {}, symbol))),
    el(
      "div",
      { class: "walk", role: "group", "aria-label": "Go to another station" },
      el("button", { type: "button", id: "walk-back", onclick: () => actions.walk(-1) }, "← back"),
      el("button", { type: "button", id: "walk-turn", onclick: () => actions.turn(), "aria-pressed": String(!forward) }, forward ? "show backward" : "show forward"),
      el("button", { type: "button", id: "walk-on", class: "primary", onclick: () => actions.walk(1) }, "next →"),
    ),
  );
}

function formulas(station, state, view) {
  const shape = (kind) => view.maps.find((m) => m.kind === kind)?.shape;
  const column = (way, list) =>
    el(
      "div",
      { class: `formula ${way}${state.direction === way ? " lit" : ""}` },
      el("h3", {}, way === "forward" ? "forward ↓" : "backward ↑"),
      el("div", { class: "lines-of-math" }, list.map((f) => el("div", { class: "math" }, el("div", { class: "side" }, f.math.map(math)), el("span", { class: "equation" }, /^\d/.test(f.equation) ? `(${f.equation})` : f.equation)))),
      el("p", { class: "shape" }, shapeText(way, station, shape)),
    );
  const errata = station.errata.map((id) => el("li", {}, el("b", {}, id), ` ${state.table.errata[id]}`));
  return el(
    "section",
    { class: "formulas", "aria-label": "Formulas" },
    column("forward", station.forward),
    column("backward", station.backward),
    station.derived_in.length ? el("p", { class: "soft derived", id: "derived-in" }, `Beyond the paper: derived in ${station.derived_in.join(", ")}. L-… names a check of handgrad verify.`) : null,
    errata.length ? el("details", { class: "errata" }, el("summary", {}, `${errata.length === 1 ? "Erratum" : "Errata"} of the paper here: ${station.errata.join(", ")}`), el("ul", {}, errata)) : null,
  );
}

function shapeText(way, station, shape) {
  const is = (symbols) => `${symbols} ${symbols.includes(", ") ? "are" : "is"}`;
  if (way === "forward") return shape("a") ? `${is(station.symbol)} ${shapeOf(shape("a"))}` : "";
  const incoming = shape("delta");
  if (!incoming) return "";
  if (station.id === "loss") return `Δ₁₂ is ${shapeOf(incoming)}; the backward pass starts with it`;
  if (station.id === "a_0") return `Δ₀ is ${shapeOf(incoming)}`;
  const from = station.delta_symbol.includes(", ") ? "them" : "it";
  const rest = station.outgoing ? `; computed from ${from}: ${station.outgoing}` : "; the backward pass ends here";
  return `${is(station.delta_symbol)} ${shapeOf(incoming)}${rest}`;
}

// ── matrices, parameters, source code ──────────────────────────────────────────────────────────────────────────────

function matrices(view, station, state, actions, labels) {
  const meaning = { a: station.id === "loss" ? "probabilities" : "output of this layer", delta: station.id === "a_0" ? "error of each possible token" : "error at this output" };
  const columnName = station.index >= 12 || station.id === "a_0" ? "token id" : "feature";
  return el(
    "section",
    { class: "maps", "aria-label": "Matrices" },
    view.maps.map((m) =>
      heatmap({
        title: `${m.symbol} · ${meaning[m.kind]}`, caption: m.caption, picture: m.picture, kind: m.kind, name: m.name, sentence: state.overview.id,
        rowLabels: labels, columnName, selected: state.token, positive: station.id === "loss" && m.kind === "a",
        select: (row) => actions.select({ token: row }),
      }),
    ),
  );
}

function statistics(view) {
  if (!view.maps.length) return null;
  const names = { norm: "length ‖·‖", mean: "mean", spread: "standard deviation", least: "minimum", most: "maximum" };
  const head = el("tr", {}, el("td", {}), Object.values(names).map((n) => el("th", { scope: "col" }, n)));
  const rows = view.maps.map((m) =>
    el("tr", { "data-name": m.name }, el("th", { scope: "row", class: m.kind === "a" ? "forward" : "backward" }, m.symbol), Object.keys(names).map((k) => el("td", { class: "figure", title: m.statistics[k], "data-stat": `${m.kind} ${k}`, "data-value": m.statistics[k] }, number(m.statistics[k])))),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Statistics" }, el("table", { class: "statistics" }, el("thead", {}, head), el("tbody", {}, rows)));
}

function parameters(view, state) {
  const cards = view.parameters.map((p) => {
    const figures = el("p", { class: "figures" }, `${shapeOf(p.shape)} · length ${number(p.norm)}`, p.frozen ? el("span", { class: "soft" }, " · frozen") : el("span", { class: "backward", "data-grad": p.name, "data-value": p.grad_norm }, ` · ‖∂‖ ${number(p.grad_norm)}`));
    return el(
      "div",
      { class: "parameter" },
      el("h4", {}, p.symbol),
      figures,
      p.picture ? heatmap({ title: `∂${p.symbol.split(" ")[0]}`, picture: p.picture, kind: "delta", name: p.name, sentence: state.overview.id, rowName: "row", columnName: "column", caption: "" }) : null,
    );
  });
  return el("section", { class: "card", "aria-label": "Parameters" }, el("h3", {}, "Parameters of this layer and their gradients"), el("p", { class: "caption" }, view.parameters_caption), el("div", { class: "parameters" }, cards));
}

function code(station, state) {
  const block = (way) => {
    const names = station.sources.filter(([w]) => w === way).map(([, name]) => name);
    return el("div", {}, el("h4", { class: way }, way), names.map((name) => el("figure", { class: "code" }, el("figcaption", {}, `handgrad/${name}`), el("pre", { tabindex: "0" }, state.table.code[name]))));
  };
  return el("details", { class: "card" }, el("summary", {}, "Source code of this layer"), el("div", { class: "codes" }, block("forward"), block("backward")));
}
