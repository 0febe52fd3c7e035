// @ts-check
// The strip of tokens below the sentence: how surprised the model was by each, and which one is being followed.

import { color, css, filled } from "./colors.js";
import { number, quote, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { chips } from "./parts.js";
import { h } from "./render.js";

let inView = ""; // the sentence and the token that were last brought into view

/** Bring a newly chosen token into view, where the strip has more rows than it shows. @param {HTMLElement} nav @param {any} state */
export function scrollToToken(nav, state) {
  const strip = /** @type {HTMLElement} */ (nav.querySelector(".chips")),
    chosen = strip.querySelector("[aria-pressed=true]"),
    now = `${state.overview.id} ${state.token}`;
  if (!chosen || !strip.clientHeight || now === inView) return; // the strip is hidden at the start
  inView = now;
  const box = strip.getBoundingClientRect(),
    { top, bottom } = chosen.getBoundingClientRect();
  if (top < box.top || bottom > box.bottom) strip.scrollTop += (top + bottom - box.top - box.bottom) / 2;
}

/** @param {any} state @param {any} actions */
export function tokenStrip(state, actions) {
  const { tokens, losses } = state.overview;
  const most = Math.max(...losses, 1e-9);
  const items = tokens.map((/** @type {any} */ token, /** @type {number} */ i) => {
    const surprise = i > 0 ? losses[i - 1] : null;
    const text = surprise === null ? "the first token is not predicted" : `surprise −log p = ${number(surprise)}`;
    return {
      content: visible(token.label),
      label: `token ${i + 1}: ${quote(token.label)}, ${text}`,
      title: text,
      data: { "data-token": i, "data-link": tokenLink(i) },
      style: surprise === null ? null : filled("size", 0.6 * (surprise / most)),
    };
  });
  const swatch = (/** @type {number} */ x) =>
    h("i.swatch", { style: { background: css(color("size", x)) }, "aria-hidden": "true" });
  return [
    chips({
      label: "Tokens: choose one to follow through the network",
      items,
      chosen: state.token,
      choose: (token) => actions.select({ token }),
      class: "chips",
    }),
    h(
      "p.strip-note",
      swatch(0),
      swatch(0.3),
      swatch(0.6),
      ` surprise of the model, −log p: from 0 to ${number(most)}. Choose a token to follow it.`,
    ),
  ];
}
