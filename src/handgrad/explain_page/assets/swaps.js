// @ts-check
// Station a_0: the tokens, and what the loss would be if another token stood in place of one of them.

import { quote, signed, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { caption, figureCell, soft, table, tr } from "./parts.js";
import { h } from "./render.js";

const ABOUT =
  "A replacement moves the embedding from one token to another. That is too large a step for a gradient, which describes " +
  "small moves: the estimate is often wrong, even in sign. Choose a token above to measure its replacements.";
const HEAD = ["position", "token", "id", "replacement: estimated change → measured change"];

/** @param {any} view @param {any} measured  the replacements of the chosen token, or undefined @param {any} state */
export function swapTable(view, measured, state) {
  const { tokens } = state.overview;
  const rows = view.swaps.map((row, t) => {
    const swaps = measured?.position === t ? measured.swaps : row.swaps;
    return tr(
      { key: t, class: t === state.token ? "chosen" : null, "data-link": tokenLink(t) },
      figureCell(t + 1),
      h("b", visible(tokens[t].label)),
      figureCell(row.id),
      h("td", swaps.length ? h("ul.swaps", swaps.map(swap)) : "none"),
    );
  });
  const about = measured ? `${quote(tokens[measured.position].label)}: ${measured.caption}` : null;
  return h(
    "section.card",
    { "aria-label": "Replacements", key: "tokens" },
    h("h3", "The sentence as token ids, and what could have stood there"),
    caption(view.swaps_caption),
    about ? h("p.caption", { id: "swaps-measured" }, about) : null,
    soft(ABOUT),
    table("Tokens and possible replacements", HEAD, rows, { tall: true }),
  );
}

const swap = (x) => {
  const measured = h("b", { "data-id": x.id, "data-value": x.measured }, ` → ${signed(x.measured, 2)}`);
  return h("li", { key: x.id }, `${quote(x.word)} ${signed(x.change, 2)}`, x.measured === null ? null : measured);
};
