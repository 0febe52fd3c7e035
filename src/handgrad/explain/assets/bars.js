// Rows of a bar chart: a token, a bar, a number.

import { el } from "./dom.js";
import { number, visible } from "./format.js";

export function bar(word, value, most, kind, text, target = false) {
  const fill = el("i", { class: `fill ${kind}` });
  fill.style.width = `${Math.max(1, (100 * Math.abs(value)) / most)}%`;
  return el("li", { class: target ? "target" : "" }, el("span", { class: "word" }, visible(word)), el("span", { class: "track" }, fill), el("span", { class: "figure" }, text));
}

// A bar that starts in the middle: to the left below 0, to the right above.
export function signedBar(x, most) {
  const fill = el("i", { class: `fill delta ${x.delta < 0 ? "minus" : "plus"}` });
  fill.style.width = `${Math.max(0.5, (50 * Math.abs(x.delta)) / most)}%`;
  return el("li", { class: x.target ? "target" : "" }, el("span", { class: "word" }, visible(x.word)), el("span", { class: "track middle" }, fill), el("span", { class: "figure", "data-value": x.delta }, number(x.delta)));
}
