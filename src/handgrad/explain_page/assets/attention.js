// @ts-check
// The attention picture: one head's attention weights, the error that flows back between tokens, and its branches.

import { has } from "./api.js";
import { pythonOf } from "./csv.js";
import { number } from "./format.js";
import { heat, positioned } from "./heatmap.js";
import { headLink } from "./linked.js";
import { caption, chips, foldable, soft } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";
import { whatIfButton } from "./what_if.js";

/** `head` is one head of the block (attention_view.at_head): ρ, Δ_raw, the error between tokens, and its branches.
 * @param {any} head @param {any} state @param {any} actions @param {string[]} labels */
export function attentionCard(head, state, actions, labels) {
  const most = Math.max(...head.heads.map((one) => one.incoming), 1e-300);
  const picker = chips({
    label: "Heads",
    class: "heads",
    chosen: head.head,
    choose: (i) => actions.select({ head: i }),
    items: head.heads.map((one, i) => ({
      label: `Head ${i + 1}, incoming error ${number(one.incoming)}`,
      data: { "data-head-button": i, "data-link": headLink(head.block, i) },
      content: [
        h("span.gauge", { "aria-hidden": "true" }, h("i", { style: { height: `${(100 * one.incoming) / most}%` } })),
        String(i + 1),
      ],
    })),
  });
  const shared = { sentence: state.overview.id, rowLabels: labels, selected: state.token };
  const square = (key, title, kind, positive, caption, join = " ← ") => {
    const { picture, name, python } = head.maps[key];
    const followed = key !== "sent" && has("follow");
    return heat({
      key,
      title,
      kind,
      positive,
      caption,
      picture,
      name,
      head: head.head,
      columnLabels: labels,
      square: true,
      join,
      nameRow: positioned(labels),
      nameColumn: positioned(labels),
      ...shared,
      python,
      choose: (row, column) =>
        followed ? actions.follow(name, row, column, head.head) : actions.select({ token: row }),
      chooses: followed ? "follows this number" : "selects the token",
    });
  };
  const vector = (key) => {
    const { picture, name, head: index } = head.vectors[key];
    return heat({
      key,
      title: key,
      kind: "a",
      picture,
      name,
      head: index,
      nameRow: positioned(labels),
      python: pythonOf(name, index),
      ...shared,
    });
  };
  const group = head.group.map((i) => i + 1).join(", ");
  return h(
    "section.card.attention",
    { "aria-label": "Attention", "data-shown-head": head.head, key: "attention" },
    h("h3", `Head ${head.head + 1} of ${head.heads.length}`),
    soft("Choose a head. The bar next to each number shows the size of the error that reaches this head."),
    picker,
    head.group.length > 1
      ? h(
          "p.soft",
          { id: "head-group" },
          `Heads ${group} share their keys and values; the errors that reach these add up.`,
        )
      : null,
    h("p.caption", { id: "head-caption" }, head.caption),
    whatIfButton({ kind: "head", block: head.block, head: head.head }, "this head", actions),
    h(
      "div.squares",
      square(
        "rho",
        "ρ · attention weights",
        "a",
        true,
        "How much each token (row) attends to each other token (column). Each row sums to 1.",
      ),
      square(
        "delta_raw",
        "Δ_raw · error of the scores",
        "delta",
        false,
        "Below 0: more attention would lower the explained number. Above 0: less would. Each row sums to 0.",
      ),
      square("sent", "error sent back between tokens", "size", true, head.sent_caption, " → "),
    ),
    branches(head),
    foldable("Queries, keys and values", { key: "vectors" }, h("div.vectors", ["q", "k", "v"].map(vector))),
  );
}

/** Δ_3 of the head splits into two branches, the second again into two; their sum is the head's part of Δ_2. */
function branches(head) {
  const { value, query, key } = head.branches;
  const lengths = [head.incoming, value, query, key, head.joined].filter((x) => x > 0).map(Math.log);
  const least = Math.min(...lengths),
    most = Math.max(...lengths);
  const width = (x) =>
    x > 0 ? (2 + (most > least ? (10 * (Math.log(x) - least)) / (most - least) : 4)).toFixed(1) : "0";
  const line = (d, x) => h("path.flow.backward", { d, "stroke-width": width(x), fill: "none" });
  const text = (x, y, content) => h("text", { x, y, "text-anchor": "middle" }, content);
  const label =
    `The error of this head: ${number(head.incoming)} arrives, ${number(value)} flows back through the values, ` +
    `${number(query)} through the queries, ${number(key)} through the keys, together ${number(head.joined)}`;
  const drawing = h(
    "svg",
    { viewBox: "0 0 640 190", role: "img", "aria-label": label },
    line("M70 95C130 95 130 35 190 35H450C510 35 510 95 570 95", value),
    line("M70 95C130 95 130 130 190 130H300", Math.max(query, key)),
    line("M300 130C350 130 340 100 390 100H450C510 100 510 95 570 95", query),
    line("M300 130C350 130 340 160 390 160H450C510 160 510 95 570 95", key),
    [62, 578].map((cx) => h("circle.joint.backward", { cx, cy: 95, r: 8 })),
    text(62, 75, "Δ₃ʰ"),
    text(62, 122, number(head.incoming)),
    text(320, 22, `values: ρᵗ Δ wᵥᵗ  (22) · ${number(value)}`),
    text(222, 118, "scores: Δ_raw (25, 28)"),
    text(425, 88, `queries (30.a) · ${number(query)}`),
    text(425, 182, `keys (30.b) · ${number(key)}`),
    text(578, 75, "to Δ₂"),
    text(578, 122, number(head.joined)),
  );
  const title = "How the error splits into branches and merges again (33)",
    python = head.branches_python;
  const rows = [
    ["arrives", head.incoming],
    ["values", value],
    ["queries", query],
    ["keys", key],
    ["together", head.joined],
  ];
  return savedFigure(
    { class: "branches", key: "branches", title, python, values: () => rows, columnLabels: ["branch", "length"] },
    h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Branches" }, drawing),
    caption(`${head.branches_caption} Summed over all heads, Δ₂ has length ${number(head.all_heads)} (35).`),
  );
}
