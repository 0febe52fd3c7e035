// Gradient flow: depth × tokens, and the gradient of every group of parameters.

import { el, heatmap, low, number, paint, pictureOf } from "./drawing.js";

let which = "delta";

export function drawFlow(panel, state, go) {
  const { table, look } = state;
  const labels = look.tokens.map((t) => t.label);
  const rows = look.flows
    .map((f) => ({ ...f, station: table.stations.find((s) => s.id === f.id) }))
    .filter((f) => f[which] && f.station.index < 12);
  const logs = rows.map((f) => f[which].map((x) => (x > 0 ? Math.log10(x) : null)));
  const known = logs.flat().filter((x) => x !== null);
  const most = Math.max(...known), least = Math.max(Math.min(...known), most - 4);
  const share = (x) => (x === null ? 0 : Math.max(0.03, (x - least) / (most - least || 1)));
  const symbol = which === "delta" ? "Δ" : "a";
  const names = rows.map((f) => `${f.station.block === null ? "" : `${f.station.block + 1}·`}${symbol}${low(f.station.index)}`);
  const picture = pictureOf(logs.map((row) => row.map(share)));
  const figure = heatmap({
    title: `‖${symbol}‖ of every token at every station`, kind: which, picture, rowLabels: names, columnLabels: labels, positive: true, square: false,
    words: which === "delta" ? look.flow_words : "What the tokens carry down: the stream grows as the blocks add to it.",
    scale: [number(10 ** least), `${number(10 ** most)}, logarithmic`],
    say: (x) => (x < 0.02 ? "0" : number(10 ** (least + x * (most - least)))),
    choose: (row, column) => go(rows[row].id, which === "delta" ? "backward" : "forward", column),
  });
  const choice = el("div", { class: "walk", role: "group", "aria-label": "What to show" });
  for (const [key, text] of [["delta", "the error ‖Δ‖"], ["a", "the activations ‖a‖"]]) {
    choice.append(el("button", { type: "button", "aria-pressed": String(which === key), onclick: () => { which = key; drawFlow(panel, state, go); } }, text));
  }
  panel.replaceChildren(
    el("div", { class: "station-head backward" }, el("div", {}, el("p", { class: "where" }, "the whole way at once"), el("h2", {}, "Gradient flow")), choice),
    el("p", { class: "plain" }, "Read from below: at the bottom the loss, at the top the embedding. Each row is a station, each column a token; the stronger the colour, the more of the blame reaches that token there. Click a cell to go there."),
    el("section", { class: "card flow", "aria-label": "Depth by tokens" }, figure),
    groups(table, look, go),
  );
}

function groups(table, look, go) {
  const layers = [...new Set(look.groups.map((g) => g.layer))];
  const symbols = [...new Set(look.groups.map((g) => g.symbol))];
  const norms = look.groups.map((g) => g.norm).filter((x) => x > 0).map(Math.log10);
  const most = Math.max(...norms), least = Math.max(Math.min(...norms), most - 4);
  const rows = layers.map((layer) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, layer),
      symbols.map((symbol) => {
        const group = look.groups.find((g) => g.layer === layer && g.symbol === symbol);
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
    el("h3", {}, "The same, by groups of parameters"),
    el("p", { class: "words" }, look.groups_words),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Lengths of gradients" }, el("table", { class: "groups" }, el("thead", {}, el("tr", {}, el("td", {}), symbols.map((s) => el("th", { scope: "col" }, `∂${s}`)))), el("tbody", {}, rows))),
  );
}
