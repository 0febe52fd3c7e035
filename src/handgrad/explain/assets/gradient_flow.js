// The gradient flow view: ‖Δ‖ or ‖a‖ of every token at every station, and the norm of every gradient.

import { paint } from "./colours.js";
import { el } from "./dom.js";
import { number } from "./format.js";
import { heatmap, pictureOf } from "./heatmap.js";

let which = "delta"; // or "a"

export function drawFlow(panel, state, go) {
  const { table, overview } = state;
  const labels = overview.tokens.map((t) => t.label);
  const rows = overview.flows
    .map((f) => ({ ...f, station: table.stations.find((s) => s.id === f.id) }))
    .filter((f) => f[which] && f.station.index < 12);
  const logs = rows.map((f) => f[which].map((x) => (x > 0 ? Math.log10(x) : null)));
  const known = logs.flat().filter((x) => x !== null);
  const most = Math.max(...known), least = Math.max(Math.min(...known), most - 4);
  const share = (x) => (x === null ? 0 : Math.max(0.03, (x - least) / (most - least || 1)));
  const symbol = which === "delta" ? "Δ" : "a";
  const names = rows.map((f) => `${f.station.block === null ? "" : `${f.station.block + 1}·`}${which === "delta" ? f.station.delta_symbol : f.station.symbol}`);
  const picture = pictureOf(logs.map((row) => row.map(share)));
  const figure = heatmap({
    title: `‖${symbol}‖ of every token at every station`, kind: which, picture, rowLabels: names, columnLabels: labels, positive: true, square: false,
    caption: which === "delta" ? overview.flow_caption : "The length of each token's vector in the forward pass. The stream grows as each block adds to it.",
    scale: [number(10 ** least), `${number(10 ** most)}, logarithmic`],
    describe: (x) => (x < 0.02 ? "0" : number(10 ** (least + x * (most - least)))),
    select: (row, column) => go(rows[row].id, which === "delta" ? "backward" : "forward", column),
  });
  const choice = el("div", { class: "walk", role: "group", "aria-label": "What to show" });
  for (const [key, text] of [["delta", "the error ‖Δ‖"], ["a", "the activations ‖a‖"]]) {
    choice.append(el("button", { type: "button", "aria-pressed": String(which === key), onclick: () => { which = key; drawFlow(panel, state, go); } }, text));
  }
  panel.replaceChildren(
    el("div", { class: "station-head backward" }, el("div", {}, el("p", { class: "where" }, "the whole network at once"), el("h2", {}, "Gradient flow")), choice),
    el("p", { class: "summary" }, "Each row is a station, each column a token. The error starts below the last row, at the loss, and flows up to the embedding. The stronger the colour, the larger the vector of that token there. Click a cell to open its station."),
    el("section", { class: "card flow", "aria-label": "Stations by tokens" }, figure),
    groups(table, overview, go),
  );
}

function groups(table, overview, go) {
  const layers = [...new Set(overview.groups.map((g) => g.layer))];
  const symbols = [...new Set(overview.groups.map((g) => g.symbol))];
  const norms = overview.groups.map((g) => g.norm).filter((x) => x > 0).map(Math.log10);
  const most = Math.max(...norms), least = Math.max(Math.min(...norms), most - 4);
  const rows = layers.map((layer) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, layer),
      symbols.map((symbol) => {
        const group = overview.groups.find((g) => g.layer === layer && g.symbol === symbol);
        if (!group) return el("td", { class: "none" });
        const button = el("button", { type: "button", onclick: () => go(group.station, "backward"), "aria-label": `gradient of ${symbol}, ${layer}: ${number(group.norm)}`, "data-value": group.norm }, number(group.norm, 2));
        paint(button, "delta", group.norm > 0 ? Math.max(0.03, (Math.log10(group.norm) - least) / (most - least || 1)) : 0);
        return el("td", {}, button);
      }),
    ),
  );
  return el(
    "section",
    { class: "card", "aria-label": "Gradients by group" },
    el("h3", {}, "Gradients of the parameters"),
    el("p", { class: "caption" }, overview.groups_caption),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Lengths of the gradients" }, el("table", { class: "groups" }, el("thead", {}, el("tr", {}, el("td", {}), symbols.map((s) => el("th", { scope: "col" }, `∂${s}`)))), el("tbody", {}, rows))),
  );
}
