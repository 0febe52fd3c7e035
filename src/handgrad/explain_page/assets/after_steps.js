// @ts-check
// What steps have done, in sentences: whether the model says the word now, and what it says elsewhere.

import { count, number, percent } from "./format.js";
import { said } from "./storyline.js";

export const LIMIT = 40; // steps, at most, until the word is the first choice
const RISING = 3; // so many steps in a row above the beginning: the steps diverge

/**
 * @typedef {{ position: number, id: number, word: string, before: string }} Goal  the word that shall be the first choice
 * @typedef {{ steps: number, first: { id: number, word: string, p: number }, p: number | null }} Standing  after some steps
 * @typedef {{ text: string, before: any, now: any, left: number | null, rank: number | null }} Elsewhere  a prompt: the first
 *   choice before and now, and what is left of the first: its probability and its rank now
 */

/** The word that the steps make more probable. @param {any} state @param {number} position @returns {Goal} */
export function goalOf({ overview: { objective, tokens } }, position) {
  const { id, label } = tokens[position + 1];
  const [goal, word] = objective.kind === "difference" ? [objective.against.id, objective.against.word] : [id, label];
  return { position, id: goal, word, before: tokens[position].label };
}

/** Where the word stands in predictions. @param {Goal} goal @param {any} predictions @param {number} steps @returns {Standing} */
export function standingOf({ position, id }, predictions, steps) {
  const { top, target_id, probability } = predictions.positions[position];
  const p = top.find((/** @type {any} */ one) => one.id === id)?.p ?? (target_id === id ? probability : null);
  return { steps, first: top[0], p };
}

/** Whether what is lowered has been above its beginning for several steps.
 * @param {{ loss: number, measured: number }[]} steps */
export const diverges = (steps) =>
  steps.length >= RISING && steps.slice(-RISING).every(({ measured }) => !(measured <= steps[0].loss));

/** How it ended, or how far it has come. @param {Goal} goal @param {Standing} standing
 * @param {"running" | "reached" | "limit" | "diverges" | "stopped"} end @param {number} beginning  of what is lowered */
export function aboutGoal(goal, { steps, first, p }, end, beginning) {
  const after = steps ? `After ${count(steps, "step")}` : "Before any step";
  const share = p === null ? "" : `, with ${percent(p)}`;
  if (first.id === goal.id) return `${after}, ${said(goal.word)} is the first choice after ${said(goal.before)}${share}.`;
  const has = p === null ? "" : `; ${said(goal.word)} has ${percent(p)}`;
  const still = `${after}, the first choice after ${said(goal.before)} is ${said(first.word)}, with ${percent(first.p)}${has}.`;
  return {
    running: still,
    reached: still,
    stopped: `Stopped. ${still}`,
    limit: `That is not enough. ${still} More steps may help, or another learning rate.`,
    diverges:
      `The steps diverge: the last ${RISING} ended above ${number(beginning)}, where they began. ${still} ` +
      "Press reset and choose a smaller learning rate.",
  }[end];
}

/** How other prompts fared. @param {Elsewhere[]} rows @param {Goal} goal */
export function aboutElsewhere(rows, goal) {
  const moved = rows.filter(({ before, now }) => before.id !== now.id);
  const taken = moved.filter(({ now }) => now.id === goal.id).length;
  const of = `Of ${count(rows.length, "other prompt")}, `;
  if (!moved.length) return `${of}${rows.length === 1 ? "it" : "all"} kept the first choice. ${hardest(rows)}`;
  const often = taken === 1 ? "once " : `${taken} times `,
    always = taken === 1 ? "" : "each time ";
  const say = taken ? `, ${taken === moved.length ? always : often}${said(goal.word)}` : "";
  return `${of}${moved.length} now ${moved.length === 1 ? "has" : "have"} another first choice${say}. ${hardest(rows)}`;
}

/** The first choice that has lost most. @param {Elsewhere[]} rows */
function hardest(rows) {
  const known = rows.filter(({ left }) => left !== null);
  if (!known.length) return "";
  const loss = (/** @type {any} */ row) => row.before.p - row.left;
  const worst = known.reduce((most, row) => (loss(row) > loss(most) ? row : most));
  if (loss(worst) <= 0) return "No first choice lost probability.";
  return `Hit hardest: ${said(worst.before.word)} after ‘${worst.text}’, from ${percent(worst.before.p)} to ${percent(worst.left)}.`;
}
