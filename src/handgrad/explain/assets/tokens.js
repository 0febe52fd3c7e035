// @ts-check
// The strip of tokens below the sentence: how surprised the model was by each, and which one is being followed.

import { colour, css, filled } from "./colours.js";
import { number, visible } from "./format.js";
import { chips } from "./parts.js";
import { h } from "./render.js";

/** @param {any} state @param {any} actions */
export function tokenStrip(state, actions) {
  const { tokens, losses } = state.overview;
  const most = Math.max(...losses, 1e-9);
  const items = tokens.map((/** @type {any} */ token, /** @type {number} */ i) => {
    const surprise = i > 0 ? losses[i - 1] : null;
    const text = surprise === null ? "the first token is not predicted" : `surprise −log p = ${number(surprise)}`;
    return {
      content: visible(token.label),
      label: `token ${i + 1}: ${visible(token.label)}, ${text}`,
      title: text,
      data: { "data-token": i },
      style: surprise === null ? null : filled("size", 0.6 * (surprise / most)),
    };
  });
  const swatch = (/** @type {number} */ x) =>
    h("i", { class: "swatch", style: { background: css(colour("size", x)) }, "aria-hidden": "true" });
  return [
    chips({
      label: "Tokens: choose one to follow through the network",
      items,
      chosen: state.token,
      choose: (token) => actions.select({ token }),
      class: "chips",
    }),
    h(
      "p",
      { class: "strip-note" },
      swatch(0),
      swatch(0.3),
      swatch(0.6),
      ` surprise of the model, −log p: from 0 to ${number(most)}. Choose a token to follow it.`,
    ),
  ];
}
