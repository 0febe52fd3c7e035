// @ts-check
// The first view: a story about one word of this sentence, the worst predicted one unless the reader chooses another.

import { has } from "./api.js";
import { filled } from "./colors.js";
import { chance, count, number, percent, probability, quote, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { button, caption, chips, leftBar, probabilityBars, soft } from "./parts.js";
import { find, h } from "./render.js";
import { savedFigure } from "./save.js";

let chosen = { text: "", position: -1 }; // the reader's word, in a sentence that is not traced yet

const CONTEXT = 3; // at the beginning everything is improbable: the story starts after so many predictions, if there are enough

/** The position whose next token the model found least probable. @param {number[]} losses */
function worst(losses) {
  const first = losses.length > 2 * CONTEXT ? CONTEXT : 0;
  return first + losses.slice(first).indexOf(Math.max(...losses.slice(first)));
}

/** The token that a page starts with: the one before the word that is explained, or before the word of the story.
 * @param {any} overview @returns {number} */
export const firstToken = ({ objective, losses }) => objective.position ?? worst(losses);

/** The end of the text before the next token: at least a word, so that tokens of one letter can be read.
 * @param {{ label: string }[]} tokens @param {number} position */
export function contextOf(tokens, position) {
  const enough = tokens[position].label.length > 1 ? 8 : 1; // letters: one word is little if tokens are words
  let text = "";
  for (let t = position; t >= 0 && text.length < 12; t--) {
    text = tokens[t].label + text;
    const whole = /^\s+\S/.test(text) && text.trim().length >= enough;
    if (whole || (/\S/.test(text) && text.length > 10)) break;
  }
  return text.trimStart() || text;
}

export const storyView = {
  id: "start",
  title: "Start",
  needs: () => ({ view: ["station", { station: "loss" }] }),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { view }, actions) {
    // while the reader types, the predictions come before the trace
    const { text, losses, tokens, positions } = state.preview ?? { ...state.overview, positions: view.positions };
    const here = chosen.text === text ? chosen.position : worst(losses);
    const position = Math.min(state.preview ? here : state.token, losses.length - 1);
    const row = positions[position];
    const choose = (/** @type {number} */ i) => {
      const token = Math.max(0, i - 1);
      if (!state.preview) return actions.select({ token });
      chosen = { text, position: token };
      actions.redraw();
    };
    const { unit } = state.table;
    return [
      headline(contextOf(tokens, position), row, aboutChoice(losses, position, unit)),
      words(tokens, losses, position, choose, unit),
      guesses(contextOf(tokens, position), row, losses[position], state.preview ? undefined : position, unit),
      nextWord(positions.at(-1)),
      blame(position, state, actions),
    ];
  },
};

/** Which token the story is about. @param {number[]} losses @param {number} position @param {string} unit */
function aboutChoice(losses, position, unit) {
  const first = worst(losses),
    late = losses.length > 2 * CONTEXT;
  if (losses[position] !== losses[first] || (late && position < CONTEXT)) return `the ${unit} that you chose`;
  const equal = losses.filter((x, t) => x === losses[first] && (!late || t >= CONTEXT)).length;
  const which = equal > 1 ? `one of ${equal} ${unit}s that this model predicted worst` : `the ${unit} that this model predicted worst`;
  return which + (late ? `, from the ${CONTEXT + 2}th on` : "");
}

function headline(before, row, about) {
  return h(
    "div.story-head",
    { key: "headline" },
    h("p.where", about),
    h(
      "h2",
      { id: "story" },
      `After ${quote(before)} the model gave ${quote(row.target)} `,
      h("b", { "data-value": row.probability }, percent(row.probability)),
      ".",
    ),
  );
}

