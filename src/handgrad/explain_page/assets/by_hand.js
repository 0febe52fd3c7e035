// @ts-check
// “One entry by hand”: the two columns whose products add up to an entry of a gradient, with all digits. The sum stays
// hidden until the reader asks for it.

import { number, quote, visible } from "./format.js";
import { table } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

/** @param {any} parameter @param {{ label: string }[]} tokens */
export function byHand({ symbol, name, by_hand: { row, column, factors, digits } }, tokens) {
  const entry = `∂${symbol.split(" ")[0]} [${row}, ${column}]`;
  const typeset = (/** @type {string} */ x) => (x.includes("e") ? number(Number(x), 9) : x.replace("-", "−"));
  const rows = tokens.map(({ label }, t) =>
    h(
      "tr",
      { key: t },
      h("th", { scope: "row" }, `${t + 1} ${quote(label)}`),
      factors.map((f) => h("td", { class: "figure", "data-value": f.digits[t] }, typeset(f.digits[t]))),
    ),
  );
  return h(
    "details",
    { class: "by-hand", key: "by-hand", "data-name": name },
    h("summary", {}, `One entry by hand: ${entry}`),
    savedFigure(
      {
        title: `The factors of ${entry}`,
        values: () => tokens.map((_, t) => factors.map((f) => f.digits[t])),
        rowLabels: tokens.map(({ label }, t) => `${t + 1} ${visible(label)}`),
        columnLabels: factors.map((f) => f.title),
      },
      h("p", { class: "caption" }, `Multiply the two numbers of every token, and add the products up: that is ${entry}.`),
      table(`The factors of ${entry}`, ["token", ...factors.map((f) => f.title)], rows, { class: "digits", tall: true }),
      h("details", {}, h("summary", {}, "Show the sum"), h("p", { class: "sum", "data-value": digits }, typeset(digits))),
    ),
  );
}
