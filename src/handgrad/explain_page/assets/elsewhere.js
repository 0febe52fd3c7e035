// @ts-check
// What steps on one sentence have done to other prompts: their first choice with the original weights, and with the new ones.

import { post } from "./api.js";
import { aboutElsewhere } from "./after_steps.js";
import { number, percent, quote } from "./format.js";
import { button, caption, figureCell, soft, table, tr } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";

const WORDS = [
  "The capital of Germany is",
  "The capital of Italy is",
  "The capital of Japan is",
  "Paris is the capital of",
  "The opposite of hot is",
  "Once upon a",
];
const LETTERS = ["What is the", "The king", "My lord, I", "Good morrow, m", "I will not"];
const MOST = 20; // prompts

let typed = /** @type {string | null} */ (null); // the reader's prompts
let measured = { version: -1, /** @type {import("./after_steps.js").Elsewhere[]} */ rows: [], problem: "", waiting: false };

/** @param {any} state */
const promptsOf = ({ table: { unit } }) => typed ?? (unit === "word" ? WORDS : LETTERS).join("\n");

/** Measure every prompt on the original weights and on those of the page. @param {any} state @param {any} actions */
export async function measureElsewhere(state, actions) {
  const { version } = state.overview;
  const prompts = promptsOf(state).split("\n").filter((line) => line.trim()).slice(0, MOST);
  const mine = (measured = { version, rows: [], problem: "", waiting: true });
  actions.redraw();
  try {
    for (const text of prompts) {
      const row = await actions.busy(fate(text, version));
      if (mine !== measured) return;
      mine.rows.push(row);
      actions.redraw();
    }
  } catch (reason) {
    mine.problem = /** @type {Error} */ (reason).message;
  }
  mine.waiting = false;
  actions.redraw();
}

/** The first choice after a prompt before and now, and the probability that is left of the first. Its token is appended to the
 * prompt, so that its probability is known however small. @param {string} text @param {number} version */
async function fate(text, version) {
  const { tokens, positions } = await post("predict", { text, version: 0 });
  const [before] = positions.at(-1).top;
  const longer = await post("predict", { text: text + before.word, version }).catch(() => null);
  const appended = longer?.tokens.length === tokens.length + 1 && longer.tokens.at(-1).id === before.id;
  if (appended) {
    const { top, probability, rank } = longer.positions.at(-2);
    return { text, before, now: top[0], left: probability, rank };
  }
  const { top } = (await post("predict", { text, version })).positions.at(-1); // the tokenizer joins them
  return { text, before, now: top[0], left: top.find((/** @type {any} */ one) => one.id === before.id)?.p ?? null, rank: null };
}

/** @param {any} state @param {import("./after_steps.js").Goal} goal @param {any} actions */
export function elsewhereCard(state, goal, actions) {
  const { rows, problem, waiting } = measured.version === state.overview.version ? measured : { rows: [], problem: "", waiting: false };
  const head = ["prompt", "first choice before", "first choice now", "what is left of the first"];
  return savedFigure(
    {
      class: "card elsewhere",
      key: "elsewhere",
      tag: "h3",
      attributes: { "aria-label": "Other prompts" },
      title: "What this did elsewhere",
      values: () => rows.map(({ text, before, now, left }) => [text, before.word, before.p, now.word, now.p, left]),
      columnLabels: ["prompt", "first choice before", "probability", "first choice now", "probability", "left of the first"],
    },
    soft(
      "The steps were taken for one sentence, but every prompt uses the same weights. Before: the original weights. Now: those " +
        "after the steps.",
    ),
    h(
      "label.field",
      "prompts, one per line",
      h("textarea", {
        id: "prompts",
        rows: "6",
        spellcheck: "false",
        value: promptsOf(state),
        oninput: (/** @type {any} */ event) => (typed = event.target.value),
      }),
    ),
    h(
      "p",
      button(waiting ? "measuring…" : "measure them", () => waiting || measureElsewhere(state, actions), {
        id: "measure-elsewhere",
        "aria-disabled": waiting ? "true" : null,
      }),
    ),
    problem ? h("p.problem", { role: "alert" }, problem) : null,
    h(
      "div",
      { "aria-live": "polite" },
      rows.length && !waiting ? h("p.caption", { id: "elsewhere-caption" }, aboutElsewhere(rows, goal)) : null,
    ),
    rows.length ? table("Other prompts before and now", head, rows.map((row) => line(row, goal)), { class: "fates" }) : null,
    rows.length && state.table.unit !== "word" ? caption("A prompt that ends in the middle of a word is continued there.") : null,
  );
}

/** @param {import("./after_steps.js").Elsewhere} row @param {import("./after_steps.js").Goal} goal */
function line({ text, before, now, left, rank }, goal) {
  const choice = (/** @type {any} */ one) => [h("b", quote(one.word)), ` ${percent(one.p)}`];
  const place = rank === null || rank === 1 ? "" : `, rank ${number(rank, 6)}`;
  return tr(
    { key: text, class: before.id === now.id ? null : "moved" },
    text,
    h("td", choice(before)),
    h("td", { class: now.id === goal.id ? "goal" : null, "data-value": now.p }, choice(now)),
    figureCell(`${percent(left)}${place}`, { "data-value": left ?? "" }),
  );
}