/** The sentence, each token with the probability that it had. */
function words(tokens, losses, position, choose, unit) {
  const most = Math.max(...losses, 1e-300);
  const items = tokens.map((token, i) => {
    const p = i ? chance(losses[i - 1]) : null;
    return {
      content: [h("b", visible(token.label)), h("small", p === null ? "–" : percent(p))],
      label:
        p === null
          ? `${quote(token.label)}, the first token, not predicted`
          : `${quote(token.label)} was predicted with ${percent(p)}`,
      style: i ? filled("size", 0.6 * (losses[i - 1] / most)) : null,
      data: { "data-link": tokenLink(i) },
    };
  });
  return h(
    "section.card",
    { "aria-label": "The sentence", key: "words" },
    caption(
      `${has("predict") ? "Change the sentence above and watch: below" : "Below"} each ${unit} is the probability that the model gave ` +
        `it, from the ${unit}s before it alone. The stronger the blue, the more it was surprised. Choose a ${unit}.`,
    ),
    chips({ label: "Tokens and their probabilities", items, chosen: position + 1, choose, class: "strip story-words" }),
  );
}

function guesses(before, row, loss, position, unit) {
  const isTarget = (x) => x.id === row.target_id;
  const target = { id: row.target_id, word: row.target, p: row.probability };
  return savedFigure(
    {
      class: "card",
      key: "guesses",
      tag: "h3",
      title: `What the model expected after ${quote(before)}`,
      python: position === undefined ? undefined : `trace['y_pred'][${position}].topk(5)`,
      values: () => row.top.map((x) => [x.word, x.p]),
      columnLabels: ["token", "probability"],
    },
    probabilityBars(row.top.some(isTarget) ? row.top : [...row.top, target], isTarget),
    caption(`${aboutRank(row)} The loss of this ${unit} is −log p = ${number(loss)}: the less probable, the larger.`),
  );
}

/** The rank of a target; equal logits share it. @param {any} row */
const aboutRank = ({ target, rank, ties, probability: p }) =>
  `${quote(target)} had rank ${rank.toLocaleString("en")}${ties ? `, shared with ${count(ties, "other token")}` : ""}, ` +
  `with ${probability(p)}.`;

/** What the model would write after the whole sentence. */
const nextWord = (last) =>
  h(
    "p.caption",
    { key: "next", id: "next-word" },
    `After the whole sentence the model finds most probable: ` +
      `${last.top.slice(0, 3).map((x) => `${quote(x.word)} (${percent(x.p)})`).join(", ")}.`,
  );

function blame(position, state, actions) {
  const { objective, groups } = state.overview;
  const known = !state.preview && objective.kind === "position" && objective.position === position;
  return h(
    "section.card.doors",
    { "aria-label": "Which weights are to blame?", key: "doors" },
    h("h3", "Which weights are to blame?"),
    caption(
      "Backpropagation follows this error up through the network, layer by layer, and gives every weight its share. " +
        "Every layer on the way shows its formula with your numbers, and checks it.",
    ),
    known ? shares(groups, actions) : null,
    h(
      "div.walk",
      button("Follow the error up ↑", () => actions.followError(position), { class: "primary", id: "follow-up" }),
      known || !has("sentence")
        ? null
        : button("Show their shares", () => actions.explainWord(position), { id: "blame" }),
      button("Play the pass", () => actions.play(), { id: "story-play" }),
      button("Take the tour", () => find("tour-button").click(), { id: "story-tour" }),
      button("Walk forward from the first layer", () => actions.go("a_1", "forward"), { id: "story-map" }),
    ),
  );
}

/** The gradients of this word's loss with the largest share of the squared length of all. */
function shares(groups, actions) {
  const total = groups.reduce((sum, g) => sum + g.norm ** 2, 0) || 1;
  const largest = [...groups].sort((a, b) => b.norm - a.norm).slice(0, 6);
  const most = largest[0].norm ** 2 / total;
  const row = (g) =>
    h(
      "li",
      { key: `${g.layer} ${g.symbol}` },
      button(`${g.symbol} in ${g.where}`, () => actions.go(g.station, "backward"), { class: "word" }),
      leftBar(g.norm ** 2 / total / most, "size"),
      h("span.figure", percent(g.norm ** 2 / total)),
    );
  return savedFigure(
    {
      title: "The largest shares",
      python: "{name: x.norm() ** 2 for name, x in trace.items() if 'grad_' in name}",
      values: () => groups.map((g) => [g.layer, g.symbol, g.norm ** 2 / total]),
      columnLabels: ["layer", "parameter", "share"],
    },
    h("ul.bars.shares", { id: "shares" }, largest.map(row)),
    soft("Share of the squared length of the whole gradient. Choose a matrix to see where its gradient comes from."),
  );
}
