// @ts-check
// “One entry by hand”: the two columns whose products add up to an entry of a gradient, with all digits. The sum stays
// hidden until the reader asks for it.

import { number, quote, visible } from "./format.js";
import { caption, figureCell, foldable, rowHead, table, tr } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

/** @param {any} parameter @param {{ label: string }[]} tokens */
export function byHand({ symbol, name, by_hand: { row, column, factors, digits } }, tokens) {
  const entry = `∂${symbol.split(" ")[0]} [${row}, ${column}]`;
  const typeset = (/** @type {string} */ x) => (x.includes("e") ? number(Number(x), 9) : x.replace("-", "−"));
  const rows = tokens.map(({ label }, t) =>
    tr(
      { key: t },
      rowHead(`${t + 1} ${quote(label)}`),
      factors.map((f) => figureCell(typeset(f.digits[t]), { "data-value": f.digits[t] })),
    ),
  );
  return foldable(
    `One entry by hand: ${entry}`,
    { class: "by-hand", key: "by-hand", "data-name": name },
    savedFigure(
      {
        title: `The factors of ${entry}`,
        values: () => tokens.map((_, t) => factors.map((f) => f.digits[t])),
        rowLabels: tokens.map(({ label }, t) => `${t + 1} ${visible(label)}`),
        columnLabels: factors.map((f) => f.title),
      },
      caption(`Multiply the two numbers of every token, and add the products up: that is ${entry}.`),
      table(`The factors of ${entry}`, ["token", ...factors.map((f) => f.title)], rows, { class: "digits", tall: true }),
      foldable("Show the sum", {}, h("p.sum", { "data-value": digits }, typeset(digits))),
    ),
  );
}
