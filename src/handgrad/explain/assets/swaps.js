// @ts-check
// Station a_0: the tokens, and what the loss would be if another token stood in place of one of them.

import { number, quote, signed, visible } from "./format.js";
import { table } from "./parts.js";
import { h } from "./render.js";

/** @param {any} view @param {any} state */
export function swapTable(view, state) {
  const swap = (x) =>
    h(
      "li",
      {},
      quote(x.word),
      ` ${signed(x.change, 2)}`,
      x.measured === undefined ? null : h("b", { "data-value": x.measured }, ` → ${signed(x.measured, 2)}`),
    );
  const rows = view.swaps.map((s, t) =>
    h(
      "tr",
      { key: t, class: t === state.token ? "chosen" : null },
      h("td", { class: "figure" }, t + 1),
      h("td", {}, h("b", {}, visible(state.overview.tokens[t].label))),
      h("td", { class: "figure" }, s.id),
      h("td", {}, s.swaps.length ? h("ul", { class: "swaps" }, s.swaps.map(swap)) : "none"),
    ),
  );
  return h(
    "section",
    { class: "card", "aria-label": "Replacements", key: "tokens" },
    h("h3", {}, "The sentence as token ids"),
    h("p", { class: "caption" }, view.swaps_caption),
    h(
      "p",
      { class: "soft" },
      "A replacement moves the embedding from one token to another. That is far: the gradient " +
        "describes only small moves, so its estimate is often wrong, even in sign.",
    ),
    table(
      "Tokens and possible replacements",
      ["position", "token", "id", "replacement: estimated change of the loss → measured change"],
      rows,
      { tall: true },
    ),
  );
}
