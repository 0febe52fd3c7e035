// @ts-check
// A number to compute by hand as a task: how it is asked for, what it is called in the result file, whether it is solved.

import { fit } from "./format.js";
import { find } from "./render.js";
import { numbersByHand } from "./result_file.js";

const SENTENCE = 60; // characters of it in a name

/** What is asked for: the sum, its sign or the shape. */
export const asked = { question: "sum" };

/** @param {any} state */
const place = ({ table, overview }) => ` · ${fit(table.name, SENTENCE)} · ${fit(overview.text, SENTENCE)}`;

/** blocks.0.a_7 gradient, sum: ∂w₆ of block 1 [3, 5] · model · sentence
 * @param {string} way  forward, backward or gradient @param {string} title  of the entry @param {any} state */
export const numberName = (way, title, state) =>
  `${state.station} ${way}, ${asked.question}: ${title.replace(/ = \?$/, "")}${place(state)}`;

/** What was done at this station with a number of this sentence: "solved", "tried" or "".
 * @param {string} station @param {string} direction @param {string} question @param {any} state */
export function stateOfTask(station, direction, question, state) {
  const ways = direction === "forward" ? ["forward"] : ["backward", "gradient"];
  const starts = ways.map((way) => `${station} ${way}, ${question}: `);
  const mine = numbersByHand().filter(({ name }) => starts.some((x) => name.startsWith(x)) && name.endsWith(place(state)));
  return mine.some((item) => item.solved) ? "solved" : mine.length ? "tried" : "";
}

/** @param {string} station @param {string} direction @param {string} question @param {any} state @param {any} actions */
export async function openTask(station, direction, question, state, actions) {
  asked.question = question;
  state.hand = { name: "", row: null, column: null, head: null };
  await actions.go(station, direction);
  find("hand")?.scrollIntoView();
  find("hand-toggle")?.focus({ preventScroll: true });
}
