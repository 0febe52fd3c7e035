// The attention picture: one head's attention weights, the error that flows back between tokens, and its branches.

import { el, svg } from "./dom.js";
import { number } from "./format.js";
import { heatmap } from "./heatmap.js";

// `head` is one head of the block (attention_view.at_head): ρ, Δ_raw, the error between tokens, and the branches of the error.
export function attentionCard(head, state, actions, labels) {
  const most = Math.max(...head.heads.map((h) => h.incoming), 1e-300);
  const picker = el(
    "div",
    { class: "heads", role: "group", "aria-label": "Heads" },
    head.heads.map((h, i) => {
      const fill = el("i", {});
      fill.style.height = `${Math.max(4, (100 * h.incoming) / most)}%`;
      return el("button", { type: "button", "aria-pressed": String(i === head.head), "data-head-button": i, onclick: () => actions.select({ head: i }), "aria-label": `Head ${i + 1}, incoming error ${number(h.incoming)}` }, el("span", { class: "gauge", "aria-hidden": "true" }, fill), String(i + 1));
    }),
  );
  const square = (key, title, kind, positive, caption) =>
    heatmap({ title, kind, positive, caption, picture: head.maps[key].picture, name: key === "sent" ? null : head.maps[key].name, head: head.head, sentence: state.overview.id, rowLabels: labels, columnLabels: labels, square: true, selected: state.token, select: (row) => actions.select({ token: row }) });
  const vector = (key) => heatmap({ title: key, kind: "a", picture: head.vectors[key].picture, name: head.vectors[key].name, head: head.vectors[key].head, sentence: state.overview.id, rowLabels: labels, selected: state.token, caption: "" });
  return el(
    "section",
    { class: "card attention", "aria-label": "Attention", "data-shown-head": head.head },
    el("h3", {}, `Head ${head.head + 1} of ${head.heads.length}`),
    el("p", { class: "soft" }, "Choose a head. The bar next to each number shows the size of the error that reaches this head."),
    picker,
    head.group.length > 1 ? el("p", { class: "soft", id: "head-group" }, `Heads ${head.group.map((h) => h + 1).join(", ")} share their keys and values; the errors that reach these add up.`) : null,
    el("p", { class: "caption", id: "head-caption" }, head.caption),
    el(
      "div",
      { class: "squares" },
      square("rho", "ρ · attention weights", "a", true, "How much each token (row) attends to each other token (column). Each row sums to 1."),
      square("delta_raw", "Δ_raw · error of the attention scores", "delta", false, "Below 0: more attention would lower the loss. Above 0: less would. Each row sums to 0."),
      square("sent", "error sent back between tokens", "delta", true, head.sent_caption),
    ),
    branches(head),
    el("details", {}, el("summary", {}, "Queries, keys and values"), el("div", { class: "vectors" }, ["q", "k", "v"].map(vector))),
  );
}

// Δ_3 of the head splits into two branches, the second again into two; their sum is the head's part of Δ_2.
function branches(head) {
  const { value, query, key } = head.branches;
  const lengths = [head.incoming, value, query, key, head.joined].filter((x) => x > 0).map(Math.log);
  const [least, most] = [Math.min(...lengths), Math.max(...lengths)];
  const width = (x) => (x > 0 ? (2 + (most > least ? (10 * (Math.log(x) - least)) / (most - least) : 4)).toFixed(1) : "0");
  const line = (d, x) => svg("path", { d, class: "flow backward", "stroke-width": width(x), fill: "none" });
  const text = (x, y, content, anchor = "middle") => {
    const node = svg("text", { x, y, "text-anchor": anchor });
    node.textContent = content;
    return node;
  };
  const drawing = svg(
    "svg", { viewBox: "0 0 640 190", role: "img", "aria-label": `The error of this head: ${number(head.incoming)} arrives, ${number(value)} flows back through the values, ${number(query)} through the queries, ${number(key)} through the keys, together ${number(head.joined)}` },
    line("M70 95C130 95 130 35 190 35H450C510 35 510 95 570 95", value),
    line("M70 95C130 95 130 130 190 130H300", Math.max(query, key)),
    line("M300 130C350 130 340 100 390 100H450C510 100 510 95 570 95", query),
    line("M300 130C350 130 340 160 390 160H450C510 160 510 95 570 95", key),
    [[62, 95], [578, 95]].map(([cx, cy]) => svg("circle", { cx, cy, r: 8, class: "joint backward" })),
    text(62, 75, "Δ₃ʰ"), text(62, 122, number(head.incoming)),
    text(320, 22, `values: ρᵗ Δ wᵥᵗ  (22) · ${number(value)}`),
    text(222, 118, "scores: Δ_raw (25, 28)"),
    text(425, 88, `queries (30.a) · ${number(query)}`), text(425, 182, `keys (30.b) · ${number(key)}`),
    text(578, 75, "to Δ₂"), text(578, 122, number(head.joined)),
  );
  return el("figure", { class: "branches" }, el("figcaption", {}, "How the error splits into branches and merges again (33)"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Branches" }, drawing), el("p", { class: "caption" }, `${head.branches_caption} Summed over all heads, Δ₂ has length ${number(head.all_heads)} (35).`));
}
