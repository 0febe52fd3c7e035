// @ts-check
// The band with which every view begins: the sentence that continues the story, and the link to the next view.

import { has } from "./api.js";
import { button } from "./parts.js";
import { h } from "./render.js";
import { invitation, LINES, questionOf, strongestHead, wordAt, wordOf } from "./storyline.js";
import { whatIfButton } from "./what_if.js";

/** The content of a view with its band: first, or at the start after the headline, which tells the beginning.
 * @param {any[]} content @param {string} view @param {string[]} views  in order, those that this page has
 * @param {any} state @param {any} data @param {any} actions */
export function withStory(content, view, views, state, data, actions) {
  const line = state.preview ? null : LINES[view]?.(state, data);
  if (!line) return content;
  const next = views[views.indexOf(view) + 1];
  const band = h(
    "div.story-line",
    { key: "story-line", role: "note", "aria-label": "The story" },
    h("p", line),
    h(
      "div.walk",
      view === "whatif" && !data.result ? measure(data.effects, actions) : null,
      next ? onward(view, next, state, data, actions) : null,
    ),
  );
  const at = view === "start" ? 1 : 0;
  return [...content.slice(0, at), band, ...content.slice(at)];
}

/** The button that measures what the gradient expects. @param {any} effects @param {any} actions */
function measure(effects, actions) {
  const { block, head } = strongestHead(effects);
  return whatIfButton({ kind: "head", block, head }, `head ${head + 1} of block ${block + 1}`, actions);
}

/** @param {string} view @param {string} next @param {any} state @param {any} data @param {any} actions */
function onward(view, next, state, data, actions) {
  const { overview, token } = state;
  const word = view === "start" ? wordAt(overview, Math.min(token, overview.losses.length - 1)) : wordOf(state);
  const question = next === "station" && has("sentence") ? questionOf(data.view.positions[word.position]) : null;
  const open = () => go(next, state, word.position, question, actions);
  return button(`next: ${invitation(next, word.word, question, state.predicts)} →`, open, { class: "story-next", "data-next": next });
}

/** Open the next view with what it explains: a difference at the loss, the word alone where steps are taken.
 * @param {string} next @param {any} state @param {number} position @param {[any, any] | null} question @param {any} actions */
function go(next, state, position, question, actions) {
  state.view = next;
  if (next === "station") Object.assign(state, { station: "loss", direction: "backward", token: position });
  if (question) {
    const [token, against] = question.map((one) => one.id);
    return actions.explain({ kind: "difference", position, token, against });
  }
  const alone = next === "step" && has("sentence") && state.overview.objective.kind !== "position";
  return alone ? actions.explain({ kind: "position", position }) : actions.show();
}
