// @ts-check
// “Follow one number”: the sum of products that made a cell, its terms largest first. Every factor can be followed in turn.

import { count, exact, number, quote, signed } from "./format.js";
import { spaceOf, tokenLink } from "./linked.js";
import { button, caption, figureCell, middleBar, ofBlock, soft, table, tr } from "./parts.js";
import { h } from "./render.js";

/** ∂w_6 of block 2, row 3, column 5 @param {any} cell  as the server names it */
function nameOf(cell) {
  const head = cell.head === null ? "" : `, head ${cell.head + 1}`;
  const row = cell.row_label === null ? `row ${cell.row}` : `${quote(cell.row_label)} (position ${cell.row + 1})`;
  const column = cell.column_label === null ? `column ${cell.column}` : quote(cell.column_label);
  return `${cell.symbol}${ofBlock(cell.block)}${head} [${row}, ${column}]`;
}

/** @param {any} found  the newest number @param {any} state @param {any} actions */
export function followCard(found, state, actions) {
  const matches = Math.abs(found.sum - found.value) <= 1e-4 * Math.max(Math.abs(found.value), 1e-30);
  return h(
    "section.card.follow",
    { "aria-label": "Follow one number", key: "follow", id: "follow" },
    h(
      "div.follow-head",
      h(
        "h3",
        { tabindex: "-1" },
        `${nameOf(found)} = `,
        h("b", { id: "followed-value", "data-value": found.value }, exact(found.value)),
      ),
      button("close", () => actions.followBack(0), { class: "small", id: "follow-close" }),
    ),
    path(state, actions),
    found.formula ? caption(h("code", found.formula)) : null,
    caption(found.caption),
    found.leaf ? null : terms(found, actions),
    found.leaf
      ? null
      : soft(
          `Sum of ${found.count === 1 ? "the only term" : `all ${count(found.count, "term")}`}: `,
          h("b", { id: "followed-sum", "data-value": found.sum }, exact(found.sum)),
          matches
            ? ", the number above up to rounding."
            : ", which differs from it: the model computes in lower precision.",
        ),
    found.python ? soft(h("code", found.python)) : null,
  );
}

/** The numbers on the way here, from the first one clicked. */
function path(state, actions) {
  if (state.followed.length < 2) return null;
  const step = (cell, i) => [
    i ? " ← " : "",
    button(cell.label, () => actions.followBack(i + 1), {
      class: "small",
      key: i,
      "aria-current": i === state.followed.length - 1 ? "step" : null,
    }),
  ];
  return h("p.path", { "aria-label": "The way here" }, state.followed.map(step));
}

function terms(found, actions) {
  const factor = (f, i) => {
    const text = `${f.symbol} ${number(f.value)}`;
    const into = () => actions.followInto(f.cell);
    return [
      i ? " × " : "",
      f.cell
        ? button(text, into, { class: "small factor", title: nameOf(f.cell) })
        : h("span.factor", text),
    ];
  };
  const place = ({ token, position, feature }) => {
    if (token !== null) return quote(token) + (position === null ? "" : ` (position ${position})`);
    return feature === null ? "" : `feature ${feature}`;
  };
  const link = ({ position, feature, factors }) => {
    const space = feature === null ? null : factors.map((f) => f.cell && spaceOf(f.cell.name)).find(Boolean);
    if (position !== null) return tokenLink(position - 1);
    return space ? `feature-${space}-${feature}` : null;
  };
  const most = Math.max(...found.terms.map((t) => Math.abs(t.value)), 1e-300);
  const rows = found.terms.map((term, i) =>
    tr(
      { key: i },
      h("td.place", { "data-link": link(term) }, place(term)),
      h("td", term.factors.map(factor), term.scale === 1 ? "" : ` × ${number(term.scale)}`),
      h("td.move", middleBar(term.value, most, "term")),
      figureCell(signed(term.value), { "data-term": term.value }),
    ),
  );
  if (found.rest.count)
    rows.push(
      tr(
        { key: "rest" },
        h("td", { colspan: "2" }, `${count(found.rest.count)} smaller terms`),
        h("td.move", middleBar(found.rest.value, most, "term")),
        figureCell(signed(found.rest.value), { "data-term": found.rest.value }),
      ),
    );
  return table("Terms", ["of", "factors: choose one to follow it", "", "term"], rows, { class: "terms", tall: true });
}
